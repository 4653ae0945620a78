"""An exchange is a program: a generator that yields what it asks of the other ranks, and is sent their answer.

Whoever runs it answers: a communicator here; ``distopt.lab``, which runs the programs of many ranks in one process, and
counts bytes without data.  What a rank computes in between stands in the programs alone.
"""

from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from distopt.comm import Communicator
from distopt.comm.communicator import Phases
from distopt.comm.message import MessageTag


class Request(Protocol):
    """What a program yields."""

    def over(self, comm: Communicator) -> Any:
        """Return the answer.  Collective."""


Exchange = Generator[Request, Any, None]


class PhasedRequest(Request, Protocol):
    """A request that is begun, and ends while others are under way."""

    def phases(self, comm: Communicator, turn: int) -> Phases:
        """Return the answer, as an operation of ``Communicator.in_turn``."""


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


class Lengths(NamedTuple):
    """Asks for the bytes of all ranks' payloads, in rank order, and tells those of this one."""

    nbytes: int

    def over(self, comm: Communicator) -> list[int]:
        return comm.lengths(self.nbytes)


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


def in_turn(exchanges: Iterable[tuple[MessageTag, Exchange] | None], comm: Communicator) -> Iterator[None]:
    """Run programs one after the other, three of them under way, and yield at the end of each.  Collective.

    Args:
        exchanges: each with the tag of its messages; all that they ask for are ``PhasedRequest``s.  None says that the
            next one will take a while.
        comm: the ranks, which ``pipelines``.
    """
    return comm.in_turn(pair and partial(_in_phases, *pair, comm) for pair in exchanges)


def _in_phases(tag: MessageTag, exchange: Exchange, comm: Communicator, turn: int) -> Phases:
    """Run a program as an operation of ``Communicator.in_turn``."""
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
