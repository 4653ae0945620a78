"""Timing the verbs of a communicator from 8 bytes to 32 MiB; all ranks get the time of the slowest one."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.communicator import slices
from distopt.lab.cost import ALGORITHMS

VERBS = tuple(ALGORITHMS)
MIN_BYTES, MAX_BYTES = 8, 1 << 25
ALWAYS_BYTES = 1 << 10  # sizes up to here are measured whatever the time
ROUNDS = 8  # rounds that the time allows at least, if all are as fast as the first
SHORT = 5e-3  # seconds; shorter calls are repeated in a round
REPEATS = 20  # calls of a round at most
FASTER = 0.1  # quantile of the times that counts: other load only ever adds time
NANO = 1e-9

Clock = Callable[[], float]
Call = Callable[[], object]


class Point(NamedTuple):
    """The seconds of the slowest rank for so many bytes of one rank, or of all together for an all-gather."""

    verb: str
    nbytes: int
    seconds: float


class Case:
    """A verb at one size, with the seconds of its calls so far, each of the slowest rank: ``taken``."""

    def __init__(self, verb: str, nbytes: int, call: Call):
        self.verb, self.nbytes, self.call = verb, nbytes, call
        self.taken: list[float] = []

    @property
    def repeats(self) -> int:
        """The number of calls in a round."""
        return int(min(REPEATS, 1 + SHORT / self.seconds))

    @property
    def seconds(self) -> float:
        """The seconds of a call that nothing else disturbs: a low quantile of the times (``FASTER``)."""
        return float(np.quantile(self.taken, FASTER, method="lower"))

    def point(self) -> Point:
        """Return the present estimate as a point."""
        return Point(self.verb, self.nbytes, self.seconds)


def elements(verb: str, nbytes: int, itemsize: int, size: int) -> int:
    """Return the number of elements that one rank hands over so that a verb gets at most so many bytes.

    It is at least one, or one per rank for verbs that cut the array into parts.
    """
    count = nbytes // itemsize
    if verb == "all_gather":
        return max(1, count // size)
    if verb in ("all_to_all", "reduce_scatter"):
        return max(1, count // size) * size
    return max(1, count)


def case_of(comm: Communicator, verb: str, nbytes: int, x: np.ndarray, room: np.ndarray) -> Case:
    """Return the case of a verb with about so many bytes, a part of x; ``room`` is for what is gathered."""
    n = elements(verb, nbytes, x.itemsize, comm.size)
    handed = n * x.itemsize * (comm.size if verb == "all_gather" else 1)
    x = x[:n]
    if verb == "all_to_all":
        return Case(verb, handed, functools.partial(comm.all_to_all, [x[s] for s in slices(n, comm.size)]))
    if verb == "all_gather":
        return Case(verb, handed, functools.partial(comm.all_gather, x, into=room[: n * comm.size]))
    return Case(verb, handed, functools.partial(getattr(comm, verb), x))


def timed(comm: Communicator, call: Call, times: int, clock: Clock = time.perf_counter) -> list[float]:
    """Return the seconds of ``times`` calls, each after a barrier: the slowest rank's, on all ranks.  Collective."""
    nanoseconds = np.zeros(times, np.int64)
    for k in range(times):
        comm.barrier()
        begin = clock()
        call()
        comm.wait()
        if comm.gpu is not None:  # where it was only enqueued
            device.synchronize(device.current_stream(), comm.check)
        nanoseconds[k] = (clock() - begin) / NANO
    comm.control.maximum(nanoseconds)
    return [max(1, int(t)) * NANO for t in nanoseconds]


def measure(comm: Communicator, seconds: float, clock: Clock = time.perf_counter) -> list[Point]:
    """Time all verbs for about so many seconds, and return the same points on every rank.  Collective."""
    # The largest arrays are those of which each verb can do ROUNDS rounds in its share of the time.  Verbs and sizes
    # take turns, so that a slow second affects all of them.
    begin = clock()
    x, room = (comm.alloc(MAX_BYTES, np.uint8).view(np.float32) for _ in range(2))
    share = seconds / len(VERBS) / ROUNDS
    cases = [case for verb in VERBS for case in _ladder(comm, verb, share, x, room, clock)]
    take_turns(comm, cases, seconds - _agreed(comm, clock() - begin), clock)
    return [case.point() for case in cases]


def take_turns(comm: Communicator, cases: Sequence[Case], seconds: float, clock: Clock = time.perf_counter) -> None:
    """Time all cases round by round, as long as another round fits into so many seconds.  Collective."""
    begin, elapsed, round_seconds = clock(), 0.0, 0.0
    while elapsed + round_seconds < seconds:
        for case in cases:
            case.taken += timed(comm, case.call, case.repeats, clock)
        previous, elapsed = elapsed, _agreed(comm, clock() - begin)
        round_seconds = elapsed - previous


def _ladder(
    comm: Communicator, verb: str, share: float, x: np.ndarray, room: np.ndarray, clock: Clock
) -> Iterator[Case]:
    """Yield a case for every power of two, until a call takes as long as a round has time for.

    The first call of each connects ranks, and is not counted.
    """
    used, nbytes = 0.0, MIN_BYTES * (comm.size if verb in ("all_gather", "all_to_all", "reduce_scatter") else 1)
    while nbytes <= MAX_BYTES:
        case = case_of(comm, verb, nbytes, x, room)
        first, second = timed(comm, case.call, 2, clock)
        case.taken.append(second)
        yield case
        used += min(first, second)
        # the next one takes twice as long as this one, or half of ``used``
        if 3 * used > share and nbytes >= ALWAYS_BYTES:
            return
        nbytes *= 2


def _agreed(comm: Communicator, seconds: float) -> float:
    """Return the seconds of the slowest rank.  Collective."""
    vote = np.array([seconds / NANO], np.int64)
    comm.control.maximum(vote)
    return int(vote[0]) * NANO
