"""``distopt volume``: the bytes that a model sends in a step, by mode and number of ranks, and the time that takes."""

import argparse
import csv
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distopt.checks import check_int
from distopt.comm.ranks import in_each
from distopt.exchange.hierarchical import adds_inside
from distopt.formatting import NONE, counted, nbytes, printable, seconds, table, times
from distopt.io import strict_json
from distopt.kernels.layout import BucketLayout
from distopt.lab import (
    Forecast,
    Mode,
    Prediction,
    Question,
    Sending,
    Wire,
    buckets,
    forecast,
    modes,
    observed,
    sendings,
    shapes,
    summary,
)
from distopt.lab.advice import described, measured, notes
from distopt.lab.break_even import DENSE, density
from distopt.lab.commands import plotting, setting
from distopt.lab.simulate import simulate
from distopt.lab.tape import Tape
from distopt.optim import SGD

MODES, RANKS = "dense,half,int8,2bit,topk=0.01,dgc=0.001", "2,8,64,1024"
WIDTH = 30  # of a progress bar
DENSITIES = [10 ** (k / 8 - 5) for k in range(41)]  # that are drawn, 0.00001 to 1
NEAR = 1.4  # times a number of ranks: labels would meet


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("volume", help="show what a model would send, and how long", description=__doc__)
    setting.add_setting(parser, MODES, RANKS)
    parser.add_argument("--gradients", type=Path, metavar="TAPE", help="count what these send (distopt record)")
    parser.add_argument("--steps", type=int, metavar="K", help="of the tape, the first ones; default: all")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same numbers")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write those of the table, for any tool that plots")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the table, and write the files that are asked for; return 2 if an argument or a file is wrong."""
    try:
        outputs = {"--json": args.json, "--csv": args.csv, "--plot": args.plot}
        plotting.check_outputs(outputs, [args.model, args.fit, args.gradients])
        network, chosen = setting.wire(args), modes(args.modes)
        ranks = setting.ranks(args, network)
        tape = None if args.gradients is None else Tape(args.gradients)
        model = args.model if args.model is not None else args.gradients.name if tape else setting.MODEL
        replay, gradients = _gradients(args, model, tape, chosen, ranks)
        question = Question(gradients, ranks[-1], network, logical=args.logical)
        if not replay:
            for mode in chosen:  # what needs gradients is refused before anything is measured
                question.predict(mode)
        question = question._replace(computes=measured(chosen, setting.computing(args)))
        table_rows = rows(question, chosen, ranks, replay)
        print("\n".join(_shown(table_rows, question, model, replay, not args.no_measure)))
        found = numbers(table_rows, question, model, replay)
        if args.json:
            args.json.write_text(strict_json.dumps(found) + "\n")
        if args.csv:
            with args.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, found["rows"][0])
                writer.writeheader()
                writer.writerows(row | {"fallen": len(row["fallen"])} for row in found["rows"])
        if args.plot:
            more = [] if replay else rows(question, chosen, between(ranks, network), None)
            draw(table_rows, more, question, model, args.plot)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(f"distopt volume: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


# -------------------------------------------------------------------------------------------------- gradients of a tape


class Replay:
    """The first ``steps`` steps of a tape, None for all, which are sent again for each mode and number of ranks.

    ``tick`` is called after each step with a text to show.
    """

    def __init__(self, tape: Tape, steps: int | None, threshold: int, tick: Callable[[str], None]):
        self.tape, self._threshold, self._tick = tape, threshold, tick
        self.steps = tape.steps[: len(tape.steps) if steps is None else check_int("--steps", steps, least=1)]
        shapes = [(entry.name, entry.shape) for entry in tape.order]
        self.buckets = buckets(shapes, threshold, [entry.dtype for entry in tape.order])

    def check(self, chosen: Sequence[Mode], ranks: int) -> None:
        """Raise ValueError for local steps, whose gradients are others, or for more state than there is memory."""
        local = [mode.name for mode in chosen if mode.windows.every > 1]
        if local:
            raise ValueError(
                f"modes must exchange gradients at each step for a tape, which has those of one model, got {local[0]}; "
                "count its bytes by formula, without --gradients, or train with distopt.simulate_local"
            )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flat = sum(bucket.extent * bucket.dtype.itemsize for bucket in self.buckets)
        for mode in chosen:
            kept = ranks * flat * (1 + mode.compressor.traits.corrects_momentum) * mode.compressor.traits.stateful
            if kept > memory:
                raise ValueError(
                    f"the residuals of --ranks {ranks} with {mode.name} must fit into the {nbytes(memory)} of this "
                    f"machine, got {nbytes(kept)}; take fewer ranks"
                )

    def send(self, mode: Mode, ranks: int, per_node: int) -> tuple[Forecast, list[Sending]]:
        """Return the bytes of the mean step of so many virtual ranks."""
        hosts = [rank // per_node for rank in range(ranks)]
        sim = simulate(ranks, SGD(0.0), threshold=self._threshold, nonfinite="propagate", hosts=hosts)
        for step in self.steps:
            sim.step(self.tape.losses(step), mode.compressor)
            self._tick(f"{mode.name}, {ranks} ranks")
        of_steps = sim.ledger, self.buckets, mode, len(self.steps)
        # What goes by nodes has as many bytes whatever the gradients are.
        by_nodes = adds_inside("auto", mode.compressor, self.buckets, hosts)
        sent = sendings(self.buckets, mode, ranks, per_node=per_node) if by_nodes else observed(*of_steps)
        return summary(*of_steps), sent


def bar(total: int) -> Callable[[str], None]:
    """Return a function to call ``total`` times, which shows progress on the standard error, if it is a terminal."""
    done = 0

    def tick(text: str) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            filled = "#" * (WIDTH * done // total)
            line = f"[{filled:{WIDTH}}] {done}/{total} {text}"[: shutil.get_terminal_size().columns - 1]
            end = "\n" if done == total else ""
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)

    return tick


def _gradients(
    args: argparse.Namespace, model: str, tape: Tape | None, chosen: Sequence[Mode], ranks: Sequence[int]
) -> tuple[Replay | None, list[BucketLayout]]:
    """Return the recorded gradients, if given, and the buckets that they or a model's gradients make."""
    if tape is None:
        if args.steps is not None:
            raise ValueError("--steps must be those of a tape, got none; give it with --gradients")
        return None, buckets(shapes(model)[::-1], args.threshold)
    if args.logical is not None:
        raise ValueError(f"--logical must be without a tape, whose ranks are one process each, got {args.logical}")
    if args.model is not None:
        tape.check(shapes(args.model))
    steps = len(tape.steps) if args.steps is None else min(args.steps, len(tape.steps))
    replay = Replay(tape, args.steps, args.threshold, bar(steps * len(chosen) * len(ranks)))
    replay.check(chosen, ranks[-1])
    return replay, replay.buckets


