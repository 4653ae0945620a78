"""The numbers of ``distopt compare``: rows of runs, what each is compared with, and what is missing."""

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from distopt import plain
from distopt.ledger import of_steps
from distopt.units import nbytes

Record = dict[str, Any]
Point = tuple[float, float]  # wire bytes so far, and a curve's value


class Spread(NamedTuple):
    """The mean of several runs, and the range; all three are the same, and exact, where the runs agree."""

    mean: float
    low: float
    high: float


class Aim(NamedTuple):
    """A value for a curve to reach: at least ``value`` if it rises, as accuracy does, else at most."""

    curve: str
    value: float
    rises: bool

    def __str__(self) -> str:
        return f"{self.curve} {'>=' if self.rises else '<='} {self.value:g}"


class Row(NamedTuple):
    """Runs of one mode on as many ranks, with the same settings."""

    label: str  # the mode, and the settings in which it differs from others of this mode and number of ranks
    records: list[Record]

    @property
    def ranks(self) -> int | None:
        """Number of ranks of each run; None if they do not say."""
        return self.records[0]["topology"]["ranks"]  # type: ignore[no-any-return]

    @property
    def mode(self) -> str:
        """Mode of each run."""
        return str(self.records[0]["mode"])


def rows(records: Iterable[Record]) -> list[Row]:
    """Make one row of runs that differ in nothing but the seed; rows of a mode are neighbours, few ranks before many.

    Modes come in the order in which they are given, and so do settings of a mode on as many ranks.
    """
    found: dict[tuple[str, int | None], dict[str, list[Record]]] = {}
    for record in records:
        kinds = found.setdefault((record["mode"], record["topology"]["ranks"]), {})
        kinds.setdefault(plain.dumps(dict(sorted(record["settings"].items()))), []).append(record)
    made = [Row(_label(runs[0], kinds), runs) for kinds in found.values() for runs in kinds.values()]
    modes = list(dict.fromkeys(row.mode for row in made))
    return sorted(made, key=lambda row: (modes.index(row.mode), number_of_ranks(row)))


def number_of_ranks(row: Row) -> float:
    """A key that sorts rows by ranks; those that do not say come last."""
    return math.inf if row.ranks is None else row.ranks


def _label(record: Record, kinds: dict[str, list[Record]]) -> str:
    own, *others = map(_texts, [record, *(runs[0] for runs in kinds.values())])
    names = (name for name in sorted(own) if any(other.get(name) != own[name] for other in others))
    return " ".join([record["mode"], *(f"{name}={own[name]}" for name in names)])


def _texts(record: Record) -> dict[str, str]:
    return {name: plain.dumps(value) for name, value in record["settings"].items()}


def references(found: Sequence[Row]) -> list[Row]:
    """The rows that others are compared with: those that are dense, else the first, on any number of ranks."""
    return [row for row in found if row.mode == "dense"] or [row for row in found if row.label == found[0].label]


def base(found: Sequence[Row], row: Row) -> Row | None:
    """The reference on as many ranks that is most alike in the settings; None if there is none on so many."""

    def apart(other: Row) -> tuple[int, int]:
        same = _texts(row.records[0]).items() & _texts(other.records[0]).items()
        return len(_differences(row, other)), -len(same)

    return min((other for other in references(found) if other.ranks == row.ranks), key=apart, default=None)


def remarks(found: Sequence[Row]) -> list[str]:
    """A line for each row whose bytes are known, and which is compared with nothing, or with what was set otherwise."""
    known = [row for row in found if any(per_step(record, "wire") for record in row.records)]
    return [f"{row.label}: {why}" for row in known if (why := _remark(found, row))]


def _remark(found: Sequence[Row], row: Row) -> str:
    against = base(found, row)
    if against is None:
        where = "without a number of ranks" if row.ranks is None else f"on {row.ranks} ranks"
        return f"no {references(found)[0].mode} run {where} to compare it with"
    other = ", ".join(_differences(row, against))
    return f"compared with {against.label}, which has another {other}" if other else ""


