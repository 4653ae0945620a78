"""Ranks of a process group of ``torch.distributed``: votes and collectives of numpy arrays over gloo, without MPI.

Messages go from rank to rank, and are added up here, in rank order: gloo's own collectives add in another order, and a
vote takes them longer.  On one machine all ranks share the memory of what ``alloc`` returns: sums need no messages, and
votes are written on a board.
"""

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from distopt.comm.board import Board, RankEnded
from distopt.comm.communicator import (
    Communicator,
    Groups,
    Ragged,
    as_flat,
    check_root,
    flat_parts,
    group_of,
    slices,
    split,
    sum_in_rank_order,
)
from distopt.comm.control import LEAVE, ControlChannel, PeerLeft, agreed
from distopt.comm.launchers import LOOPBACK, Meeting, meeting
from distopt.comm.outbox import Outboxes
from distopt.comm.receive_buffer import ReceiveBuffer
from distopt.comm.shared_memory import SharedMemory, SharingCommunicator
from distopt.comm.sockets import watch
from distopt.resilience.abort import abort_on_exception
from distopt.resilience.operation_log import MEETING, OperationLog, recorder

FRAME = 32  # int64 numbers of a message of votes: a vote, the bytes of a text, and room for words of farewell
LENGTH, WORDS = 9, 10
NOTHING = np.empty(0, np.int64)
PAGE = 512  # numbers of a text that are written at once
NO_LIMIT = timedelta(days=365)  # for gloo: it is the watchdog that ends a wait, and says where


Works = list[tuple[int, Any]]  # what is under way, and with which rank