# -------------------------------------------------------------------------------------------------------------- numbers


class ModeForecast(NamedTuple):
    """One mode on one number of ranks; ``dense``: the bytes that dense gradients put on the wire."""

    mode: Mode
    ranks: int
    sends: Forecast
    takes: Prediction
    dense: float


def rows(question: Question, chosen: Sequence[Mode], ranks: Sequence[int], replay: Replay | None) -> list[ModeForecast]:
    """Return a row by number of ranks, then by mode; the question's own number of ranks does not matter."""
    per_node, table_rows = question.wire.per_node, []
    for size in ranks:
        on_ranks = question._replace(ranks=size)
        dense = forecast(question.buckets, DENSE, size, per_node, logical=question.logical).sent
        for mode in chosen:
            if replay:
                sends, sent = replay.send(mode, size, per_node)
            else:
                sends = forecast(question.buckets, mode, size, per_node, logical=question.logical)
                sent = on_ranks.sent(mode)
            table_rows.append(
                ModeForecast(mode, size, sends, on_ranks.timed(sent, mode, on_ranks.compute(mode)), dense)
            )
    return table_rows


def between(ranks: Sequence[int], network: Wire) -> list[int]:
    """Return powers of two of nodes, as numbers of ranks, from the first number of ranks to the last."""
    local = network.per_node
    nodes = [1 << k for k in range(ranks[-1].bit_length())]
    return [n * local for n in nodes if ranks[0] < n * local < ranks[-1] and n * local not in ranks]


def numbers(
    table_rows: Sequence[ModeForecast], question: Question, model: str, replay: Replay | None
) -> dict[str, Any]:
    """Return the exact numbers of the table, for programs."""
    return {
        "model": model,
        "network": described(question.wire),
        "link": question.wire.link._asdict(),
        "logical": question.logical,
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
            for row in table_rows
        ],
    }


# ------------------------------------------------------------------------------------------------------------ the table


def _shown(
    table_rows: Sequence[ModeForecast], question: Question, model: str, replay: Replay | None, measured: bool
) -> list[str]:
    """Return the lines of the table, without columns that say the same as another one."""
    tensors = sum(len(bucket.names) for bucket in question.buckets)
    elements = sum(int(bucket.records["size"].sum()) for bucket in question.buckets)
    source = f"; {counted(len(replay.steps), 'recorded step')}" if replay else ""
    size = f"{counted(tensors, 'tensor')}, {elements:,} elements, {counted(len(question.buckets), 'bucket')}"
    logical = question.logical
    who = f"{counted(logical, 'logical rank')}; bytes of the first process" if logical else "bytes of one rank"
    title = f"{printable(model)}: {size}; {described(question.wire)}{source}; {who}"
    idle = {
        "ranks in each": not logical,
        "leaves node": all(row.sends.between == row.sends.sent for row in table_rows),
        "peak step": all(row.sends.peak == row.sends.sent for row in table_rows),
        "sent dense": not any(row.sends.fallen for row in table_rows),
    }
    lines = []
    for row in table_rows:
        fallen = f"{len(row.sends.fallen)} of {len(question.buckets)}" if row.sends.fallen else NONE
        columns = {
            "mode": row.mode.name,
            "processes" if logical else "ranks": str(row.ranks),
            "ranks in each": in_each(logical, row.ranks) if logical else NONE,
            "payload/step": nbytes(row.sends.payload),
            "wire/step": nbytes(row.sends.sent),
            "peak step": nbytes(row.sends.peak),
            "leaves node": nbytes(row.sends.between),
            "dense sends": times(row.dense / row.sends.sent if row.sends.sent else None),
            "sent dense": fallen,
            "wire time": seconds(row.takes.wire),
            "compute": seconds(row.takes.compute) if measured else NONE,
            "exchange": seconds(row.takes.exchange),
        }
        lines.append({name: cell for name, cell in columns.items() if not idle.get(name)})
    return [title, *table([[*lines[0]], *([*line.values()] for line in lines)]), *notes(question.wire, measured)]