def _differences(row: Row, other: Row) -> list[str]:
    """Names of settings that both rows have, and that differ."""
    own, theirs = (_texts(r.records[0]) for r in (row, other))
    return [name for name in sorted(own) if name in theirs and theirs[name] != own[name]]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and range of numbers; None if one of them is not known."""
    found = list(values)
    known = [x for x in found if x is not None]
    if not found or len(known) < len(found):
        return None
    if any(map(math.isnan, known)):
        return Spread(math.nan, math.nan, math.nan)
    low, high = min(known), max(known)
    return Spread(low if low == high else statistics.fmean(known), low, high)


def total(record: Record, count: str) -> int | None:
    """Bytes of all steps of a run, ``count`` being 'payload' or 'wire'; None if the record does not say."""
    return _sum_of_lines(record, count, of_steps)


def outside(record: Record, count: str) -> int | None:
    """Bytes that are no step's: parameters at the start, looks at quality, what was sent by hand."""
    return _sum_of_lines(record, count, lambda line: not of_steps(line))


def _sum_of_lines(record: Record, count: str, wanted: Callable[[str], bool]) -> int | None:
    totals = record["totals"]
    if totals is None or not all(isinstance(x, dict) and isinstance(x.get(count), int) for x in totals.values()):
        return None
    return sum(int(counts[count]) for line, counts in totals.items() if wanted(line))


def per_step(record: Record, count: str) -> float | None:
    """Mean bytes of a step."""
    found = total(record, count)
    return None if found is None or not record["steps"] else found / record["steps"]


def ratio(row: Row, against: Row | None) -> float | None:
    """How many times fewer wire bytes a step takes than the other's, both as means."""
    if against is None:
        return None
    own, other = (spread(per_step(record, "wire") for record in r.records) for r in (row, against))
    return other.mean / own.mean if own and other and own.mean > 0 else None


def points(record: Record, curve: str) -> list[Point]:
    """A curve over the wire bytes that it took so far; empty without one or the other.

    Where bytes were not logged at the same step, those of the next step at which they were: not fewer than it took.
    """
    if curve not in record["curves"] or "wire" not in record["curves"]:
        return []
    wire, values = record["curves"]["wire"], record["curves"][curve]
    places = [bisect.bisect_left(wire["steps"], step) for step in values["steps"]]
    pairs = zip(places, values["values"], strict=True)
    return [(wire["values"][k], value) for k, value in pairs if k < len(wire["steps"])]


def aim_at(curve: str, value: float, records: Iterable[Record]) -> Aim:
    """An aim for a curve, which falls if more runs end below where they began than above."""
    shown = [[x for x in r["curves"][curve]["values"] if not math.isnan(x)] for r in records if curve in r["curves"]]
    return Aim(curve, value, sum((x[-1] > x[0]) - (x[-1] < x[0]) for x in shown if x) >= 0)


def reached(record: Record, aim: Aim) -> float | None:
    """The wire bytes after which a curve first came to a value; None if it did not, or they are not known."""
    sign = 1 if aim.rises else -1
    return next((wire for wire, value in points(record, aim.curve) if sign * value >= sign * aim.value), None)


def missing(name: str, record: Record, curve: str | None, aim: Aim | None) -> list[str]:
    """Lines that say what is not known of a run, and why."""
    found = []
    if record["raised"]:
        found.append(f"ended by {record['raised']} after step {record['steps']}")
    if total(record, "wire") is None:
        found.append("totals do not say payload and wire, so bytes are unknown")
    elif not record["steps"]:
        found.append("no steps, so bytes per step are unknown")
    elif not total(record, "wire") and (by_hand := outside(record, "wire")):
        found.append(f"its steps sent nothing; the {nbytes(by_hand)} outside of them are not compared")
    lacking = [n for n in (curve, "wire") if n is not None and n not in record["curves"]] if curve else []
    if lacking:
        found.append(f"no curve {' and no curve '.join(lacking)}")
    elif aim and reached(record, aim) is None:
        found.append(f"does not come to {aim} where bytes are known")
    if curve and (strange := sum(not math.isfinite(x) for x in record["curves"].get(curve, {}).get("values", ()))):
        found.append(f"{strange} of {len(record['curves'][curve]['values'])} values of {curve} are not finite")
    if curve and "wire" in record["curves"]:
        found += _odd_end(record)
    return [f"{name}: {line}" for line in found]


def _odd_end(record: Record) -> list[str]:
    """How the curve of wire bytes disagrees with the totals, in a line."""
    last, whole, more = record["curves"]["wire"]["values"][-1], total(record, "wire"), outside(record, "wire")
    if whole is None or more is None or last == whole:
        return []
    if last == whole + more:
        return [f"the curve wire has also the {nbytes(more)} sent outside of steps"]
    return [f"the curve wire ends at {nbytes(last)} of {nbytes(whole)}"]
