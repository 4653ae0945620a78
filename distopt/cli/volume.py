"""``distopt volume``: how many bytes a model sends in a step, by mode and number of ranks, and how long that takes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distopt import Tape, plain
from distopt.checkpoint.error import printable
from distopt.cli import picture, setting, volume_picture
from distopt.cli.gradients import Replay, bar
from distopt.cli.volume_rows import Row, between, rows
from distopt.tables import Members
from distopt.units import NONE, counted, nbytes, seconds, table
from distopt.volume import Mode, Question, buckets, modes, shapes
from distopt.volume.advice import described, measured, notes

MODES, RANKS = "dense,half,2bit,topk=0.01,dgc=0.001", "2,8,64,1024"
HEAD = (
    "mode",
    "ranks",
    "payload/step",
    "wire/step",
    "leaves node",
    "dense sends",
    "sent dense",
    "wire time",
    "compute",
    "exchange",
)


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("volume", help="show what a model would send, and how long", description=__doc__)
    setting.add_setting(parser, MODES, RANKS)
    parser.add_argument("--gradients", type=Path, metavar="TAPE", help="count what these send (distopt record)")
    parser.add_argument("--steps", type=int, metavar="K", help="of the tape, the first ones; default: all")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same numbers")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table, and write what is asked for; 2 if an argument or a file is wrong."""
    try:
        picture.check_outputs(given.json, given.plot, [given.model, given.fit, given.gradients])
        network, chosen = setting.wire(given), modes(given.modes)
        ranks = setting.ranks(given, network)
        replay, gradients = _gradients(given, chosen, ranks)
        question = Question(gradients, 1, network)
        if not replay:
            for mode in chosen:  # what needs gradients is refused before anything is measured
                question.predict(mode)
        question = question._replace(computes=measured(chosen, setting.computing(given)))
        found = rows(question, chosen, ranks, replay)
        model = _model(given)
        print("\n".join([_title(question, model, replay), *_table(found, question, not given.no_measure)]))
        if given.json:
            given.json.write_text(plain.dumps(numbers(found, question, model, replay)) + "\n")
        if given.plot:
            more = [] if replay else rows(question, chosen, between(ranks, network), None)
            volume_picture.draw(found, more, question, model, given.plot)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(f"distopt volume: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _gradients(
    given: argparse.Namespace, chosen: Sequence[Mode], ranks: Sequence[int]
) -> tuple[Replay | None, list[Members]]:
    """Recorded ones, if there are any, and the buckets that they or a model's make."""
    if given.gradients is None:
        if given.steps is not None:
            raise ValueError("--steps are those of a tape: give it with --gradients")
        return None, buckets(shapes(_model(given))[::-1], given.threshold)
    tape = Tape(given.gradients)
    if given.model is not None:
        tape.check(shapes(given.model))
    steps = len(tape.steps) if given.steps is None else min(given.steps, len(tape.steps))
    replay = Replay(tape, given.steps, given.threshold, bar(steps * len(chosen) * len(ranks)))
    replay.check(chosen, ranks[-1])
    return replay, replay.buckets


def _model(given: argparse.Namespace) -> str:
    """Its name, or that of the tape."""
    tape: Path | None = given.gradients
    return given.model if given.model is not None else tape.name if tape else setting.MODEL


def _title(question: Question, model: str, replay: Replay | None) -> str:
    tensors = sum(len(bucket.names) for bucket in question.buckets)
    elements = sum(int(bucket.rows["size"].sum()) for bucket in question.buckets)
    source = f"; {counted(len(replay.steps), 'recorded step')}" if replay else ""
    size = f"{counted(tensors, 'tensor')}, {elements:,} elements, {counted(len(question.buckets), 'bucket')}"
    return f"{printable(model)}: {size}; {described(question.wire)}{source}; bytes of one rank"


def _table(found: Sequence[Row], question: Question, measured: bool) -> list[str]:
    idle = set() if any(row.sends.between != row.sends.sent for row in found) else {"leaves node"}
    idle |= set() if any(row.sends.fallen for row in found) else {"sent dense"}
    lines = [HEAD, *(_cells(row, len(question.buckets), measured) for row in found)]
    return [
        *table([[c for c, name in zip(line, HEAD, strict=True) if name not in idle] for line in lines]),
        *notes(question.wire, measured),
    ]


def _cells(row: Row, buckets: int, measured: bool) -> list[str]:
    times = row.dense / row.sends.sent if row.sends.sent else None
    return [
        row.mode.name,
        str(row.ranks),
        nbytes(row.sends.payload),
        nbytes(row.sends.sent),
        nbytes(row.sends.between),
        NONE if times is None else f"{times:.3g} x" if times < 1000 else f"{times:,.0f} x",
        f"{len(row.sends.fallen)} of {buckets}" if row.sends.fallen else NONE,
        seconds(row.takes.wire),
        seconds(row.takes.compute) if measured else NONE,
        seconds(row.takes.exchange),
    ]


def numbers(found: Sequence[Row], question: Question, model: str, replay: Replay | None) -> dict[str, Any]:
    """What the table shows, for programs, exactly."""
    return {
        "model": model,
        "network": described(question.wire),
        "link": question.wire.link._asdict(),
        "buckets": len(question.buckets),
        "steps": len(replay.steps) if replay else None,
        "rows": [
            {
                "mode": row.mode.name,
                "ranks": row.ranks,
                **row.sends._asdict(),
                "dense_sent": row.dense,
                "wire_seconds": row.takes.wire,
                "compute_seconds": row.takes.compute if question.computes else None,
                "exchange_seconds": row.takes.exchange,
            }
            for row in found
        ],
    }
