"""An exchange is a program: a generator that yields what it asks of the other ranks, and is sent their answer.

Whoever runs it answers: a communicator here; ``distopt.lab``, which runs the programs of many ranks in one process, and
counts bytes without data.  What a rank computes in between stands in the programs alone.  Where several ranks live in a
process, their programs go on in lock step, and what they ask for at once is one message between processes.
"""

import collections
import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from distopt.comm import Communicator
from distopt.comm.communicator import UNDER_WAY, Phases
from distopt.comm.logical import numbers_of_ranks, sum_of_ranks
from distopt.comm.message import MessageTag


class Request(Protocol):
    """What a program yields."""

    def over(self, comm: Communicator) -> Any:
        """Return the answer.  Collective."""

    @staticmethod
    def of_ranks(asked: Sequence[Any], comm: Communicator) -> list[Any]:
        """Return the answers to what the ranks that live here ask for, or only the last one's.  Collective.

        They have the buckets' sums together, so that the last rank alone goes on to write them.
        """


Exchange = Generator[Request, Any, None]
# An array, the tag of its messages, and what replaces it by its sum.
OfArray = tuple[np.ndarray, MessageTag, Exchange]


class PhasedRequest(Request, Protocol):
    """A request that is begun, and ends while others are under way."""

    def phases(self, comm: Communicator, turn: int) -> Phases:
        """Return the answer, as an operation of that turn."""


class Sum(NamedTuple):
    """Asks for the sum of an array over ranks, in its place, which nobody reads before the next answer.

    Args:
        x: the array.
        tag: of the message; None for that of the caller.
        last: nothing else is asked for, so that it is read at once.
    """

    x: np.ndarray
    tag: MessageTag | None = None
    last: bool = False

    def over(self, comm: Communicator) -> None:
        if self.tag is None:
            comm.all_reduce(self.x)
        else:
            with comm.tagged(self.tag):
                comm.all_reduce(self.x)

    def phases(self, comm: Communicator, turn: int) -> Phases:
        return comm.sum_in_phases(self.x, turn)

    @staticmethod
    def of_ranks(asked: Sequence["Sum"], comm: Communicator) -> list[None]:
        with contextlib.nullcontext() if asked[-1].tag is None else comm.tagged(asked[-1].tag):
            sum_of_ranks(comm, [request.x for request in asked])
        return [None] * (1 if asked[-1].last else len(asked))


class Agree(NamedTuple):
    """Asks for the sum of an array over ranks, with which each of them goes on."""

    x: np.ndarray

    def over(self, comm: Communicator) -> np.ndarray:
        comm.all_reduce(self.x)
        return self.x

    def phases(self, comm: Communicator, turn: int) -> Phases:
        yield from comm.sum_in_phases(self.x, turn)
        return self.x

    @staticmethod
    def of_ranks(asked: Sequence["Agree"], comm: Communicator) -> list[np.ndarray]:
        sum_of_ranks(comm, [request.x for request in asked])
        return [asked[-1].x] * len(asked)


class Lengths(NamedTuple):
    """Asks for the bytes of all ranks' payloads, in rank order, and tells those of this one."""

    nbytes: int

    def over(self, comm: Communicator) -> list[int]:
        return comm.lengths(self.nbytes)

    @staticmethod
    def of_ranks(asked: Sequence["Lengths"], comm: Communicator) -> list[list[int]]:
        return [numbers_of_ranks(comm, [request.nbytes for request in asked])] * len(asked)


def run(exchange: Exchange, comm: Communicator) -> None:
    """Run a program: a communicator answers what it asks for.  Collective."""
    answer = None
    with comm.on_comm_stream():
        while True:
            try:
                asked = exchange.send(answer)
            except StopIteration:
                return
            answer = asked.over(comm)


def run_together(exchanges: Sequence[Exchange], comm: Communicator) -> None:
    """Run the programs of the ranks that live here, in their order, of which the last one ends.  Collective."""
    going, answers = exchanges, list[Any]([None] * len(exchanges))
    with comm.on_comm_stream(), contextlib.suppress(StopIteration):
        while True:
            asked = [exchange.send(answer) for exchange, answer in zip(going, answers, strict=True)]
            answers = asked[-1].of_ranks(asked, comm)
            going = going[-len(answers) :]


def in_turn(exchanges: Iterable[OfArray | None], comm: Communicator) -> Iterator[np.ndarray]:
    """Run programs one after the other, three of them under way, and yield the array of each in the end.  Collective.

    While what one has sent travels, the next one may compute, so that the network does not wait for arithmetic.

    Args:
        exchanges: as many on every rank; all that they ask for are ``PhasedRequest``s.  A None among them says that
            the next one is not there yet, so many in a row as complete all that is under way that it takes a while.
        comm: the ranks, which ``pipelines``.
    """
    begun: collections.deque[tuple[np.ndarray, Phases] | None] = collections.deque()
    log: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    turns = itertools.cycle(range(1, UNDER_WAY + 1))  # not those of gaps, which other ranks do not have
    for given in itertools.chain(exchanges, [None] * (UNDER_WAY - 1)):
        newest = given and (given[0], _in_phases(*given[1:], comm, next(turns)))
        log = next(newest[1], log) if newest else log
        complete = begun.popleft() if len(begun) == UNDER_WAY - 1 else None
        # Whoever waits for messages of a rank that has a gap has sent all that this one waits for.
        collections.deque(complete[1] if complete else (), maxlen=0)
        for _, phases in filter(None, begun):
            log = next(phases, log)
        begun.append(newest)
        if complete:
            yield complete[0]
        if not any(begun):
            with log:  # it ends: the next operation may take longer than any time limit
                pass


def _in_phases(tag: MessageTag, exchange: Exchange, comm: Communicator, turn: int) -> Phases:
    """Run a program as one operation."""
    answer = None
    while True:
        try:
            asked = cast(PhasedRequest, exchange.send(answer))
        except StopIteration:
            return
        phases = asked.phases(comm, turn)
        with comm.tagged(tag):
            log = next(phases)
        yield log
        answer = yield from phases
