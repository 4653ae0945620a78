"""The numbers of ``distopt compare``: rows of runs, what they sent and reached, and what is missing."""

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from distopt.comm.ledger import of_steps
from distopt.formatting import nbytes
from distopt.io import strict_json

Record = dict[str, Any]
Point = tuple[float, float]  # wire bytes so far, and a curve's value


class Spread(NamedTuple):
    """The mean and the range of several runs; all three are equal, and exact, where the runs agree."""

    mean: float
    low: float
    high: float


class Aim(NamedTuple):
    """A value for a curve to come to: at least to it if the curve ``rises``, as accuracy, else at most."""

    curve: str
    value: float
    rises: bool

    def __str__(self) -> str:
        return f"{self.curve} {'>=' if self.rises else '<='} {self.value:g}"


class RunGroup(NamedTuple):
    """Runs of one mode on the same number of ranks, with the same settings.

    The label is the mode, and the settings in which the row differs from others of this mode and number of ranks.
    """

    label: str
    records: list[Record]

    @property
    def ranks(self) -> int | None:
        """None if the records do not say."""
        return self.records[0]["topology"]["ranks"]  # type: ignore[no-any-return]

    @property
    def mode(self) -> str:
        """The mode of each run."""
        return str(self.records[0]["mode"])


def rows(records: Iterable[Record]) -> list[RunGroup]:
    """Group runs that differ in nothing but the seed into rows; rows of a mode are neighbours, few ranks before many.

    Modes come in the order in which they are given, and so do settings of a mode on the same number of ranks.
    """
    runs_by_mode: dict[tuple[str, int | None], dict[str, list[Record]]] = {}
    for record in records:
        kinds = runs_by_mode.setdefault((record["mode"], record["topology"]["ranks"]), {})
        kinds.setdefault(strict_json.dumps(dict(sorted(record["settings"].items()))), []).append(record)
    made = []
    for kinds in runs_by_mode.values():
        of_kinds = [_texts(runs[0]) for runs in kinds.values()]
        for settings, runs in zip(of_kinds, kinds.values(), strict=True):
            names = [n for n in sorted(settings) if any(other.get(n) != settings[n] for other in of_kinds)]
            made.append(RunGroup(" ".join([runs[0]["mode"], *(f"{n}={settings[n]}" for n in names)]), runs))
    modes = list(dict.fromkeys(row.mode for row in made))
    return sorted(made, key=lambda row: (modes.index(row.mode), number_of_ranks(row)))


def number_of_ranks(row: RunGroup) -> float:
    """Return a key that sorts rows by ranks; those that do not say come last."""
    return math.inf if row.ranks is None else row.ranks


def _texts(record: Record) -> dict[str, str]:
    return {name: strict_json.dumps(value) for name, value in record["settings"].items()}


def references(table_rows: Sequence[RunGroup]) -> list[RunGroup]:
    """Return the rows that others are compared with: the dense ones, else those with the label of the first row."""
    return [row for row in table_rows if row.mode == "dense"] or [
        row for row in table_rows if row.label == table_rows[0].label
    ]


def base(table_rows: Sequence[RunGroup], row: RunGroup) -> RunGroup | None:
    """Return the reference on the same number of ranks with the most similar settings; None if there is none."""

    def apart(other: RunGroup) -> tuple[int, int]:
        same = _texts(row.records[0]).items() & _texts(other.records[0]).items()
        return len(_differences(row, other)), -len(same)

    return min((other for other in references(table_rows) if other.ranks == row.ranks), key=apart, default=None)


