"""The launcher of a node that is not the first one of an elastic job."""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from distopt.comm.listener import ACCEPTED, connect
from distopt.resilience import job
from distopt.resilience.membership import ADDRESS
from distopt.run.children import Children
from distopt.run.nodes import PATIENCE, SECRET, End, Place, Trunk, key
from distopt.run.processes import END_SECONDS, POLL_SECONDS, handling_signals, say


class Agent:
    """Starts ranks of this node, and tells node 0 all about them."""

    def __init__(
        self, trunk: Trunk, first: int, command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path
    ):
        # first: the number of the first of its ranks
        self._trunk = trunk  # to node 0's launcher
        self._children = Children(command, env, range(first, first + ranks), folder, self._pass_on)
        self._told: dict[str, Any] = {}  # the last that node 0 has heard of them
        self._asked = 0
        self._code: int | None = None  # of the job
        self._grace: float | None = None  # in which ranks are to end
        self._thread = threading.Thread(target=self._hear, name="node 0", daemon=True)

    @classmethod
    def join(cls, at: Place, command: Sequence[str], env: Mapping[str, str], ranks: int, folder: Path) -> "Agent":
        """Connect to node 0, and start ranks; RuntimeError if it does not come, or refuses."""
        host = socket.gethostbyname(at.host)
        try:
            line, answer = connect((host, at.port), key(), at.node, at.nodes, time.monotonic() + PATIENCE)
        except TimeoutError:
            raise RuntimeError(f"node 0 did not come to {at.host}:{at.port} within {PATIENCE:g} s") from None
        except AuthenticationError:
            raise RuntimeError(f"who listens at {at.host}:{at.port} has not the same {SECRET}") from None
        if answer[:1] != ACCEPTED:
            raise RuntimeError(answer[1:].decode())
        trunk = Trunk(line)
        trunk.send(ranks=ranks)
        told = trunk.receive()
        if told is None:
            raise RuntimeError("node 0 has ended before the job began")
        return cls(trunk, told["first"], command, {**env, ADDRESS: trunk.address}, ranks, folder)

    def supervise(self) -> int:
        """Tell node 0 of the ranks until the job ends, and return its exit code."""
        self._children.start()
        self._thread.start()
        with handling_signals(self._ask):
            while self._code is None:
                self._look()
                if self._asked > 1:
                    self._children.end(END_SECONDS)
                elif self._grace is not None:
                    self._children.end(self._grace)
                    self._grace = None
        self._children.close()
        return self._code

    def _look(self) -> None:
        ends = self._children.ends
        ranks = ends.look(POLL_SECONDS)
        told = {
            "ranks": [_packed(rank) for rank in ranks],
            "stopped": [rank.rank for rank in ranks if ends.is_stopped(rank)],
            "ended": [End(r.rank, ends.in_order(r), ends.told(r), ends.code(r)) for r in ends.ended(ranks)],
        }
        if told != self._told:
            self._told = told
            self._trunk.send(**told)

    def _pass_on(self, member: int, message: dict[str, Any] | None) -> None:
        self._trunk.send(of=member, message=message)

    def _hear(self) -> None:
        """Do what node 0 says, until its connection ends."""
        while told := self._trunk.receive():
            match told:
                case {"to": member, "message": message}:
                    self._children.lines.send(member, message)
                case {"signal": number, "rank": rank}:
                    self._children.ends.send(rank, number)
                case {"end": grace}:
                    self._grace = grace
                case {"over": code}:
                    self._code = code
                    return
        say("node 0 cannot be reached; ended the ranks of this node")
        self._children.end(END_SECONDS)
        self._code = 1

    def _ask(self, number: int) -> None:
        self._asked += 1
        self._trunk.send(asked=number)


def _packed(rank: job.Rank) -> list[Any]:
    """Return a rank's marks without sets, which JSON does not have."""
    marks = {kind: sorted(details) for kind, details in rank.marks.items()}
    return [marks if field is rank.marks else field for field in rank]
