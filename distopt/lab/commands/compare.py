"""``distopt compare A.json B.json ...``: a table of runs side by side: bytes sent, and results."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distopt import formatting
from distopt.checks import unknown_name
from distopt.formatting import printable
from distopt.io import strict_json
from distopt.lab import experiment
from distopt.lab.commands import comparison, plotting
from distopt.lab.commands.comparison import Aim, Record, RunGroup, Spread


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("compare", help="show what runs sent and learned", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="records of distopt.experiment")
    parser.add_argument("--curve", metavar="NAME", help="for --reach and --plot; default: accuracy")
    parser.add_argument("--reach", type=float, metavar="X", help="show the bytes after which the curve comes to X")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve over wire bytes: .png, .svg or .pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same numbers")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the table, and write the files that are asked for; return 2 if an argument or a file is wrong."""
    try:
        if args.reach is not None and not math.isfinite(args.reach):
            raise ValueError(f"--reach must be finite, got {args.reach}")
        plotting.check_outputs({"--json": args.json, "--plot": args.plot}, args.paths)
        records = _read(args.paths)
        curve = _curve(args, records)
        aim = None if curve is None or args.reach is None else comparison.aim_at(curve, args.reach, records)
        table_rows = comparison.rows(records)
        lines = comparison.remarks(table_rows)
        for path, record in zip(args.paths, records, strict=True):
            lines += comparison.missing(str(path), record, curve, aim)
        print("\n".join([*table(table_rows, aim), *map(printable, lines)]))
        if args.json:
            args.json.write_text(strict_json.dumps(comparison.numbers(table_rows, aim)) + "\n")
        if curve is not None and args.plot:
            draw(table_rows, curve, args.plot)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"distopt compare: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _read(paths: Sequence[Path]) -> list[Record]:
    places = [os.path.realpath(path) for path in paths]
    twice = next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice:
        raise ValueError(f"each file must be given once, got {twice} twice")
    records = [experiment.read(path) for path in paths]
    first: dict[str, Path] = {}
    for path, record in zip(paths, records, strict=True):
        if (other := first.setdefault(strict_json.dumps(record), path)) is not path:
            raise ValueError(f"each file must be a run of its own, got {path}, which is a copy of {other}")
    return records


def _curve(args: argparse.Namespace, records: Sequence[Record]) -> str | None:
    """Return the curve that is asked for, None if none is; ValueError if no run has it."""
    if args.curve is None and args.reach is None and args.plot is None:
        return None
    curve = args.curve or "accuracy"
    known = {name for record in records for name in record["curves"]}
    if curve not in known:
        raise ValueError(unknown_name("curve", curve, known))
    return str(curve)


def table(table_rows: Sequence[RunGroup], aim: Aim | None) -> list[str]:
    """Return the lines of the table; bytes are those of the rank that wrote a record.

    They are the bytes of steps where the column does not say otherwise.
    """
    results, base = comparison.result_names(table_rows), comparison.references(table_rows)[0]
    lines = []
    for row in table_rows:
        spreads = comparison.spreads(row, aim)
        columns = {
            "mode": row.label,
            "ranks": formatting.NONE if row.ranks is None else str(row.ranks),
            "seeds": ", ".join("?" if r["seed"] is None else str(r["seed"]) for r in row.records),
            "steps": _shown(spreads["steps"], formatting.number),
            "payload/step": _shown(spreads["payload_per_step"], formatting.nbytes),
            "wire/step": _shown(spreads["wire_per_step"], formatting.nbytes),
            "wire": _shown(spreads["wire_total"], formatting.nbytes),
            "outside steps": _shown(spreads["wire_outside_steps"], formatting.nbytes),
            f"{base.mode} sends": formatting.times(comparison.ratio(row, comparison.base(table_rows, row))),
        }
        found = [(name, _shown(comparison.result(row, name), formatting.number)) for name in results]
        reach = [(f"wire to {aim}", _shown(spreads["reached"], formatting.nbytes))] if aim else []
        lines.append([*columns.items(), *found, *reach])
    return formatting.table([[name for name, _ in lines[0]], *([cell for _, cell in line] for line in lines)])


def _shown(values: Spread | None, unit: Callable[[float], str]) -> str:
    """Format a spread: the mean, and the range where runs differ."""
    if values is None:
        return formatting.NONE
    mean, low, high = map(unit, values)
    return mean if low == high else f"{mean} ({low} to {high})"


@plotting.styled()
def draw(table_rows: Sequence[RunGroup], curve: str, path: Path) -> None:
    """Draw a curve over the wire bytes, a line per run: a colour for each mode, dashes for each number of ranks.

    Raises:
        ValueError: there is no point to draw.
    """
    drawn = [
        [[p for p in comparison.points(record, curve) if p[0] > 0 and math.isfinite(p[1])] for record in row.records]
        for row in table_rows
    ]
    seen = [nbytes for runs in drawn for run in runs for nbytes, _ in run]
    if not seen:
        raise ValueError(f"nothing to draw: no run has the curves {curve} and wire, finite and with bytes above 0")
    figure, axes = plotting.new(f"{curve} by bytes sent", "wire bytes of one rank (log)", curve)
    plotting.log_axis(axes, "x", seen, formatting.nbytes)
    shown = [row for row, runs in zip(table_rows, drawn, strict=True) if any(runs)]
    labels = list(dict.fromkeys(row.label for row in shown))
    ranks = list(dict.fromkeys(row.ranks for row in sorted(shown, key=comparison.number_of_ranks)))
    unnamed = set(labels)
    for row, runs in zip(table_rows, drawn, strict=True):
        for run in filter(None, runs):
            style = plotting.look(labels.index(row.label), ranks.index(row.ranks))
            label = row.label if row.label in unnamed else None  # once
            axes.plot(*zip(*run, strict=True), label=label, markevery=0.05, **style)
            unnamed.discard(row.label)
    variants = ["ranks unknown" if n is None else formatting.counted(n, "rank") for n in ranks]
    plotting.legend(axes, plotting.dashes(variants) if len(ranks) > 1 else [])
    plotting.save(figure, path)