def remarks(table_rows: Sequence[RunGroup]) -> list[str]:
    """Return a line for each row with known bytes that is compared with nothing, or with a row of other settings.

    There is also one for each seed that several runs of a row have.
    """
    lines = []
    for row in table_rows:
        if not any(per_step(record, "wire") for record in row.records):
            continue
        against = base(table_rows, row)
        other = ", ".join(_differences(row, against)) if against else ""
        if against is None:
            where = "without a number of ranks" if row.ranks is None else f"on {row.ranks} ranks"
            lines.append(f"{row.label}: no {references(table_rows)[0].mode} run {where} to compare it with")
        elif other:
            lines.append(f"{row.label}: compared with {against.label}, which has another {other}")
    for row in table_rows:
        seeds = Counter(record["seed"] for record in row.records if record["seed"] is not None)
        for seed, n in seeds.items():
            if n > 1:
                lines.append(f"{row.label}: {n} runs have the same seed {seed}, and each counts in the means")
    return lines


def _differences(row: RunGroup, other: RunGroup) -> list[str]:
    """Return the names of settings that both rows have, and that differ."""
    mine, theirs = (_texts(r.records[0]) for r in (row, other))
    return [name for name in sorted(mine) if name in theirs and theirs[name] != mine[name]]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the mean and the range of numbers; None if there are none, or one of them is unknown."""
    numbers = list(values)
    known = [x for x in numbers if x is not None]
    if not numbers or len(known) < len(numbers):
        return None
    if any(map(math.isnan, known)):
        return Spread(math.nan, math.nan, math.nan)
    low, high = min(known), max(known)
    return Spread(low if low == high else statistics.fmean(known), low, high)


def total(record: Record, count: str) -> int | None:
    """Return the bytes of all steps of a run, 'payload' or 'wire'; None if the record does not say."""
    return _sum_of_lines(record, count, of_steps)


def outside(record: Record, count: str) -> int | None:
    """Return the bytes sent outside of steps: parameters at the start, observations, messages of the script's own."""
    return _sum_of_lines(record, count, lambda line: not of_steps(line))


def _sum_of_lines(record: Record, count: str, wanted: Callable[[str], bool]) -> int | None:
    totals = record["totals"]
    if totals is None or not all(isinstance(x, dict) and isinstance(x.get(count), int) for x in totals.values()):
        return None
    return sum(int(counts[count]) for line, counts in totals.items() if wanted(line))


def per_step(record: Record, count: str) -> float | None:
    """Return the mean bytes of a step, among those that are counted; None if unknown."""
    nbytes_of_steps, steps = total(record, count), record["steps"] - (record["counted_from"] or 0)
    return None if nbytes_of_steps is None or not steps else nbytes_of_steps / steps


def ratio(row: RunGroup, against: RunGroup | None) -> float | None:
    """Return how many times fewer wire bytes a step of ``row`` takes than one of ``against``, both as means."""
    if against is None:
        return None
    mine, other = (spread(per_step(record, "wire") for record in r.records) for r in (row, against))
    return other.mean / mine.mean if mine and other and mine.mean > 0 else None


def points(record: Record, curve: str) -> list[Point]:
    """Return a curve over the wire bytes that it took so far; empty if either was not logged, or bytes not from 0 on.

    Where bytes were not logged at the same step, those of the next step at which they were count: an upper bound.
    """
    if record["counted_from"] or curve not in record["curves"] or "wire" not in record["curves"]:
        return []
    wire, values = record["curves"]["wire"], record["curves"][curve]
    places = [bisect.bisect_left(wire["steps"], step) for step in values["steps"]]
    pairs = zip(places, values["values"], strict=True)
    return [(wire["values"][k], value) for k, value in pairs if k < len(wire["steps"])]


def aim_at(curve: str, value: float, records: Iterable[Record]) -> Aim:
    """Return an aim for a curve, which falls if more runs end below where they began than above."""
    shown = [[x for x in r["curves"][curve]["values"] if not math.isnan(x)] for r in records if curve in r["curves"]]
    return Aim(curve, value, sum((x[-1] > x[0]) - (x[-1] < x[0]) for x in shown if x) >= 0)


def reached(record: Record, aim: Aim) -> float | None:
    """Return the wire bytes after which a curve first reached the aim; None if it did not, or they are unknown."""
    sign = 1 if aim.rises else -1
    return next((wire for wire, value in points(record, aim.curve) if sign * value >= sign * aim.value), None)