class Messages:
    """Messages between ranks of the default process group, over a gloo group that nothing else uses.

    Args:
        ranks: their numbers there, ascending.  Collective of them.
    """

    def __init__(self, ranks: Sequence[int]):
        self.ranks, self._group = list(ranks), None  # type: list[int], Any
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        if self.size > 1:
            self._group = _gloo(self.ranks)

    @property
    def usable(self) -> bool:
        """Whether messages can be sent: the script may have destroyed the process group."""
        return self.size == 1 or (self._group is not None and dist.is_initialized())

    def check(self) -> None:
        """Raise RuntimeError if the process group was destroyed."""
        if not self.usable:
            raise RuntimeError(
                "the process group of torch.distributed was destroyed, and ranks cannot exchange any more; call "
                "destroy_process_group() at the end of the script"
            )

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``, flat arrays of known lengths.

        Raises:
            RankEnded: a rank has ended.
            RuntimeError: the process group was destroyed.
        """
        self.check()
        self.finish(self.begin(parts, received))

    def begin(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> Works:
        """Begin an ``exchange``, and return what ``finish`` waits for."""
        works: Works = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if received[source].size:
                works.append((source, self._group.recv([_tensor(received[source])], source, 0)))
            if parts[to].size:
                works.append((to, self._group.send([_tensor(parts[to])], to, 0)))
        return works

    def finish(self, works: Works) -> None:
        """Wait until an exchange is complete.

        Raises:
            RankEnded: a rank has ended.
        """
        for rank, work in works:
            try:
                work.wait()
            except RuntimeError:  # of a socket, whose text names no rank
                raise RankEnded(rank) from None

    def close(self) -> None:
        """Release the group."""
        if self._group is not None:
            _open.remove(self._group)
        self._group = None


_groups: dict[tuple[int, ...], int] = {}  # how many were made of these ranks
_open: list[Any] = []  # groups that are not closed


def _gloo(ranks: Sequence[int]) -> Any:
    """Return a group of gloo's, which torch does not know of.  Collective of its ranks.

    torch names a group of some ranks by the number of groups that a rank is in, which may differ among them: then
    they wait for each other for ever.
    """
    number = _groups[tuple(ranks)] = _groups.get(tuple(ranks), 0) + 1
    name = f"distopt/{'_'.join(map(str, ranks))}/{number}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    group = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), NO_LIMIT)
    _open.append(group)
    return group


class _Writable:
    """The memory of an array, as if it could be written: torch has no tensors that are only read."""

    def __init__(self, x: np.ndarray):
        self.owner = x
        self.__array_interface__ = x.__array_interface__ | {"data": (x.ctypes.data, False)}


def _tensor(x: np.ndarray) -> torch.Tensor:
    """Return the bytes of a flat array, as a tensor on the same memory."""
    raw = x.view(np.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else np.asarray(_Writable(raw)))


class ProcessGroupControl(ControlChannel):
    """Votes over a gloo group.

    Each rank sends its vote to all others.  A rank whose script has ended sends words of farewell in place of its next
    vote, and the others raise them.

    Args:
        ranks: the numbers of the ranks in the default process group, ascending.  Collective of them.
    """

    def __init__(self, ranks: Sequence[int]):
        self._messages, self.ranks = Messages(ranks), list(ranks)
        self.rank, self.size = self._messages.rank, self._messages.size
        self._numbers = itertools.count()
        self._name = (
            f"torch's ranks {', '.join(map(str, ranks))}" if len(ranks) < 9 else f"{len(ranks)} of torch's ranks"
        )
        self._votes = self.log("votes")
        world_rank = self._messages.ranks[self.rank]
        self.waits = OperationLog(recorder, f"waits of rank {world_rank} ({self._name})", [world_rank])
        self._frames = np.zeros((self.size, FRAME), np.int64)
        self._board: Board | None = None  # until there are boards, votes and texts are messages
        self._pages: Board | None = None
        if self.size > 1:
            _controls.append(self)
            _join(world_rank)
        self.vote_on_version()
        if self.size > 1:
            self._board, self._pages = Board.open(self, FRAME), Board.open(self, PAGE)

    def log(self, name: str) -> OperationLog:
        """Return a log of operations that all ranks do alike.  Collective."""
        return OperationLog(recorder, f"{name} ({self._name}, {next(self._numbers)})", self._messages.ranks)

    def maximum(self, votes: np.ndarray) -> None:
        """Replace an int64 vector by its elementwise maximum over ranks.  Collective."""
        recorder.step = self.progress
        with self._votes("vote", 0, self.progress + self.part):
            frames = self._swap(votes, 0)
        np.max(frames[:, : votes.size], axis=0, out=votes)

    def gather_strings(self, text: str) -> list[str]:
        """Return one text per rank, in rank order.  Collective."""
        mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
        with self._votes("gather"):
            lengths = self._swap(np.zeros(0, np.int64), mine.size)[:, LENGTH].tolist()
            texts = [np.empty(n, np.uint8) for n in lengths]
            with self._hears_of_ends():
                if self._pages:
                    _write_pages(self._pages, mine, texts)
                else:
                    self._messages.exchange([mine] * self.size, texts)
            texts[self.rank] = mine
        return [part.tobytes().decode() for part in texts]

    def subgroup(self, members: tuple[int, ...]) -> "ProcessGroupControl":
        """Make a channel of some of the ranks.  Collective over all ranks."""
        return ProcessGroupControl([self._messages.ranks[member] for member in members])

    def close(self) -> None:
        """Release the group.  Collective."""
        if self in _controls:
            _controls.remove(self)
        for board in filter(None, (self._board, self._pages)):
            board.close()
        self._messages.close()

    def begin_leaving(self) -> Works:
        """Begin to send all ranks words of farewell in place of the next vote."""
        if self._gone or not self._messages.usable:
            return []
        words = np.frombuffer(f"rank {self.rank} left after {self.progress}".encode(), np.uint8)
        frame = np.zeros(FRAME, np.int64)
        frame[: len(LEAVE)] = LEAVE
        room = frame[WORDS:].view(np.uint8)
        room[: words.size] = words[: room.size]
        if self._board:
            self._board.write(frame)
            return []
        return self._messages.begin([frame] * self.size, list(self._frames))

    def end_leaving(self, works: Works) -> None:
        """Wait until each rank has read the words, or has left."""
        for work in works:
            with contextlib.suppress(RankEnded):
                self._messages.finish([work])

    def _swap(self, vote: np.ndarray, length: int) -> np.ndarray:
        """Return the frames of all ranks, ``(size, FRAME)``.

        Raises:
            PeerLeft: a rank has sent words of farewell, or has ended without.
        """
        frames = self._frames
        mine = frames[self.rank]
        mine[:] = 0
        mine[: vote.size], mine[LENGTH] = vote, length
        with self._hears_of_ends():
            if self._board:
                self._messages.check()
                frames[...] = self._board.swap(mine)
            else:
                self._messages.exchange([mine] * self.size, list(frames))
        for rank, frame in enumerate(frames):
            words = frame[WORDS:].view(np.uint8)
            if words[0]:
                self._raise_left(rank, words.tobytes().rstrip(b"\0").decode(errors="replace"))
        return frames

    @contextlib.contextmanager
    def _hears_of_ends(self) -> Iterator[None]:
        """Raise PeerLeft in the place of what tells that a rank has ended, and at once if one has before."""
        if self._gone:
            raise self._gone
        try:
            yield
        except RankEnded as error:
            self._raise_left(error.rank, str(error))

    def _raise_left(self, rank: int, words: str) -> NoReturn:
        """Raise PeerLeft now and at every later vote; the lowest of the other ranks prints where."""
        self._gone = agreed(PeerLeft(f"{words}, before {self.progress}"), speaks=self.rank == (0 if rank else 1))
        raise self._gone from None


def _write_pages(pages: Board, mine: np.ndarray, texts: Sequence[np.ndarray]) -> None:
    """Write a text a page at a time, and fill in those of all ranks.

    Args:
        pages: the board.
        mine: this rank's text, in bytes.
        texts: for those of all ranks, in rank order.
    """
    for start in range(0, max(text.size for text in texts), 8 * PAGE):
        page = np.zeros(PAGE, np.int64)
        written = mine[start : start + 8 * PAGE]
        page.view(np.uint8)[: written.size] = written
        for text, read in zip(texts, pages.swap(page), strict=True):
            part = text[start : start + 8 * PAGE]
            part[...] = read.view(np.uint8)[: part.size]


_controls: list[ProcessGroupControl] = []


@functools.cache
def _join(rank: int) -> None:
    """Set up this process as a rank, once: it ends at an uncaught exception, time limits hold, and it says farewell."""
    abort_on_exception(rank, os._exit)
    watch(rank)
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Forget all channels in a forked child, which is no rank, and keep gloo's groups: their threads are not there."""
    _controls.clear()
    for group in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # or the end of the child would wait for the threads


