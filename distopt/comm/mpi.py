"""Ranks are MPI processes, arrays are numpy's."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distopt.comm.communicator import (
    HALVES,
    Communicator,
    checked,
    checked_parts,
    checked_root,
    cut,
    slices,
    sum_halves,
)
from distopt.comm.mpi_control import MpiControl, any_thread, brand, finish, join, mpi, world_comm
from distopt.comm.shared import SharedMemory, open_handle

if TYPE_CHECKING:
    from mpi4py import MPI

UNDER_WAY = 3  # sums of 16 bits: one for each phase
SLICES, SUMS = 1, 2  # tags, so that neither is taken for the other


class ReceiveBuffer:
    """Memory for what others send, the same every time."""

    def __init__(self) -> None:
        self._raw = np.empty(0, np.uint8)

    def view(self, dtype: np.dtype, n: int) -> np.ndarray:
        """Room for n elements."""
        nbytes = n * dtype.itemsize
        if self._raw.nbytes < nbytes:
            self._raw = np.empty(nbytes, np.uint8)
        return self._raw[:nbytes].view(dtype)


class MpiCommunicator(Communicator):
    """``comm`` (default COMM_WORLD) for numpy arrays; data and votes travel on duplicates of it.

    With more than one rank an uncaught exception on any rank ends the whole job from here on.

    Raises ImportError without mpi4py, and RuntimeError if the launcher's world is not COMM_WORLD's.
    """

    CHUNK = 1 << 30  # elements or bytes per MPI call: Open MPI counts in 32 bits

    def __init__(self, comm: "MPI.Comm | None" = None, why: str = ""):
        comm = world_comm() if comm is None else comm
        membership = join(comm)
        self.control: MpiControl = membership.control
        self.local_rank, self._hosts = membership.local_rank, membership.hosts
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self.may_overlap = any_thread()
        self._log = self.control.log("data")
        self.patience = 0.0
        self.rank_ordered = self.size <= 2
        self._place = f"{brand()}{', ' + why if why else ''}; {'several hosts' if self.spans_hosts else 'one host'}"
        self.why = self._place
        self._shared = SharedMemory()
        self._received = [ReceiveBuffer() for _ in range(UNDER_WAY)]

    @property
    def travels_meanwhile(self) -> bool:
        """Between hosts."""
        return self.spans_hosts

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks."""
        flat = checked(x)
        with self._log("all_reduce", flat.nbytes, self._purpose):
            collections.deque(self._sum(flat), maxlen=0)

    def all_reduce_each(self, arrays: Iterable[np.ndarray | None]) -> Iterator[np.ndarray]:
        """Sums of arrays, in turn; between hosts three of 16 bits are under way at once.

        While the slices of one go to their owners, and the sums of the one before come back, the caller has the one
        before that and makes the next: the network never waits for arithmetic.
        """
        if not self.travels_meanwhile:
            yield from super().all_reduce_each(arrays)
            return
        begun: collections.deque[tuple[np.ndarray | None, Iterator[None]]] = collections.deque()
        for turn, x in enumerate(_with_gaps(arrays, UNDER_WAY - 1)):
            if x is not None:
                self._log("all_reduce", x.nbytes, self._purpose)
            begun.append((x, iter(()) if x is None else self._sum(checked(x), turn % UNDER_WAY)))
            for _, phases in reversed(begun):  # the newest first: it is sent before one waits for the others
                next(phases, None)
            if len(begun) == UNDER_WAY:
                done, _ = begun.popleft()
                if done is not None:
                    yield done
            if all(waiting is None for waiting, _ in begun):  # the next array may take longer than any time limit
                self._log.end()

    def _sum(self, x: np.ndarray, room: int = 0) -> Iterator[None]:
        """Replace x by its sum, in ``UNDER_WAY`` phases; each but the first begins with a wait.

        Slices of 16-bit numbers go to their owners, are added up there, and come back to their places.  Of all others
        the first phase does everything: between hosts by the non-blocking call, overlapped or not, since in the other
        one some MPI adds in another order.
        """
        if x.dtype not in HALVES:
            for start in range(0, x.size, self.CHUNK):
                piece = x[start : start + self.CHUNK]
                if self.spans_hosts:
                    finish([self._comm.Iallreduce(mpi().IN_PLACE, piece)], self)
                else:
                    self._comm.Allreduce(mpi().IN_PLACE, piece)
            return
        parts = [x[s] for s in slices(x.size, self.size)]
        own = parts[self.rank]
        received = cut(self._received[room].view(x.dtype, self.size * own.size), [own.size] * self.size)
        received[self.rank] = own
        requests = self._exchange(parts, received, SLICES)
        yield
        finish(requests, self)
        sum_halves(received, own)
        requests = self._exchange([own] * self.size, parts, SUMS)
        yield
        finish(requests, self)

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Every rank's x, flat, in rank order."""
        flat = checked(x, writable=False)
        with self._log("ragged all_gather" if ragged else "all_gather", flat.nbytes, self._purpose):
            sizes = self._sizes(flat.size) if ragged else [flat.size] * self.size
            return self._swap([flat] * self.size, sizes, None if into is None or ragged else cut(into, sizes))

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r; return the parts for this rank, in rank order."""
        flats = checked_parts(parts, self.size)
        with self._log("ragged all_to_all" if ragged else "all_to_all", 0, self._purpose):
            return self._swap(flats, self._lengths(flats) if ragged else [flats[self.rank].size] * self.size)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by rank ``root``'s."""
        raw, root = checked(x).view(np.uint8), checked_root(root, self.size)
        with self._log("broadcast", raw.size, self._purpose):
            for start in range(0, raw.size, self.CHUNK):
                self._comm.Bcast(raw[start : start + self.CHUNK], root)

    def barrier(self) -> None:
        """Return when every rank has come."""
        with self._log("barrier"):
            self._comm.Barrier()

    def be_patient(self, seconds: float) -> None:
        """Sleep so long between two looks at an exchange in progress."""
        self.patience = self.control.patience = seconds
        if self._beside is not None:
            self._beside.be_patient(seconds)

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Zeroed flat memory, which ``peers`` can share if all ranks sit on one node."""
        shared = self._shared.alloc(n, dtype) if self.size > 1 and not self.spans_hosts else None
        return super().alloc(n, dtype) if shared is None else shared

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """The same array on every rank, in rank order, if ``alloc`` made it and all ranks can open all of it."""
        if self.spans_hosts:
            return None
        handles = self.control.gather(self._shared.handle(x))
        others = [x if r == self.rank else open_handle(h, x.dtype) for r, h in enumerate(handles)]
        found = [a for a in others if a is not None]
        shared = all(self.control.gather("all" * (len(found) == self.size)))
        self.why = f"{self._place}, {'memory shared' if shared else 'no memory shared: sums go through MPI'}"
        return found if shared else None

    def explain(self, reason: str) -> None:
        """Let ``repr`` say one thing more."""
        self._place = self.why = f"{reason}; {self._place}"

    def _duplicate(self) -> Communicator:
        return MpiCommunicator(self._comm, why=f"beside rank {self.rank}'s other one")

    def close(self) -> None:
        """Give the MPI communicators back; collective, and the last that may be done with this one."""
        if self._beside is not None:
            self._beside.close()
        self.control.close()
        with self._log("closing"):
            self._comm.Free()

    def _lengths(self, parts: Sequence[np.ndarray]) -> list[int]:
        """Of the parts for this rank."""
        sizes = np.empty(self.size, np.int64)
        self._comm.Alltoall(np.array([x.size for x in parts], np.int64), sizes)
        return [int(s) for s in sizes]

    def _sizes(self, n: int) -> list[int]:
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([n], np.int64), sizes)
        return [int(s) for s in sizes]

    def _swap(
        self, parts: Sequence[np.ndarray], sizes: Sequence[int], got: list[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r and receive ``sizes[r]`` elements from it, as bytes in chunks."""
        got = [np.empty(n, parts[0].dtype) for n in sizes] if got is None else got
        if got[self.rank] is not parts[self.rank]:
            got[self.rank][...] = parts[self.rank]
        finish(self._exchange(parts, got), self)
        return got

    def _exchange(self, parts: Sequence[np.ndarray], got: Sequence[np.ndarray], tag: int = 0) -> "list[MPI.Request]":
        """Begin to send ``parts[r]`` to every other rank r, and to receive ``got[r]`` from it."""
        requests = []
        for rank in range(self.size):
            if rank != self.rank:
                requests += [self._comm.Irecv(piece, rank, tag) for piece in self._pieces(got[rank])]
                requests += [self._comm.Isend(piece, rank, tag) for piece in self._pieces(parts[rank])]
        return requests

    def _pieces(self, x: np.ndarray) -> list[np.ndarray]:
        raw = x.view(np.uint8)
        return [raw[start : start + self.CHUNK] for start in range(0, raw.size, self.CHUNK)]


def _with_gaps(arrays: Iterable[np.ndarray | None], count: int) -> Iterator[np.ndarray | None]:
    """The arrays; ``count`` times None where there is none, and at the end, so that what is under way arrives."""
    for x in itertools.chain(arrays, [None]):
        yield from [x] if x is not None else [None] * count
