"""Who takes part in a job that continues without the ranks it loses: epochs, and how a rank asks for the next one.

``distopt run --elastic`` has a ``Quorum`` for each communicator, and a socket to each process that it has started.
A process that finds that another one has ended asks for the next epoch; it begins when all that live have asked.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from distopt.resilience.environment import JOINS, LINE, MEMBER, RUN_ID, TORCHRUN, WANTED

MESSAGE = 1 << 16  # bytes of a message at most
SIZE = "size"  # how the names begin under which a process tells how many there are to be
ENDS_ALL = (
    "torchrun ends all of its workers when one of them dies; start the script without it: "
    "distopt run -n N --elastic --over torch script.py"
)


class Epoch(NamedTuple):
    """A time in which the members of a communicator stay the same."""

    number: int
    members: list[int]  # numbers of the processes, ascending: a rank is the index of its member
    texts: list[str]  # what each member said when it asked, by rank


class Quorum:
    """Members of one communicator, epoch by epoch.

    Example:
        >>> quorum = Quorum(range(3))
        >>> for member in range(3):
        ...     quorum.ask(member, f"I am {member}")
        >>> quorum.begin().members
        [0, 1, 2]
        >>> quorum.ask(2, "who is there?")
        >>> quorum.begin() is None  # until member 0 has asked too, and member 1 has asked or was lost
        True
        >>> quorum.lose(1)
        >>> quorum.ask(0, "")
        >>> quorum.begin()
        Epoch(number=1, members=[0, 2], texts=['', 'who is there?'])
    """

    # An epoch begins when every member of the one before has asked for it, or was lost.  So no member that lives is
    # left out, and all that hear of an epoch hear the same.

    def __init__(self, members: Iterable[int], most: int = sys.maxsize):
        # most: how many there may be, so that others wait until one is lost.
        self.members = set(members)  # those of the present epoch that were not lost
        self.most = most
        self._asked: dict[int, str] = {}
        self._let_in: dict[int, bool] = {}
        self._number = -1

    def ask(self, member: int, text: str, lets_in: bool = False) -> None:
        """A member asks for the next epoch, with a text for all its members."""
        # member: one that is no member yet waits until all members admit it.
        # lets_in: whether joiners may be in the next epoch.
        self._asked[member] = text
        self._let_in[member] = lets_in

    def lose(self, member: int) -> None:
        """Remove a member, which has ended."""
        self.members.discard(member)
        self._asked.pop(member, None)

    def awaited(self) -> set[int]:
        """The members that others wait for."""
        return self.members - self._asked.keys() if self.members & self._asked.keys() else set()

    def joiners(self) -> set[int]:
        """Those that have asked, are no members yet, and for which there is a place."""
        return set(sorted(self._asked.keys() - self.members)[: max(0, self.most - len(self.members))])

    def begin(self) -> Epoch | None:
        """Begin the next epoch, if all members have asked for it; None if one has not, or there is none."""
        # Those that are no members yet join with any epoch but the first, if all members admit them.
        if not self.members or not self.members <= self._asked.keys():
            return None
        whole = self._number >= 0 and all(self._let_in[member] for member in self.members)
        members = sorted(self.members | self.joiners() if whole else self.members)
        epoch = Epoch(self._number + 1, members, [self._asked.pop(member) for member in members])
        self._number, self.members = epoch.number, set(members)
        return epoch


class LauncherLink:
    """A process's end of its socket to the launcher, and the thread that reads it."""

    def __init__(self, line: socket.socket, member: int):
        # line: a socket that keeps messages apart
        # member: number of this process among all that the launcher has started
        self.member, self._line = member, line
        self._epochs: dict[str, Epoch] = {}  # that have begun, by the name of their communicator
        self._values: dict[str, bytes] = {}  # that members have put
        self._lost: set[int] = set()
        self._changed, self._reads = threading.Condition(), True
        threading.Thread(target=self._read, name="distopt's line to its launcher", daemon=True).start()

    def ask(self, name: str, text: str, lets_in: bool = False, first: Sequence[int] = ()) -> Epoch:
        """Ask for the next epoch of a communicator, and wait until it begins."""
        # name: the communicator's, the same on all of its ranks.
        # text: for all its members.
        # first: the members of the communicator's first epoch; default: all processes that live then.
        # Raises ConnectionError: the launcher has ended, or has given this process up.
        self._send({"of": name, "text": text, "lets_in": lets_in, "first": list(first)})
        self.wait(lambda: name in self._epochs)
        return self._epochs.pop(name)

    def resize(self, processes: int) -> None:
        """Tell the launcher how many processes the job is to have, and return when it has heard."""
        self.ask(f"{SIZE} {self.member}", str(processes), first=[self.member])

    def leave(self) -> None:
        """Leave the job: for the launcher this process has ended, so that nobody waits while it does."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def put(self, name: str, value: bytes, to: Sequence[int]) -> None:
        """Send a value to members, which find it by ``value``."""
        self._send({"put": name, "value": value.hex(), "to": list(to)})

    def value(self, name: str) -> bytes | None:
        """Return what a member has put under a name; None if nothing has come yet."""
        return self._values.get(name)

    def wait(self, come: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something is true that the launcher's messages change; tell if it is, after so many seconds."""
        # Raises ConnectionError: it is not, and the launcher has ended, or has given this process up.
        with self._changed:
            self._changed.wait_for(lambda: come() or not self._reads, seconds)
            if not self._reads and not come():
                raise ConnectionError("the launcher has ended, or has given this rank up")
            return come()

    def forget(self, prefix: str) -> None:
        """Drop the values whose names begin like this."""
        with self._changed:
            for name in [name for name in self._values if name.startswith(prefix)]:
                del self._values[name]

    def lost(self, members: Iterable[int]) -> list[int]:
        """Return those of some members that have ended."""
        return sorted(self._lost.intersection(members))

    def _send(self, message: Mapping[str, object]) -> None:
        # the launcher has ended, as whoever waits for an answer learns
        with contextlib.suppress(OSError):
            self._line.send(json.dumps(message).encode())

    def _read(self) -> None:
        while message := self._receive():
            with self._changed:
                self._take(**json.loads(message))
                self._changed.notify_all()
        with self._changed:
            self._reads = False
            self._line.close()
            self._changed.notify_all()

    def _take(self, **message: Any) -> None:
        match message:
            case {"of": name, **epoch}:
                self._epochs[name] = Epoch(**epoch)
            case {"put": name, "value": value}:
                self._values[name] = bytes.fromhex(value)
            case {"lost": member}:
                self._lost.add(member)

    def _receive(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._line.recv(MESSAGE)
        return b""


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell if this job continues without the ranks it loses; RuntimeError if it should, but torchrun would end it."""
    if environ.get(WANTED, "") != "1":
        return False
    if RUN_ID in environ and environ.get(TORCHRUN.size, "1") != "1":
        raise RuntimeError(f"{WANTED} is 1, but {ENDS_ALL}")
    return True


def joins(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell if this process takes the place of a lost rank, and waits to be admitted."""
    return environ.get(JOINS, "") == "1"


def line(environ: MutableMapping[str, str] = os.environ) -> LauncherLink | None:
    """Return this process's line to the launcher; None if it has none."""
    # Processes that this one starts are no ranks: neither the socket nor the variable that names it is left to them.
    global _line
    if LINE in environ:
        descriptor = int(environ.pop(LINE))
        os.set_inheritable(descriptor, False)
        _line = LauncherLink(socket.socket(fileno=descriptor), int(environ[MEMBER]))
    return _line


_line: LauncherLink | None = None
