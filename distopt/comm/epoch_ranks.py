"""The ranks of an epoch of ``distopt run --elastic``, and the connections of gloo's between them.

torch's default process group would end with any of its ranks.  These ranks know each other from the launcher, meet over
it, which outlives any of them, and can break all their connections at once.
"""

import atexit
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distopt.comm.board import RankEnded
from distopt.comm.control import PeerLeft
from distopt.comm.gloo import Revocable
from distopt.comm.keepalive import keep_alive
from distopt.comm.launchers import LOOPBACK
from distopt.resilience.environment import ADDRESS
from distopt.resilience.membership import Epoch, LauncherLink
from distopt.resilience.operation_log import meeting_of

CONNECT = timedelta(seconds=5)  # for sockets between ranks that have all come to make them
TICK = 0.002  # seconds between two looks at who is lost
REVOKED = "revoked"  # the key under which a rank says so


class LineStore(dist.Store):  # type: ignore[misc,name-defined]
    """Addresses of ranks, for gloo: each rank has what any has put, sent over the launcher."""

    def __init__(self, ranks: "EpochRanks", line: LauncherLink, place: str):
        super().__init__()
        # place: the beginning of all keys
        self._ranks, self._line, self._place = ranks, line, place

    def set(self, key: str, value: bytes | str) -> None:
        """Give a value to all members."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._line.put(self._place + key, raw, self._ranks.all)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key])
        value = self._line.value(self._place + key)
        assert value is not None
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Tell if values for these keys have come."""
        return all(self._line.value(self._place + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = CONNECT) -> None:
        """Wait for values; RuntimeError if they have not come in time, or will not, as a member was lost."""
        if not self._line.wait(lambda: self.check(keys) or self._ranks.broken, timeout.total_seconds()):
            raise RuntimeError(f"no rank has said {', '.join(keys)} within {timeout.total_seconds():g} s")
        if not self.check(keys):
            raise RuntimeError("a rank was lost meanwhile")


class EpochRanks:
    """The members of a communicator in one epoch."""

    def __init__(self, line: LauncherLink, name: str, epoch: Epoch):
        self.place = f"in epoch {epoch.number}"  # the epoch in words
        # rank: this process's number among all that the launcher has started
        self.rank, self.all, self.name, self.epoch = line.member, list(epoch.members), name, epoch
        self._line, self._revoked = line, False
        self._ways: weakref.WeakSet[Revocable] = weakref.WeakSet()
        self._groups: dict[tuple[int, ...], int] = {}  # how many were made of these ranks
        self._gathers: dict[tuple[int, ...], int] = {}  # and how many times they have told each other
        line.forget(f"{name} {epoch.number - 1}/")
        self._store = LineStore(self, line, f"{name} {epoch.number}/")

    @classmethod
    def next(cls, line: LauncherLink, name: str, text: str, admit: bool = False, limited: bool = True) -> "EpochRanks":
        """Ask the launcher for the next epoch of a communicator, and return its members.  Collective of these."""
        # text: for all members.
        # limited: whether the time limit holds.
        with meeting_of(line.member, limited=limited):
            return cls(line, name, line.ask(name, text, admit))

    def agree(self, well: bool) -> bool:
        """Return whether all members live and say that all is well: the same on all that live.  Collective."""
        # The launcher decides, which no rank's end can divide.
        with meeting_of(self.rank):
            heard = self._line.ask(f"{self.name} {self.epoch.number}/well", "well" * well, first=self.all)
        return heard.members == self.all and set(heard.texts) == {"well"}

    def gather(self, ranks: Sequence[int], text: str) -> list[str]:
        """Return a short text of each of some members, by the launcher.  Collective of these."""
        # Raises PeerLeft: one was lost.
        number = self._gathers[tuple(ranks)] = self._gathers.get(tuple(ranks), 0) + 1
        name = f"{self.name} {self.epoch.number}/{'_'.join(map(str, ranks))}/{number}"
        with meeting_of(self.rank):
            heard = self._line.ask(name, text, first=list(ranks))
        if heard.members != list(ranks):
            raise self.gone()
        return heard.texts

    # ------------------------------------------------------------------------------------------- Ranks

    @property
    def usable(self) -> bool:
        """Whether they can exchange: not after ``revoke``."""
        return not self._revoked

    def gone(self) -> PeerLeft:
        return PeerLeft("a rank was lost, and those that live go on without it on another communicator")

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a new group of some of them, which torch does not know of.  Collective of these."""
        # Raises PeerLeft: a rank was lost.
        if self._revoked:
            raise self.gone()
        number = self._groups[tuple(ranks)] = self._groups.get(tuple(ranks), 0) + 1
        store = dist.PrefixStore(f"{'_'.join(map(str, ranks))}/{number}", self._store)  # type: ignore[attr-defined]
        try:
            with meeting_of(self.rank):
                self._await(store, ranks)
                before = _descriptors()
                group = self._connected(store, ranks)
        except PeerLeft:
            raise
        except RuntimeError as error:  # a rank was lost that wrote to the file, or that others connected to
            raise PeerLeft(f"ranks {list(ranks)} cannot connect: {error}") from None
        connections = Connections(_descriptors() - before)
        weakref.finalize(group, connections.close)
        self.keep(connections)
        return group

    def keep(self, way: Revocable) -> None:
        """Make ``revoke`` end all waits on this object too."""
        self._ways.add(way)
        if self._revoked:
            way.revoke()

    def revoke(self) -> None:
        """All waits between these ranks fail from now on, on every rank."""
        if not self._revoked:
            self._revoked = True
            for way in list(self._ways):
                way.revoke()
            self._store.set(REVOKED, "")

    # ------------------------------------------------------------------------------------------- meetings

    def _await(self, store: Any, ranks: Sequence[int]) -> None:
        """Wait until all of these ranks have come here: gloo itself does not notice one that is lost meanwhile."""
        # Raises PeerLeft: one was lost.
        store.set(f"at {self.rank}", "")
        come = [f"at {rank}" for rank in ranks]
        self._line.wait(lambda: store.check(come) or self.broken)
        self._check(ranks)

    def _connected(self, store: Any, ranks: Sequence[int]) -> Any:
        """Return a group of ranks that have come here."""
        # gloo connects in another thread, since it notices a rank that is lost meanwhile only after `CONNECT`.
        # Raises PeerLeft: one was lost.
        made: Future[Any] = Future()
        thread = threading.Thread(target=_connect, args=(made, store, ranks.index(self.rank), len(ranks)), daemon=True)
        thread.start()
        try:
            while not wait([made], TICK).done:
                self._check(ranks)
        except PeerLeft:
            # Python must not end under it, and gloo tries five times.
            atexit.register(thread.join, 6 * CONNECT.total_seconds())
            raise
        return made.result()

    def _check(self, ranks: Sequence[int]) -> None:
        """Raise PeerLeft if one of these ranks has ended, or any has called ``revoke``."""
        for ended in self._line.lost(ranks):
            raise RankEnded(list(ranks).index(ended))
        if self.broken:
            raise self.gone()

    @property
    def broken(self) -> bool:
        """Whether a member has ended, or has called ``revoke``."""
        return self._revoked or self._store.check([REVOKED]) or bool(self._line.lost(self.all))


class Connections:
    """TCP connections that gloo has made, which can be shut down whoever still holds its group."""

    # gloo's own `abort` and `shutdown` leave them as they are, and a group lives on as long as a work or a traceback
    # refers to it.

    def __init__(self, descriptors: set[int]):
        # descriptors: numbers of files that were opened while gloo made them
        found = [(number, _connected(number)) for number in descriptors]
        self._of = [(number, own) for number, own in found if own is not None]
        self._process = os.getpid()
        _all.add(self)

    def revoke(self) -> None:
        """Everything that waits for them fails from now on, at both ends."""
        if os.getpid() == self._process:
            for _, own in self._of:
                with contextlib.suppress(OSError):  # the other end has gone
                    own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this object's descriptors of them; gloo's own stay open."""
        for _, own in self._of:
            own.close()
        self._of = []

    def close_in_child(self) -> None:
        """Close them in a forked child, or they would outlive the rank whose child it is."""
        for number, own in self._of:
            with contextlib.suppress(OSError):
                # else gloo had closed it
                if os.fstat(number).st_ino == os.fstat(own.fileno()).st_ino:
                    os.close(number)
        self.close()


_all: "weakref.WeakSet[Connections]" = weakref.WeakSet()


def _close_all_in_child() -> None:
    for connections in list(_all):
        connections.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _connected(number: int) -> socket.socket | None:
    """Return a new descriptor of a TCP connection; None if it is something else."""
    try:
        own = socket.socket(fileno=os.dup(number))
    except OSError:  # it has been closed, or is no socket
        return None
    try:
        own.getpeername()
        keep_alive(own)
    except OSError:
        own.close()
        return None
    return own


def _options() -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    address = os.environ.get(ADDRESS, LOOPBACK)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    options._timeout, options._threads = CONNECT, 2
    return options


def _connect(made: "Future[Any]", store: Any, rank: int, size: int) -> None:
    try:
        made.set_result(dist.ProcessGroupGloo(store, rank, size, _options()))
    except Exception as error:
        made.set_exception(error)
