"""Messages between processes over groups of gloo's, and the ranks of torch's default process group."""

import ctypes
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from distopt.comm.board import RankEnded
from distopt.resilience.operation_log import meeting_of

NO_LIMIT = timedelta(days=365)  # for gloo: it is the watchdog that ends a wait, and says where


class Revocable(Protocol):
    """Something over which ranks exchange, and whose waits can be ended."""

    def revoke(self) -> None:
        """All waits on it fail from now on, on every rank."""


class GlooRanks(Protocol):
    """Ranks that can make groups of gloo's."""

    rank: int  # this process's number
    all: list[int]  # the numbers of all, ascending
    place: str

    @property
    def usable(self) -> bool:
        """Whether they can exchange."""

    def gone(self) -> RuntimeError:
        """The error to raise where they cannot exchange any more."""

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a new group of some of them (ascending), which torch does not know of.  Collective of these."""

    def keep(self, way: Revocable) -> None:
        """Make ``revoke`` end all waits on this object too."""

    def revoke(self) -> None:
        """All waits between these ranks fail from now on, on every rank."""


class TorchRanks:
    """The ranks of torch's default process group, which must be initialized.  Where one ends, its launcher ends all."""

    place = "of torch's"

    def __init__(self) -> None:
        self.rank, self.all = dist.get_rank(), list(range(dist.get_world_size()))

    @property
    def usable(self) -> bool:
        """Whether they can exchange: the script may have destroyed the process group."""
        return dist.is_initialized()

    def gone(self) -> RuntimeError:
        return RuntimeError(
            "the process group of torch.distributed was destroyed, and ranks cannot exchange any more; call "
            "destroy_process_group() at the end of the script"
        )

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a new group of some of them, which torch does not know of.  Collective of these."""
        # torch names a group of some ranks by the number of groups that a rank is in, which may differ among them: then
        # they wait for each other for ever.
        number = _groups[tuple(ranks)] = _groups.get(tuple(ranks), 0) + 1
        name = f"distopt/{'_'.join(map(str, ranks))}/{number}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        with meeting_of(self.rank):
            return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), NO_LIMIT)

    def keep(self, way: Revocable) -> None:
        """Nothing to do: these ranks are lost together."""

    def revoke(self) -> None:
        """Nothing to do: these ranks are lost together."""


# how many were made of these ranks of the default process group
_groups: dict[tuple[int, ...], int] = {}
Works = list[tuple[int, Any]]  # what is under way, and with which rank


class GlooMessages:
    """Messages between some ranks, over a group of gloo's that nothing else uses.  Collective of them."""

    def __init__(self, ranks: GlooRanks, members: Sequence[int], connect: bool = True):
        # members: numbers of those that have the messages, ascending
        # connect: False to do that later, if there are messages.
        self.ranks, self._among, self._group = list(members), ranks, None  # type: list[int], GlooRanks, Any
        self.rank, self.size, self._closed = self.ranks.index(ranks.rank), len(self.ranks), False
        if connect:
            self.connect()

    def connect(self) -> None:
        """Make the group.  Collective."""
        if self.size > 1:
            self._group = self._among.group(self.ranks)
            _open.add(self)

    @property
    def usable(self) -> bool:
        return not self._closed and (self.size == 1 or self._among.usable)

    def check(self) -> None:
        """Raise PeerLeft if a rank was lost, or RuntimeError if the process group was destroyed."""
        if not self.usable:
            raise self._among.gone()

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``, flat arrays of known lengths."""
        # Raises PeerLeft: a rank has ended.
        self.check()
        self.finish(self.begin(parts, received))

    def begin(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray], tag: int = 0) -> Works:
        """Begin an ``exchange``, and return what ``finish`` waits for."""
        works: Works = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            for peer, begin, x in ((source, self._group.recv, received[source]), (to, self._group.send, parts[to])):
                if x.size:
                    try:
                        works.append((peer, begin([_tensor(x)], peer, tag)))
                    except RuntimeError:
                        raise RankEnded(peer) from None
        return works

    def finish(self, works: Works) -> None:
        """Wait until an exchange is complete."""
        # Raises RankEnded: a rank has ended.
        for rank, work in works:
            try:
                work.wait(NO_LIMIT)
            except RuntimeError:  # of a socket, whose text names no rank
                raise RankEnded(rank) from None

    def close(self) -> None:
        _open.discard(self)
        self._group, self._closed = None, True

    def keep_in_child(self) -> None:
        """Keep the group in a forked child for ever."""
        _keep(self._group)


_open: "weakref.WeakSet[GlooMessages]" = weakref.WeakSet()  # that are not closed


def _keep_all_in_child() -> None:
    if dist.is_initialized():
        _keep(dist.group.WORLD)
    for messages in list(_open):
        messages.keep_in_child()


def _keep(group: Any) -> None:
    """Keep a group for ever: a forked child lacks its threads, for which its end would wait, or crash."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_all_in_child)


class _Writable:
    """The memory of an array, as if it were writable: torch has no read-only tensors."""

    def __init__(self, x: np.ndarray):
        self.owner = x
        self.__array_interface__ = x.__array_interface__ | {"data": (x.ctypes.data, False)}


def _tensor(x: np.ndarray) -> torch.Tensor:
    raw = x.view(np.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else np.asarray(_Writable(raw)))