# ---------------------------------------------------------------------------------------------------------- the picture


class Curve(NamedTuple):
    """What is drawn of a mode: bytes and seconds, over numbers of ranks or densities."""

    across: list[float]
    sent: list[float]
    exchange: list[float]


@plotting.styled()
def draw(
    printed: Sequence[ModeForecast], more: Sequence[ModeForecast], question: Question, model: str, path: Path
) -> None:
    """Draw two panels over ranks, with ``more`` rows between those of the table, and below them two over density.

    These are for the median number of ranks, by formula; dense is drawn even if it is not among the modes.
    """
    ranks = sorted({row.ranks for row in printed if row.ranks > 1})
    if not ranks:
        raise ValueError("nothing to draw: one rank sends nothing")
    sparse = list({row.mode.name: row.mode for row in printed if row.mode.density is not None}.values())
    figure, panels = plotting.panels(f"{model}, {described(question.wire)}", 2 if sparse else 1, 2)
    by_ranks = {row.mode.name: Curve([], [], []) for row in printed}
    for row in sorted([*printed, *more], key=lambda row: row.ranks):
        if row.ranks > 1:
            for values, value in zip(
                by_ranks[row.mode.name], (row.ranks, row.sends.sent, row.takes.exchange), strict=True
            ):
                values.append(value)
    styles = {name: plotting.look(k) for k, name in enumerate(dict.fromkeys((DENSE.name, *by_ranks)))}
    _pair(panels[:2], "ranks", by_ranks, styles, str)
    labelled: list[int] = []  # that have room for a label
    for size in ranks:
        if not labelled or size >= NEAR * labelled[-1]:
            labelled.append(size)
    for axes in panels[:2]:
        axes.set_xticks(labelled, map(str, labelled))
        axes.minorticks_off()
    if sparse:
        middle = question._replace(ranks=ranks[len(ranks) // 2])
        _densities(panels[2:], middle, sparse, styles)
    plotting.save(figure, path)


def _densities(panels: Sequence[Any], question: Question, sparse: Sequence[Mode], styles: dict[str, Any]) -> None:
    """Draw each kind of mode once, with a line where it takes as long as dense."""
    kinds, setting = {mode.kind: mode for mode in sparse}, (question.ranks, question.wire.per_node)
    curves = {}
    for kind, mode in kinds.items():
        diluted = [mode.at_density(d) for d in DENSITIES]
        sent = [forecast(question.buckets, m, *setting).sent for m in diluted]
        curves[kind] = Curve(DENSITIES, sent, [question.predict(m).exchange for m in diluted])
    named = {kind: styles[mode.name] for kind, mode in kinds.items()}
    _pair(panels, f"density, on {question.ranks} ranks", curves, named, lambda d: f"{d:.5f}".rstrip("0").rstrip("."))
    dense = forecast(question.buckets, DENSE, *setting).sent, question.predict(DENSE).exchange
    for axes, level in zip(panels, dense, strict=True):
        axes.axhline(level, color=styles[DENSE.name]["color"], linewidth=1, label=DENSE.name)
    for kind, mode in kinds.items():
        edge = density(question, mode) or 0.0
        if DENSITIES[0] < edge < 1:
            label = f"{kind} as dense: {edge:.2g}"
            panels[1].axvline(edge, color=named[kind]["color"], linewidth=1, linestyle=":", label=label)
    plotting.legend(panels[-1])


def _pair(
    panels: Sequence[Any],
    across: str,
    curves: dict[str, Curve],
    styles: dict[str, Any],
    unit: Callable[[Any], str],
) -> None:
    """Draw bytes at the left, seconds at the right."""
    labels = ("wire bytes of one rank in a step", nbytes), ("predicted time of the exchange", seconds)
    for which, (axes, (label, shown)) in enumerate(zip(panels, labels, strict=True)):
        axes.set(xlabel=across, ylabel=label)
        for name, curve in curves.items():
            every = max(1, len(curve.across) // 8)
            axes.plot(curve.across, curve[1 + which], label=name, markevery=every, **styles[name])
        seen = [y for curve in curves.values() for y in curve[1 + which]]
        plotting.log_axis(axes, "x", [x for curve in curves.values() for x in curve.across], unit)
        plotting.log_axis(axes, "y", seen, shown)
    plotting.legend(panels[-1])
