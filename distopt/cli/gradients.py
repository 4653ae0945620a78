"""Recorded gradients, sent by virtual ranks: what they are in bytes where that depends on the data."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from distopt import Tape, simulate
from distopt.numbers import whole
from distopt.optim import SGD
from distopt.tables import Members
from distopt.units import nbytes
from distopt.volume import Forecast, Mode, Sending, buckets, observed, summary

WIDTH = 30  # of a bar


class Replay:
    """The first ``steps`` of a tape, which are sent again and again; ``tick`` is called behind each."""

    def __init__(self, tape: Tape, steps: int | None, threshold: int, tick: Callable[[str], None]):
        self.tape, self._threshold, self._tick = tape, threshold, tick
        self.steps = tape.steps[: len(tape.steps) if steps is None else whole("--steps", steps, least=1)]

    @property
    def buckets(self) -> list[Members]:
        """Of the parameters on the tape."""
        shapes = [(entry.name, entry.shape) for entry in self.tape.order]
        return buckets(shapes, self._threshold, [entry.dtype for entry in self.tape.order])

    def check(self, chosen: Sequence[Mode], ranks: int) -> None:
        """ValueError if what these ranks would keep is more than this machine has memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flat = sum(bucket.extent * bucket.dtype.itemsize for bucket in self.buckets)
        for mode in chosen:
            kept = ranks * flat * (1 + hasattr(mode.compressor, "corrects_momentum")) * mode.compressor.stateful
            if kept > memory:
                raise ValueError(
                    f"--ranks {ranks} with {mode.name} keep {nbytes(kept)} of residuals, and this machine has "
                    f"{nbytes(memory)}"
                )

    def send(self, mode: Mode, ranks: int, per_node: int) -> tuple[Forecast, list[Sending]]:
        """The mean step of so many virtual ranks."""
        hosts = [rank // per_node for rank in range(ranks)]
        sim = simulate(ranks, SGD(0.0), threshold=self._threshold, nonfinite="propagate", hosts=hosts)
        for step in self.steps:
            sim.step(self.tape.losses(step), mode.compressor)
            self._tick(f"{mode.name}, {ranks} ranks")
        found = self.buckets
        count = len(self.steps)
        return summary(sim.ledger, found, mode, count), observed(sim.ledger, found, mode, ranks, count)


def bar(total: int) -> Callable[[str], None]:
    """What is called so many times, and shows it where the errors go, if that is a terminal."""
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
