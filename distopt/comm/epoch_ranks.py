"""The ranks of an epoch of ``distopt run --elastic``, and the connections of gloo's between them.

torch's default process group would end with any of its ranks.  These ranks know each other from the launcher, meet over
a file in the job's folder, which outlives any of them, and can break all their connections at once.
"""

import atexit
import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distopt.comm.board import RankEnded
from distopt.comm.control import PeerLeft
from distopt.comm.gloo import Revocable
from distopt.comm.launchers import LOOPBACK
from distopt.resilience import job
from distopt.resilience.membership import Epoch, Line
from distopt.resilience.operation_log import MEETING, OperationLog, recorder

CONNECT = timedelta(seconds=5)  # for sockets between ranks that have all come to make them
TICK = 0.002  # seconds between two looks at who has come
REVOKED = "revoked"  # the key under which a rank says so
# A host that vanishes is noticed within 5 s, whether there is something to send to it or not.
WATCHFUL = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


class EpochRanks:
    """The members of a communicator in one epoch.

    Args:
        line: to the launcher.
        name: the communicator's.
        epoch: the epoch.

    Attributes:
        rank: this process's number among all that the launcher has started.
        all: those of the members, ascending.
        epoch: the epoch.
    """

    def __init__(self, line: Line, name: str, epoch: Epoch):
        self.rank, self.all, self.name, self.epoch = line.member, list(epoch.members), name, epoch
        self._line, self._revoked = line, False
        self._ways: weakref.WeakSet[Revocable] = weakref.WeakSet()
        self._groups: dict[tuple[int, ...], int] = {}  # how many were made of these ranks
        self._store = dist.FileStore(_path(f"{name} {epoch.number}"), -1)  # type: ignore[attr-defined]
        self._store.set_timeout(CONNECT)
        self._ends = job.ends(self.all)
        weakref.finalize(self, _close, list(self._ends.values()))

    @classmethod
    def next(cls, line: Line, name: str, text: str, lets_in: bool = False) -> "EpochRanks":
        """Ask the launcher for the next epoch of a communicator, and return its members.  Collective of these.

        Args:
            line: to the launcher.
            name: the communicator's.
            text: for all members.
            lets_in: whether processes that wait may be members.
        """
        with _meeting(line.member):
            return cls(line, name, line.ask(name, text, lets_in))

    def agree(self, well: bool) -> bool:
        """Return whether all members live and say that all is well: the same on all that live.  Collective.

        It is the launcher that decides, which no rank's end can divide.
        """
        with _meeting(self.rank):
            heard = self._line.ask(f"{self.name} {self.epoch.number}/well", "well" * well, first=self.all)
        return heard.members == self.all and set(heard.texts) == {"well"}

    # ------------------------------------------------------------------------------------------- Ranks

    @property
    def usable(self) -> bool:
        """Whether they can exchange: not after ``revoke``."""
        return not self._revoked

    def gone(self) -> PeerLeft:
        return PeerLeft("a rank was lost, and those that live go on without it on another communicator")

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a new group of some of them, which torch does not know of.  Collective of these.

        Raises:
            PeerLeft: a rank was lost.
        """
        if self._revoked:
            raise self.gone()
        number = self._groups[tuple(ranks)] = self._groups.get(tuple(ranks), 0) + 1
        store = dist.PrefixStore(f"{'_'.join(map(str, ranks))}/{number}", self._store)  # type: ignore[attr-defined]
        try:
            with _meeting(self.rank):
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
        """Let ``revoke`` revoke this too."""
        self._ways.add(way)
        if self._revoked:
            way.revoke()

    def revoke(self) -> None:
        """Let all that any rank waits for on any way between these ranks fail, now and from now on."""
        if not self._revoked:
            self._revoked = True
            for way in list(self._ways):
                way.revoke()
            with contextlib.suppress(RuntimeError):
                self._store.set(REVOKED, "")

    # ------------------------------------------------------------------------------------------- meetings

    def _await(self, store: Any, ranks: Sequence[int]) -> None:
        """Wait until all of these ranks have come here, as gloo waits for none that is lost meanwhile.

        Raises:
            PeerLeft: one was lost.
        """
        store.set(f"at {self.rank}", "")
        missing = set(ranks) - {self.rank}
        while missing := {rank for rank in missing if not store.check([f"at {rank}"])}:
            time.sleep(TICK)
            self._check(ranks)

    def _connected(self, store: Any, ranks: Sequence[int]) -> Any:
        """Return a group of ranks that have come here.

        gloo connects in another thread, since it notices a rank that is lost meanwhile only by ``CONNECT``.

        Raises:
            PeerLeft: one was lost.
            RuntimeError: one was lost.
        """
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
        ends = {self._ends[rank]: index for index, rank in enumerate(ranks) if rank in self._ends}
        ended, _, _ = select.select(list(ends), [], [], 0)
        if ended:
            raise RankEnded(ends[ended[0]])
        if self._is_broken():
            raise self.gone()

    def _is_broken(self) -> bool:
        """Tell if any rank has called ``revoke``."""
        return self._revoked or bool(self._store.check([REVOKED]))


def _path(name: str) -> str:
    """Return the path of the file over which ranks meet, in the job's folder."""
    folder = job.folder()
    if folder is None:
        raise RuntimeError("a rank with a line to distopt run has no folder of the job")
    return str(folder / f"meeting of {name.replace('/', '_')}")


class Connections:
    """TCP connections that gloo has made, which can be shut down whoever still holds its group.

    gloo's own ``abort`` and ``shutdown`` leave them as they are, and a group lives on as long as a work or a traceback
    refers to it.

    Args:
        descriptors: numbers of files that were opened while gloo made them.
    """

    def __init__(self, descriptors: set[int]):
        found = [(number, _connected(number)) for number in descriptors]
        self._of = [(number, own) for number, own in found if own is not None]
        self._process = os.getpid()
        _all.add(self)

    def revoke(self) -> None:
        """Let everything that waits for them fail, at both ends."""
        if os.getpid() == self._process:
            for _, own in self._of:
                with contextlib.suppress(OSError):  # the other end has gone
                    own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release what this object has of them; gloo's own descriptors stay."""
        for _, own in self._of:
            own.close()
        self._of = []

    def close_in_child(self) -> None:
        """Close them in a forked child, or they would outlive the rank whose child it is."""
        for number, own in self._of:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == os.fstat(own.fileno()).st_ino:  # else gloo had closed it
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
    """Return a descriptor of this object's own for a TCP connection; None if it is something else."""
    try:
        own = socket.socket(fileno=os.dup(number))
    except OSError:  # it has been closed, or is no socket
        return None
    try:
        own.getpeername()
        for level, option, value in WATCHFUL:
            own.setsockopt(level, option, value)
    except OSError:
        own.close()
        return None
    return own


def _options() -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=False)]
    options._timeout, options._threads = CONNECT, 2
    return options


def _meeting(rank: int) -> OperationLog:
    """Return a context for a wait that the time limit holds for."""
    return OperationLog(recorder, f"meetings of rank {rank}", [rank])(MEETING)


def _connect(made: "Future[Any]", store: Any, rank: int, size: int) -> None:
    try:
        made.set_result(dist.ProcessGroupGloo(store, rank, size, _options()))
    except RuntimeError as error:
        made.set_exception(error)


def _close(descriptors: Sequence[int]) -> None:
    for number in descriptors:
        os.close(number)