def missing(name: str, record: Record, curve: str | None, aim: Aim | None) -> list[str]:
    """Return lines that say what is unknown of a run, and why."""
    lines = []
    if record["raised"]:
        lines.append(f"ended by {record['raised']} after step {record['steps']}")
    if total(record, "wire") is None:
        lines.append("totals do not say payload and wire, so bytes are unknown")
    elif not record["steps"]:
        lines.append("no steps, so bytes per step are unknown")
    elif not total(record, "wire") and (by_hand := outside(record, "wire")):
        lines.append(f"its steps sent nothing; the {nbytes(by_hand)} outside of them are not compared")
    if begun := record["counted_from"]:
        until = f"those until {aim} are" if aim else "a curve over all of them is" if curve else ""
        unknown = f", so {until} unknown" * bool(until)
        lines.append(f"bytes are counted from step {begun} of {record['steps']}, where its ledger began{unknown}")
    lacking = [n for n in (curve, "wire") if n is not None and n not in record["curves"]] if curve else []
    if lacking:
        lines.append(f"no curve {' and no curve '.join(lacking)}")
    elif aim and not begun and reached(record, aim) is None:
        lines.append(f"does not come to {aim} where bytes are known")
    if curve and (strange := sum(not math.isfinite(x) for x in record["curves"].get(curve, {}).get("values", ()))):
        lines.append(f"{strange} of {len(record['curves'][curve]['values'])} values of {curve} are not finite")
    if curve and "wire" in record["curves"]:  # its last point, beside the totals
        last, steps_total, more = record["curves"]["wire"]["values"][-1], total(record, "wire"), outside(record, "wire")
        if steps_total is not None and more is not None and last == steps_total + more != steps_total:
            lines.append(f"the curve wire has also the {nbytes(more)} sent outside of steps")
        elif steps_total is not None and more is not None and last != steps_total:
            lines.append(f"the curve wire ends at {nbytes(last)} of {nbytes(steps_total)}")
    return [f"{name}: {line}" for line in lines]


def result_names(table_rows: Sequence[RunGroup]) -> list[str]:
    """Return the names of final numbers that any run has, in the order in which they come."""
    return list(dict.fromkeys(name for row in table_rows for record in row.records for name in record["results"]))


def result(row: RunGroup, name: str) -> Spread | None:
    """Return a final number of a row's runs, as a spread."""
    return spread(record["results"].get(name) for record in row.records)


def spreads(row: RunGroup, aim: Aim | None) -> dict[str, Spread | None]:
    """Return what a row's runs sent, and after which bytes they reached the aim, by the names that JSON has for it."""
    counts = {
        f"{count}_{unit}": spread(of(r, count) for r in row.records)
        for count in ("payload", "wire")
        for unit, of in (("per_step", per_step), ("total", total), ("outside_steps", outside))
    }
    reach = {"reached": spread(reached(r, aim) for r in row.records)} if aim else {}
    return {"steps": spread(r["steps"] for r in row.records)} | counts | reach


def numbers(table_rows: Sequence[RunGroup], aim: Aim | None) -> dict[str, Any]:
    """Return the table for programs: ranges as {mean, low, high}, null for unknown numbers."""

    def entry(row: RunGroup) -> dict[str, Any]:
        against = base(table_rows, row)
        return {
            "label": row.label,
            "mode": row.mode,
            "ranks": row.ranks,
            "seeds": [record["seed"] for record in row.records],
            "counted_from": [record["counted_from"] for record in row.records],
            "base": against and against.label,
            "ratio": ratio(row, against),
            **{name: x and x._asdict() for name, x in spreads(row, aim).items()},
            "results": {name: (x := result(row, name)) and x._asdict() for name in result_names(table_rows)},
        }

    return {"aim": aim and aim._asdict(), "rows": [entry(row) for row in table_rows]}
