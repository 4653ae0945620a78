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
MIN_BYTES, ALWAYS_BYTES, MAX_BYTES = (
    8,
    1 << 10,
    1 << 25,
)  # bytes; sizes up to ALWAYS_BYTES are measured whatever the time
ROUNDS = 8  # rounds that the time allows at least, if all are as fast as the first
SHORT = 5e-3  # seconds; shorter calls are repeated in a round
REPEATS = 20  # calls of a round at most
FASTER = 0.1  # quantile of the times that counts: other load only ever adds time
NANO = 1e-9

Clock = Callable[[], float]
Call = Callable[[], object]


class Point(NamedTuple):
    """A measured time.

    Attributes:
        verb: the communicator's verb.
        nbytes: the bytes of one rank; of all ranks together for an all-gather.
        seconds: the time of the slowest rank.

    Example:
        >>> from distopt.fit import Point
        >>> Point("all_reduce", 1024, 5e-5).seconds
        5e-05
    """

    verb: str
    nbytes: int
    seconds: float


class Case:
    """A verb at one size, with the times of its calls so far.

    Attributes:
        verb: the communicator's verb.
        nbytes: the bytes of one rank; of all ranks together for an all-gather.
        call: makes one call.
        taken: the seconds of each call, of the slowest rank.

    Example:
        >>> from distopt.fit import Case
        >>> case = Case("all_reduce", 1024, call=lambda: None)
        >>> case.taken += [0.002, 0.001, 0.009]
        >>> case.point()
        Point(verb='all_reduce', nbytes=1024, seconds=0.001)
    """

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

    Args:
        verb: the communicator's verb.
        nbytes: the bytes of one rank; of all ranks together for an all-gather.
        itemsize: the bytes of an element.
        size: the number of ranks.

    Example:
        >>> from distopt.fit import elements
        >>> elements("all_reduce", 1024, 4, 8), elements("all_gather", 1024, 4, 8)
        (256, 32)
    """
    count = nbytes // itemsize
    if verb == "all_gather":
        return max(1, count // size)
    if verb in ("all_to_all", "reduce_scatter"):
        return max(1, count // size) * size
    return max(1, count)


def case_of(comm: Communicator, verb: str, nbytes: int, x: np.ndarray, room: np.ndarray) -> Case:
    """Return the case of a verb with about so many bytes.

    Args:
        comm: the communicator.
        verb: its verb.
        nbytes: the bytes of one rank; of all ranks together for an all-gather.
        x: an array of which a part is handed over.
        room: an array that receives what is gathered.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import LocalCommunicator
        >>> from distopt.fit import case_of
        >>> x, room = np.zeros(1024, "f4"), np.zeros(1024, "f4")
        >>> case_of(LocalCommunicator(), "all_reduce", 1022, x, room).nbytes
        1020
    """
    n = elements(verb, nbytes, x.itemsize, comm.size)
    handed = n * x.itemsize * (comm.size if verb == "all_gather" else 1)
    return Case(verb, handed, operation(comm, verb, x[:n], room))


def operation(comm: Communicator, verb: str, x: np.ndarray, room: np.ndarray) -> Callable[[], object]:
    """Return a function that calls a collective.

    Args:
        comm: the communicator.
        verb: the collective's name, as 'all_reduce'.
        x: the array that is sent, ``(n,)``.
        room: memory for what is gathered, of x's dtype.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import LocalCommunicator
        >>> from distopt.fit import operation
        >>> x, room = np.ones(4, "f4"), np.zeros(4, "f4")
        >>> _ = operation(LocalCommunicator(), "all_gather", x, room)()
        >>> room
        array([1., 1., 1., 1.], dtype=float32)
    """
    if verb == "all_to_all":
        return functools.partial(comm.all_to_all, [x[s] for s in slices(x.size, comm.size)])
    if verb == "all_gather":
        return functools.partial(comm.all_gather, x, into=room[: x.size * comm.size])
    return functools.partial(getattr(comm, verb), x)


def timed(comm: Communicator, call: Call, times: int, clock: Clock = time.perf_counter) -> list[float]:
    """Return the seconds of ``times`` calls, each after a barrier: the slowest rank's, on all ranks.  Collective.

    Args:
        comm: the communicator.
        call: the operation.
        times: the number of calls.
        clock: returns seconds.

    Example:
        >>> from distopt.comm import LocalCommunicator
        >>> from distopt.fit import timed
        >>> ticks = iter([0.0, 0.5, 1.0, 1.25])
        >>> [round(seconds, 3) for seconds in timed(LocalCommunicator(), lambda: None, 2, clock=lambda: next(ticks))]
        [0.5, 0.25]
    """
    nanoseconds = np.zeros(times, np.int64)
    for k in range(times):
        comm.barrier()
        begin = clock()
        call()
        _finish(comm)
        nanoseconds[k] = (clock() - begin) / NANO
    comm.control.maximum(nanoseconds)
    return [max(1, int(t)) * NANO for t in nanoseconds]


def measure(comm: Communicator, seconds: float, clock: Clock = time.perf_counter) -> list[Point]:
    """Time all verbs for about so many seconds, and return the same points on every rank.  Collective.

    The largest arrays are those of which each verb can do ``ROUNDS`` rounds in its share of the time.  Verbs and sizes
    take turns, so that a slow second affects all of them alike.

    Args:
        comm: the communicator.
        seconds: the time that the measurement may take.
        clock: returns seconds.

    Example:
        >>> from distopt.comm import LocalCommunicator
        >>> from distopt.fit import measure
        >>> points = measure(LocalCommunicator(), seconds=0.01)
        >>> sorted({point.verb for point in points})
        ['all_gather', 'all_reduce', 'all_to_all', 'broadcast', 'reduce_scatter']
    """
    begin = clock()
    x, room = (comm.alloc(MAX_BYTES, np.uint8).view(np.float32) for _ in range(2))
    share = seconds / len(VERBS) / ROUNDS
    cases = [case for verb in VERBS for case in _ladder(comm, verb, share, x, room, clock)]
    take_turns(comm, cases, seconds - _agreed(comm, clock() - begin), clock)
    return [case.point() for case in cases]


def take_turns(comm: Communicator, cases: Sequence[Case], seconds: float, clock: Clock = time.perf_counter) -> None:
    """Time all cases round by round, as long as another round fits.  Collective.

    Args:
        comm: the communicator, on which ranks agree on the end.
        cases: what is timed; each notes its own seconds.
        seconds: how long all rounds may take together.
        clock: returns seconds.

    Example:
        >>> from distopt.comm import LocalCommunicator
        >>> from distopt.fit import Case, take_turns
        >>> case = Case("barrier", 0, lambda: None)
        >>> case.taken.append(0.001)
        >>> take_turns(LocalCommunicator(), [case], seconds=0.01)
        >>> len(case.taken) > 1
        True
    """
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
        if (
            3 * used > share and nbytes >= ALWAYS_BYTES
        ):  # the next one takes twice as long as this one, or half of ``used``
            return
        nbytes *= 2


def _agreed(comm: Communicator, seconds: float) -> float:
    """Return the seconds of the slowest rank.  Collective."""
    vote = np.array([seconds / NANO], np.int64)
    comm.control.maximum(vote)
    return int(vote[0]) * NANO


def _finish(comm: Communicator) -> None:
    """Wait until a verb is done; on a GPU it was only enqueued."""
    comm.wait()
    if comm.gpu is not None:
        device.synchronize(device.current_stream(), comm.check)