def _leave() -> None:
    """Tell the ranks that still want to exchange, on any channel, that this rank has left; called at exit."""
    leaving = [(control, control.begin_leaving()) for control in _controls]
    for control, works in leaving:
        control.end_leaving(works)


def meet() -> None:
    """Initialize the default process group, as the environment tells.  Collective.

    torchrun has made a store.  In a Slurm step rank 0 listens for the others: if all are on one machine, on its
    loopback interface alone, as gloo's sockets do then; else on all interfaces, as torch's store does everywhere.

    Raises:
        RuntimeError: the ranks of a Slurm step cannot meet.
    """
    at = meeting()
    if at is None:
        dist.init_process_group("gloo")
        return
    _join(at.rank)
    with OperationLog(recorder, f"meetings of rank {at.rank}", [at.rank])(MEETING):
        if at.host == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            store = _store(at)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"rank {at.rank} of a Slurm step: ranks cannot meet at {at.host}, port {at.port} ({error}); export "
                "MASTER_ADDR and MASTER_PORT before srun: the first host's name, and a port that is free there"
            ) from None
        dist.init_process_group("gloo", store=store, rank=at.rank, world_size=at.size)


def _store(at: Meeting) -> Any:
    """Return the store over which the ranks of a Slurm step learn each other's addresses.  Rank 0 has it.

    Raises:
        OSError: rank 0 cannot listen there, or there is no such host.
        RuntimeError: rank 0 cannot listen there.
    """
    socket.getaddrinfo(at.host, at.port)  # torch's store would try again and again
    listener = None
    if at.rank == 0 and at.host == LOOPBACK:
        listener = socket.create_server((LOOPBACK, at.port)).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        at.host, at.port, at.size, at.rank == 0, NO_LIMIT, wait_for_workers=False, master_listen_fd=listener
    )
    return dist.PrefixStore(at.name, store)  # type: ignore[attr-defined]  # should another step use the port


def join(ranks: Sequence[int] | None = None) -> tuple[ProcessGroupControl, int, list[int]]:
    """Return votes of ranks of the default process group, which is initialized if it is not yet.  Collective of them.

    Args:
        ranks: their numbers there, ascending; None for all.

    Returns:
        The votes; this rank's number among those of its machine; and the machine of each rank, as numbers.
    """
    if not dist.is_initialized():
        meet()
    control = ProcessGroupControl(range(dist.get_world_size()) if ranks is None else ranks)
    machines = control.gather(_machine())
    hosts = [machines.index(machine) for machine in machines]
    return control, hosts[: control.rank].count(hosts[control.rank]), hosts


