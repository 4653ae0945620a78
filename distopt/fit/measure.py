"""What the verbs of a communicator take, from 8 bytes to megabytes: all ranks measure, and all know the slowest's."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.communicator import slices
from distopt.cost import ALGORITHMS

VERBS = tuple(ALGORITHMS)
LEAST, ENOUGH, MOST = 8, 1 << 10, 1 << 25  # bytes: whatever the time, some sizes are measured
ROUNDS = 8  # at least, if the first one is as fast as the others
SHORT = 5e-3  # seconds: shorter calls are repeated in a round
REPEATS = 20  # at most
FASTER = 0.1  # so many calls are faster than what a point says: what else the machine does only ever adds to it
NANO = 1e-9

Clock = Callable[[], float]
Call = Callable[[], object]


class Point(NamedTuple):
    """A verb, the bytes that it was given (see ``cost.time``), and what it takes: seconds of the slowest rank."""

    verb: str
    nbytes: int
    seconds: float


class Case:
    """A verb at a size, and how long its calls have taken."""

    def __init__(self, verb: str, nbytes: int, call: Call):
        self.verb, self.nbytes, self.call = verb, nbytes, call
        self.taken: list[float] = []

    @property
    def repeats(self) -> int:
        """Calls in a round."""
        return int(min(REPEATS, 1 + SHORT / self.seconds))

    @property
    def seconds(self) -> float:
        """Of a call that nothing else has disturbed."""
        return float(np.quantile(self.taken, FASTER, method="lower"))

    def point(self) -> Point:
        """What is known."""
        return Point(self.verb, self.nbytes, self.seconds)


def elements(verb: str, nbytes: int, itemsize: int, size: int) -> int:
    """Elements of the array that this rank hands over if a verb is to be given so many bytes, or a few less.

    At least one, or one per rank where the array is cut.
    """
    whole = nbytes // itemsize
    if verb == "all_gather":
        return max(1, whole // size)
    if verb in ("all_to_all", "reduce_scatter"):
        return max(1, whole // size) * size
    return max(1, whole)


def case_of(comm: Communicator, verb: str, nbytes: int, x: np.ndarray, room: np.ndarray) -> Case:
    """A verb with about so many bytes of the array x; what it gathers goes to ``room``."""
    n = elements(verb, nbytes, x.itemsize, comm.size)
    given = n * x.itemsize * (comm.size if verb == "all_gather" else 1)
    return Case(verb, given, operation(comm, verb, x[:n], room))


def operation(comm: Communicator, verb: str, x: np.ndarray, room: np.ndarray) -> Callable[[], object]:
    """The call of a verb with the array x; what it gathers goes to ``room``."""
    if verb == "all_to_all":
        return functools.partial(comm.all_to_all, [x[s] for s in slices(x.size, comm.size)])
    if verb == "all_gather":
        return functools.partial(comm.all_gather, x, into=room[: x.size * comm.size])
    return functools.partial(getattr(comm, verb), x)


def timed(comm: Communicator, call: Call, times: int, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of so many calls, each after a barrier: the slowest rank's, on all ranks.  Collective."""
    taken = np.zeros(times, np.int64)
    for k in range(times):
        comm.barrier()
        begin = clock()
        call()
        _finish(comm)
        taken[k] = (clock() - begin) / NANO
    comm.control.maximum(taken)
    return [max(1, int(t)) * NANO for t in taken]


def measure(comm: Communicator, seconds: float, clock: Clock = time.perf_counter) -> list[Point]:
    """The same points on every rank, after about so many seconds.  Collective.

    The largest arrays are those of which each verb can do ``ROUNDS`` rounds in its share of the time.  Verbs and sizes
    take turns, so that a slow second is nobody's own.
    """
    begin = clock()
    x, room = (comm.alloc(MOST, np.uint8).view(np.float32) for _ in range(2))
    share = seconds / len(VERBS) / ROUNDS
    cases = [case for verb in VERBS for case in _ladder(comm, verb, share, x, room, clock)]
    take_turns(comm, cases, seconds - _agreed(comm, clock() - begin), clock)
    return [case.point() for case in cases]


def take_turns(comm: Communicator, cases: Sequence[Case], seconds: float, clock: Clock = time.perf_counter) -> None:
    """Time all cases round by round, as long as another round fits into so many seconds.  Collective."""
    begin, now, last = clock(), 0.0, 0.0
    while now + last < seconds:
        for case in cases:
            case.taken += timed(comm, case.call, case.repeats, clock)
        before, now = now, _agreed(comm, clock() - begin)
        last = now - before


def _ladder(
    comm: Communicator, verb: str, share: float, x: np.ndarray, room: np.ndarray, clock: Clock
) -> Iterator[Case]:
    """Every power of two, until a call of each size takes as long as there is time for in a round.

    The first call of each connects ranks, and is not counted.
    """
    used, nbytes = 0.0, LEAST * (comm.size if verb in ("all_gather", "all_to_all", "reduce_scatter") else 1)
    while nbytes <= MOST:
        case = case_of(comm, verb, nbytes, x, room)
        first, second = timed(comm, case.call, 2, clock)
        case.taken.append(second)
        yield case
        used += min(first, second)
        if 3 * used > share and nbytes >= ENOUGH:  # the next one takes twice as long as this one, or half of ``used``
            return
        nbytes *= 2


def _agreed(comm: Communicator, seconds: float) -> float:
    """The slowest rank's clock."""
    vote = np.array([seconds / NANO], np.int64)
    comm.control.maximum(vote)
    return int(vote[0]) * NANO


def _finish(comm: Communicator) -> None:
    """On a GPU a verb has only been enqueued."""
    comm.wait()
    if comm.gpu is not None:
        device.finish(device.current_stream(), comm.check)
