"""``distopt compare A.json B.json ...``: runs side by side: what they sent, and what came of it."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distopt import experiment, plain, units
from distopt.checkpoint.error import printable
from distopt.cli import picture
from distopt.cli.comparison import (
    Aim,
    Record,
    Row,
    Spread,
    aim_at,
    base,
    missing,
    number_of_ranks,
    outside,
    per_step,
    points,
    ratio,
    reached,
    references,
    remarks,
    rows,
    spread,
    total,
)
from distopt.names import unknown

HEAD = "mode", "ranks", "seeds", "steps", "payload/step", "wire/step", "wire", "outside steps"


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("compare", help="show what runs sent and learned", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="records of distopt.experiment")
    parser.add_argument("--curve", metavar="NAME", help="for --reach and --plot; default: accuracy")
    parser.add_argument("--reach", type=float, metavar="X", help="show the bytes after which the curve comes to X")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve over wire bytes: .png, .svg or .pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same numbers")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table, and write what is asked for; 2 if an argument or a file is wrong."""
    try:
        _check(given)
        records = _read(given.paths)
        curve = _curve(given, records)
        aim = None if curve is None or given.reach is None else aim_at(curve, given.reach, records)
        found = rows(records)
        lines = remarks(found)
        for path, record in zip(given.paths, records, strict=True):
            lines += missing(str(path), record, curve, aim)
        print("\n".join([*table(found, aim), *map(printable, lines)]))
        if given.json:
            given.json.write_text(plain.dumps(numbers(found, aim)) + "\n")
        if curve is not None and given.plot:
            draw(found, curve, given.plot)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"distopt compare: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _check(given: argparse.Namespace) -> None:
    """Refuse wrong arguments before a record is read."""
    if given.reach is not None and not math.isfinite(given.reach):
        raise ValueError(f"--reach must be finite, got {given.reach}")
    picture.check_outputs(given.json, given.plot, given.paths)


def _read(paths: Sequence[Path]) -> list[Record]:
    places = [os.path.realpath(path) for path in paths]
    twice = next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice:
        raise ValueError(f"{twice} is given twice")
    records = [experiment.read(path) for path in paths]
    first: dict[str, Path] = {}
    for path, record in zip(paths, records, strict=True):
        if (other := first.setdefault(plain.dumps(record), path)) is not path:
            raise ValueError(f"{path} is a copy of {other}, and no other run")
    return records


def _curve(given: argparse.Namespace, records: Sequence[Record]) -> str | None:
    """The curve that is asked for, None if none is; ValueError if no run has it."""
    if given.curve is None and given.reach is None and given.plot is None:
        return None
    curve = given.curve or "accuracy"
    known = {name for record in records for name in record["curves"]}
    if curve not in known:
        raise ValueError(unknown("curve", curve, known))
    return str(curve)


def table(found: Sequence[Row], aim: Aim | None) -> list[str]:
    """Lines of the table; bytes are those of the rank that wrote a record, and of steps where nothing else is said."""
    results = result_names(found)
    head = [*HEAD, f"{references(found)[0].mode} sends", *results, *([f"wire to {aim}"] if aim else [])]
    return units.table([head, *(_cells(row, base(found, row), results, aim) for row in found)])


def _cells(row: Row, against: Row | None, results: Sequence[str], aim: Aim | None) -> list[str]:
    seeds = ["?" if r["seed"] is None else str(r["seed"]) for r in row.records]
    times = ratio(row, against)
    return [
        row.label,
        units.NONE if row.ranks is None else str(row.ranks),
        ", ".join(seeds),
        _shown(_of(row, "steps"), units.number),
        *(_shown(spread(per_step(r, count) for r in row.records), units.nbytes) for count in ("payload", "wire")),
        *(_shown(spread(of(r, "wire") for r in row.records), units.nbytes) for of in (total, outside)),
        units.NONE if times is None else f"{times:.3g} x" if times < 1000 else f"{times:,.0f} x",
        *(_shown(result(row, name), units.number) for name in results),
        *([_shown(spread(reached(r, aim) for r in row.records), units.nbytes)] if aim else []),
    ]


def _of(row: Row, field: str) -> Spread | None:
    return spread(record[field] for record in row.records)


def _shown(found: Spread | None, unit: Callable[[float], str]) -> str:
    """A spread as text: the mean, and the range where runs differ."""
    if found is None:
        return units.NONE
    mean, low, high = map(unit, found)
    return mean if low == high else f"{mean} ({low} to {high})"


def result_names(found: Sequence[Row]) -> list[str]:
    """Names of final numbers that any run has, in the order in which they come."""
    return list(dict.fromkeys(name for row in found for record in row.records for name in record["results"]))


def result(row: Row, name: str) -> Spread | None:
    """A final number of a row's runs."""
    return spread(record["results"].get(name) for record in row.records)


def numbers(found: Sequence[Row], aim: Aim | None) -> dict[str, Any]:
    """The table for programs: ranges as {mean, low, high}, null for what is not known."""

    def entry(row: Row) -> dict[str, Any]:
        counts = {
            f"{count}_{unit}": spread(of(r, count) for r in row.records)
            for count in ("payload", "wire")
            for unit, of in (("per_step", per_step), ("total", total), ("outside_steps", outside))
        }
        reach = {"reached": spread(reached(r, aim) for r in row.records)} if aim else {}
        against = base(found, row)
        spreads = {"steps": _of(row, "steps")} | counts | reach
        return {
            "label": row.label,
            "mode": row.mode,
            "ranks": row.ranks,
            "seeds": [record["seed"] for record in row.records],
            "base": against and against.label,
            "ratio": ratio(row, against),
            **{name: x and x._asdict() for name, x in spreads.items()},
            "results": {name: (x := result(row, name)) and x._asdict() for name in result_names(found)},
        }

    return {"aim": aim and aim._asdict(), "rows": [entry(row) for row in found]}


def draw(found: Sequence[Row], curve: str, path: Path) -> None:
    """The curve over the wire bytes, a line per run: a colour for each mode, dashes for each number of ranks.

    Raises ValueError if there is no point.
    """
    drawn = [[[p for p in points(r, curve) if p[0] > 0 and math.isfinite(p[1])] for r in row.records] for row in found]
    seen = [nbytes for runs in drawn for run in runs for nbytes, _ in run]
    if not seen:
        raise ValueError(f"nothing to draw: no run has the curves {curve} and wire, finite and with bytes above 0")
    figure, axes = picture.new(f"{curve} by bytes sent", "wire bytes of one rank (log)", curve)
    picture.log_axis(axes, "x", seen, units.nbytes)
    shown = [row for row, runs in zip(found, drawn, strict=True) if any(runs)]
    labels = list(dict.fromkeys(row.label for row in shown))
    ranks = list(dict.fromkeys(row.ranks for row in sorted(shown, key=number_of_ranks)))
    unnamed = set(labels)
    for row, runs in zip(found, drawn, strict=True):
        for run in filter(None, runs):
            style = picture.style(labels.index(row.label), ranks.index(row.ranks))
            label = row.label if row.label in unnamed else None  # once
            axes.plot(*zip(*run, strict=True), label=label, markevery=0.05, **style)
            unnamed.discard(row.label)
    variants = ["ranks unknown" if n is None else units.counted(n, "rank") for n in ranks]
    picture.legend(axes, picture.dashes(variants) if len(ranks) > 1 else [])
    picture.save(figure, path)