class ProcessGroupCommunicator(SharingCommunicator):
    """Communicator of the ranks of torch's default process group, for numpy arrays, over gloo.

    Making one is collective.  The process group is initialized if it is not yet, as ``torchrun``, Slurm and others tell
    in the environment; its backend may be any.  With more than one rank, an uncaught exception ends this process from
    then on; the launcher ends the others.

    Args:
        reason: why this transport was chosen, for ``repr``.

    Raises:
        RuntimeError: rank 0 of a Slurm step cannot listen for the others.
        ValueError: on every rank alike, if ranks run different versions of distopt.

    Example:
        Skipped where examples run as tests: it needs two processes, ``torchrun --nproc-per-node 2 script.py``.

        >>> import numpy as np
        >>> from distopt.comm.process_group import ProcessGroupCommunicator
        >>> comm = ProcessGroupCommunicator()  # doctest: +SKIP
        >>> x = np.ones(2, np.float32)
        >>> comm.all_reduce(x)  # doctest: +SKIP
        >>> x.tolist()  # doctest: +SKIP
        [2.0, 2.0]
    """

    wire = "gloo"

    rank_ordered = True

    def __init__(self, reason: str = ""):
        self._make(None, reason)

    def _make(self, ranks: Sequence[int] | None, reason: str) -> None:
        """Set up messages and votes of some of the ranks of the default group, or of all."""
        self.control, self.local_rank, self._hosts = join(ranks)
        self.rank, self.size, self._ranks = self.control.rank, self.control.size, self.control.ranks
        outboxes = Outboxes.open(self.control) if self.size > 1 else None
        self._messages: Messages | Outboxes = outboxes or Messages(self._ranks)
        self._log = self.control.log("data")
        places = "several hosts" if self.spans_hosts else "one host"
        self.reason = self._place = "; ".join(filter(None, (f"torch {torch.__version__}, gloo", reason, places)))
        self._shared, self._received = SharedMemory(), ReceiveBuffer()

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks, added in rank order.  Collective."""
        flat = as_flat(x)
        with self._log("all_reduce", flat.nbytes, self._tag):
            parts = [flat[s] for s in slices(flat.size, self.size)]
            mine = parts[self.rank]
            received = split(self._received.view(flat.dtype, self.size * mine.size), [mine.size] * self.size)
            received[self.rank] = mine
            self._messages.exchange(parts, received)
            mine[...] = sum_in_rank_order(received)
            self._messages.exchange([mine] * self.size, parts)

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return every rank's x, flat, in rank order.  Collective."""
        flat = as_flat(x, writable=False)
        with self._log("ragged all_gather" if ragged else "all_gather", flat.nbytes, self._tag):
            sizes = list(ragged or [flat.size] * self.size) if ragged is not True else self._lengths([flat] * self.size)
            return self._swap([flat] * self.size, sizes, None if into is None or ragged else split(into, sizes))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r, and return the parts for this rank, flat, in rank order.  Collective."""
        flats = flat_parts(parts, self.size)
        with self._log("ragged all_to_all" if ragged else "all_to_all", 0, self._tag):
            sizes = list(ragged or [flats[self.rank].size] * self.size) if ragged is not True else self._lengths(flats)
            return self._swap(flats, sizes)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by the x of rank ``root``.  Collective."""
        flat, root = as_flat(x), check_root(root, self.size)
        none = flat[:0]
        with self._log("broadcast", flat.nbytes, self._tag):
            sent = [flat if self.rank == root else none] * self.size
            self._messages.exchange(sent, [flat if r == root else none for r in range(self.size)])

    def barrier(self) -> None:
        """Wait until every rank has called this.  Collective."""
        with self._log("barrier"):
            self._lengths([NOTHING] * self.size)

    def make_duplicate(self) -> Communicator:
        """Make a communicator of the same ranks over messages of its own.  Collective."""
        return self.of_ranks(self._ranks, f"beside rank {self.rank}'s other one")

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Make a communicator of a group over messages of its own.  Collective."""
        members = group_of(self.rank, groups)
        return self.of_ranks([self._ranks[m] for m in members], f"{len(members)} of {self.size} ranks")

    def close(self) -> None:
        """Release the groups; nothing may be called after it.  Collective."""
        for other in (*([] if self._second is None else [self._second]), *self._subgroups.values()):
            other.close()
        self.control.close()
        self._messages.close()

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], reason: str) -> "ProcessGroupCommunicator":
        """Make a communicator of some ranks of the default group.  Collective of them.

        Args:
            ranks: their numbers there, ascending.
            reason: why there is one, for ``repr``.
        """
        comm = cls.__new__(cls)
        comm._make(ranks, reason)
        return comm

    def _lengths(self, parts: Sequence[np.ndarray]) -> list[int]:
        """Return the lengths of the parts that each rank has for this one, ``(size,)``.  Collective."""
        mine = np.array([part.size for part in parts], np.int64).reshape(-1, 1)
        lengths = mine.copy()
        self._messages.exchange(list(mine), list(lengths))
        return lengths.reshape(-1).tolist()

    def _swap(
        self, parts: Sequence[np.ndarray], sizes: Sequence[int], received: list[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r, and return what each rank sent, ``sizes`` elements, into ``received`` if any."""
        received = [np.empty(n, parts[0].dtype) for n in sizes] if received is None else received
        if received[self.rank] is not parts[self.rank]:
            received[self.rank][...] = parts[self.rank]
        self._messages.exchange(parts, received)
        return received


def _machine() -> str:
    """Return a text that is the same for processes of one machine."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()
