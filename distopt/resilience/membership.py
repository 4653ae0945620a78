"""Who takes part in a job that goes on without the ranks it loses: epochs, and how a rank asks for the next one.

``distopt run --elastic`` has a ``Membership`` for each communicator, and a socket to each process that it has started.
A process that finds that another one has ended asks for the next epoch; it begins when all that live have asked.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

WANTED = "DISTOPT_ELASTIC"  # environment variable: '1' in a job that goes on without the ranks it loses
LINE = "DISTOPT_LINE"  # environment variable: number of the file descriptor of the socket to the launcher
MEMBER = "DISTOPT_MEMBER"  # environment variable: number of this process among all that the launcher has started
JOINS = "DISTOPT_JOINS"  # environment variable: '1' for a process that takes the place of a lost rank
MESSAGE = 1 << 16  # bytes of a message at most
TORCHRUN = (
    "torchrun ends all of its workers when one of them dies; start the script without it: "
    "distopt run -n N --elastic --over torch script.py"
)


class Epoch(NamedTuple):
    """A time in which the members of a communicator stay the same.

    Attributes:
        number: from 0.
        members: numbers of the processes, ascending: a rank is the index of its member.
        texts: what each member said when it asked, by rank.
    """

    number: int
    members: list[int]
    texts: list[str]


class Membership:
    """Members of one communicator, epoch by epoch.

    An epoch begins when every member of the one before has asked for it, or was lost.  So no member that lives is left
    behind, and all that are told of an epoch are told the same.

    Args:
        members: those that epoch 0 waits for.

    Attributes:
        members: those of the present epoch that were not lost.

    Example:
        >>> membership = Membership(range(3))
        >>> for member in range(3):
        ...     membership.ask(member, f"I am {member}")
        >>> membership.begin().members
        [0, 1, 2]
        >>> membership.ask(2, "who is there?")
        >>> membership.begin() is None  # until member 0 has asked too, and member 1 has asked or was lost
        True
        >>> membership.lose(1)
        >>> membership.ask(0, "")
        >>> membership.begin()
        Epoch(number=1, members=[0, 2], texts=['', 'who is there?'])
    """

    def __init__(self, members: Iterable[int]):
        self.members = set(members)
        self._asked: dict[int, str] = {}
        self._let_in: dict[int, bool] = {}
        self._number = -1

    def ask(self, member: int, text: str, lets_in: bool = False) -> None:
        """Let a member ask for the next epoch.

        Args:
            member: who asks; one that is no member waits until all members let it in.
            text: for all its members.
            lets_in: whether the next epoch may have newcomers.
        """
        self._asked[member] = text
        self._let_in[member] = lets_in

    def lose(self, member: int) -> None:
        """Forget a member, which has ended."""
        self.members.discard(member)
        self._asked.pop(member, None)

    def awaited(self) -> set[int]:
        """Return the members that others wait for."""
        return self.members - self._asked.keys() if self.members & self._asked.keys() else set()

    def newcomers(self) -> set[int]:
        """Return those that have asked and are no members yet."""
        return self._asked.keys() - self.members

    def begin(self) -> Epoch | None:
        """Begin the next epoch, if all members have asked for it; None if one has not, or there is none.

        Those that are no members yet are among those of an epoch, but of the first, if all members let them in.
        """
        if not self.members or not self.members <= self._asked.keys():
            return None
        whole = self._number >= 0 and all(self._let_in[member] for member in self.members)
        members = sorted(self._asked if whole else self.members)
        epoch = Epoch(self._number + 1, members, [self._asked.pop(member) for member in members])
        self._number, self.members = epoch.number, set(members)
        return epoch


class Line:
    """A process's end of its socket to the launcher.

    Args:
        line: a socket that keeps messages apart.
        member: number of this process among all that the launcher has started.
    """

    def __init__(self, line: socket.socket, member: int):
        self.member, self._line = member, line
        self._came: dict[str, Epoch] = {}
        self._changed = threading.Condition()
        self._reads = False  # a thread does

    def ask(self, name: str, text: str, lets_in: bool = False, first: Sequence[int] = ()) -> Epoch:
        """Ask for the next epoch of a communicator, and wait until it begins.

        Args:
            name: the communicator's, the same on all of its ranks.
            text: for all its members.
            lets_in: whether it may have newcomers.
            first: the members of the communicator's first epoch; default: all processes that live then.

        Raises:
            ConnectionError: the launcher has ended, or has given this process up.
        """
        with contextlib.suppress(ConnectionError):  # what comes next says so
            self._line.send(json.dumps({"of": name, "text": text, "lets_in": lets_in, "first": list(first)}).encode())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: name in self._came or not self._reads)
                if name in self._came:
                    return self._came.pop(name)
                self._reads = True
            try:
                told = json.loads(self._receive())
                with self._changed:
                    self._came[told["of"]] = Epoch(told["number"], told["members"], told["texts"])
            finally:
                with self._changed:
                    self._reads = False
                    self._changed.notify_all()

    def _receive(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            if message := self._line.recv(MESSAGE):
                return message
        raise ConnectionError("the launcher has ended, or has given this rank up")


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell if this job goes on without the ranks it loses.

    Raises:
        RuntimeError: it should, but torchrun would end it.
    """
    if environ.get(WANTED, "") != "1":
        return False
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise RuntimeError(f"{WANTED} is 1, but {TORCHRUN}")
    return True


def joins(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell if this process takes the place of a lost rank, and waits to be let in."""
    return environ.get(JOINS, "") == "1"


def line(environ: MutableMapping[str, str] = os.environ) -> Line | None:
    """Return this process's line to the launcher; None if it has none.

    Processes that this one starts are no ranks: neither the socket nor the variable that names it is left to them.
    """
    global _line
    if LINE in environ:
        descriptor = int(environ.pop(LINE))
        os.set_inheritable(descriptor, False)
        _line = Line(socket.socket(fileno=descriptor), int(environ[MEMBER]))
    return _line


_line: Line | None = None
