"""Ranks have a GPU each, arrays are cupy's.  Data goes over NCCL; votes and lengths go from host to host without it."""

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device
from distopt.comm import mpi_control
from distopt.comm.communicator import Communicator, checked, checked_parts, checked_root, cut, slices
from distopt.comm.nccl_library import binding, nccl_unique_id, nccl_version, one_gpu_each, seat, take_gpu, version_text
from distopt.cost import RING
from distopt.guard import Control, fingerprint

ID_BYTES = 128
IN_PROGRESS = 7  # a status that cupy has no name for, and which is no failure
ALIGNED = 64  # bytes; NCCL copies faster between aligned addresses


class NcclCommunicator(Communicator):
    """One of the ranks that ``control`` connects, on a GPU of its own.

    * ``gpu``: the number of its GPU, by default ``local_rank`` modulo the number of GPUs that this process sees; the
      constructor makes it this thread's current one.
    * ``unique_id``: what ``nccl_unique_id()`` returned, the same on every rank; by default rank 0 makes one.

    Collective.  What stands in the way on one rank is found before NCCL is called and raises the same error on every
    rank: RuntimeError without a driver, GPU or NCCL, or if the ranks do not find each other; ValueError if NCCL's
    versions differ, or if two ranks are on one GPU.

    Collectives go on in a stream of their own, after all that the caller's current stream had been given when the verb
    was called; ``wait()`` lets the caller's stream wait for them, and the host waits for nothing.  Arrays that were
    handed over are kept until then, so that their memory is not given to others.  Only ``ragged`` verbs exchange
    lengths between hosts first.

    Sums are NCCL's, in an order of its own, and for float16 and bfloat16 rounded at every hop; ``reduce_scatter`` and
    ``Ordered`` add in rank order, in float32.
    """

    CHUNK = 1 << 30  # elements per call
    algorithm = RING
    PATIENCE = 120.0  # seconds for the ranks to find each other

    def __init__(
        self,
        control: Control,
        gpu: int | None = None,
        local_rank: int | None = None,
        why: str = "",
        unique_id: bytes | None = None,
        hosts: Sequence[int] = (),
    ):
        self.control, self.rank, self.size, self._hosts = control, control.rank, control.size, hosts
        self.local_rank = self.rank if local_rank is None else local_rank
        self.rank_ordered = self.size == 1
        self._verb, self._failure = "its start", ""
        self.gpu: int = self._take_gpu(gpu)
        self.xp = device.array_module()
        self._kinds, self._sum = _kinds(), binding().NCCL_SUM
        self._comm: Any = self._meet(self._agree_on_id(unique_id))
        self._stream, self._order = device.new_stream(), device.Order()
        self._log = control.log("NCCL")
        self._kept: list[np.ndarray] = []  # what the own stream may still use
        _alive.append(self)
        _helper()
        name = f"NCCL {version_text(nccl_version())} on GPU {self.gpu} ({device.bus_id(self.gpu)})"
        self.why = f"{name}; {why}" if why else name

    @classmethod
    def from_mpi(cls, comm: Any = None, gpu: int | None = None, why: str = "") -> "NcclCommunicator":
        """The ranks of one of mpi4py's communicators (default COMM_WORLD), over which they vote; data goes over NCCL.

        Raises ImportError without mpi4py, and what ``MpiCommunicator`` and the constructor raise.
        """
        control, local_rank, hosts = mpi_control.join(mpi_control.world_comm() if comm is None else comm)
        votes = f"votes over {mpi_control.brand()}, {'several hosts' if len(set(hosts)) > 1 else 'one host'}"
        return cls(control, gpu, local_rank, f"{votes}{'; ' + why if why else ''}", hosts=hosts)

    @classmethod
    def from_id(
        cls, unique_id: bytes, local_rank: int, world_size: int, gpu: int | None = None, patience: float | None = None
    ) -> "NcclCommunicator":
        """One of ``world_size`` processes of this machine that a parent gave an id of ``nccl_unique_id()``.

        They vote over local sockets, without MPI, and have ``patience`` seconds (60) to come.  Raises TypeError or
        ValueError for arguments that cannot be, RuntimeError on all ranks that came if one did not, and what the
        constructor raises.
        """
        from multiprocessing.util import Finalize

        from distopt.comm.sockets import SocketControl  # takes as long to import as the rest of this package

        if not isinstance(unique_id, bytes) or len(unique_id) != ID_BYTES:
            raise TypeError(
                f"nccl_id must be the {ID_BYTES} bytes that distopt.comm.nccl_unique_id() returned in the parent, got "
                f"{type(unique_id).__name__}{f' of {len(unique_id)}' if isinstance(unique_id, bytes) else ''}"
            )
        control = SocketControl(unique_id, local_rank, world_size, *([] if patience is None else [patience]))
        comm = cls(control, gpu, local_rank, "votes over local sockets, one host", unique_id)
        Finalize(None, end_all, exitpriority=2)  # a child of multiprocessing has no atexit; before the farewell
        return comm

    # ------------------------------------------------------------------------------------------- how ranks meet

    def _take_gpu(self, gpu: int | None) -> int:
        """Vote on everything that can be known before NCCL is called."""
        error, version, number, where = None, 0, 0, ""
        try:
            number = take_gpu(gpu, self.local_rank)
            version, where = nccl_version(), seat(number, self.rank)
        except Exception as problem:
            error = problem
        lines = [f"NCCL {version_text(version)}"]
        seats = self.control.vote("NCCL's start", fingerprint(lines), lambda: lines, error, where)
        one_gpu_each(seats, self.rank)
        return number

    def _agree_on_id(self, given: bytes | None) -> bytes:
        if given is not None:
            return given
        error, own = None, ""
        try:
            own = nccl_unique_id().hex() if self.rank == 0 else ""
        except Exception as problem:
            error = problem
        return bytes.fromhex(self.control.vote("NCCL's id", 0, list, error, own)[0])

    def _meet(self, unique_id: bytes) -> Any:
        """cupy's communicator.  NCCL has no time limit for ranks that never come, so it waits in a thread."""
        made: list[Any] = []
        failed: list[Exception] = []

        def make() -> None:
            try:
                device.use_gpu(self.gpu)
                made.append(binding().NcclCommunicator(self.size, unique_id, self.rank))
            except Exception as problem:
                failed.append(problem)

        thread = threading.Thread(target=make, name="NCCL's start", daemon=True)
        thread.start()
        deadline = time.monotonic() + self.PATIENCE
        try:
            while self.control.vote("NCCL's start", 0, list, *self._progress(thread, failed, deadline)):
                thread.join(0.01)
        except Exception:
            for comm in made:
                _within(5.0, comm.abort, comm)
            raise
        return made[0]

    def _progress(
        self, thread: threading.Thread, failed: list[Exception], deadline: float
    ) -> tuple[Exception | None, str]:
        """How this rank's start goes, for a vote: an error, and whether it goes on."""
        if thread.is_alive():
            late = time.monotonic() > deadline
            text = (
                f"NCCL's ranks did not find each other within {self.PATIENCE:g} s: NCCL_DEBUG=INFO says where they "
                "look, NCCL_SOCKET_IFNAME chooses the network"
            )
            return RuntimeError(text) if late else None, "waits"
        return RuntimeError(f"NCCL cannot start: {failed[0]}") if failed else None, ""

    # ------------------------------------------------------------------------------------------- verbs

    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks."""
        flat = checked(x, gpu=self.gpu)
        with self._enqueued("all_reduce", flat) as stream:
            for piece in self._pieces(flat):
                at, kind = device.address(piece), self._kinds[piece.dtype]
                self._comm.allReduce(at, at, piece.size, kind, self._sum, stream)

    def lengths(self, n: int) -> list[int]:
        """Every rank's n, from host to host."""
        return [int(text) for text in self.control.gather(str(n))]

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Every rank's x, flat, in rank order; they are parts of one piece of memory."""
        flat = checked(x, writable=False, gpu=self.gpu)
        if not ragged and flat.size <= self.CHUNK:
            return self._all_gather(flat, into)
        sizes = self.lengths(flat.size) if ragged else [flat.size] * self.size
        got = self._room(sizes, flat) if into is None or ragged else cut(into, sizes)
        with self._enqueued("all_gather", flat, *got) as stream:
            for root, part in enumerate(got):
                mine = self._pieces(flat if root == self.rank else part)
                for source, to in zip(mine, self._pieces(part), strict=True):
                    addresses, kind = (device.address(source), device.address(to)), self._kinds[to.dtype]
                    self._comm.broadcast(*addresses, to.size, kind, root, stream)
        return got

    def _all_gather(self, flat: np.ndarray, into: np.ndarray | None) -> list[np.ndarray]:
        n = flat.size
        room = device.empty(n * self.size, flat.dtype, like=flat) if into is None else checked(into, gpu=self.gpu)
        if room.dtype != flat.dtype:
            raise TypeError(f"into must be of x's dtype {flat.dtype}, got {device.describe(room)}")
        parts = cut(room, [n] * self.size)
        with self._enqueued("all_gather", flat, room) as stream:
            if n:
                kind = self._kinds[flat.dtype]
                self._comm.allGather(device.address(flat), device.address(room), n, kind, stream)
        return parts

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r; return the parts for this rank, in rank order."""
        flats = checked_parts(parts, self.size, self.gpu)
        sizes = [flats[self.rank].size] * self.size
        if ragged:
            texts = self.control.gather(" ".join(str(x.size) for x in flats))
            sizes = [int(text.split()[self.rank]) for text in texts]
        got = self._room(sizes, flats[0])
        with self._enqueued("all_to_all", *flats, *got) as stream:
            with self._stream:
                device.copy(got[self.rank], flats[self.rank])
            for peer in range(self.size):
                if peer != self.rank:
                    for piece in self._pieces(flats[peer]):
                        self._comm.send(device.address(piece), piece.size, self._kinds[piece.dtype], peer, stream)
                    for piece in self._pieces(got[peer]):
                        self._comm.recv(device.address(piece), piece.size, self._kinds[piece.dtype], peer, stream)
        return got

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:
        """This rank's slice (see ``slices``) of the sum over ranks of x; floats are added in rank order, by kernels."""
        flat = checked(x, writable=False, gpu=self.gpu)
        if flat.dtype.kind not in "iu":
            with self.aside():
                return super().reduce_scatter(flat)
        cuts = slices(flat.size, self.size)
        mine = cuts[self.rank].stop - cuts[self.rank].start
        total = device.empty(mine, flat.dtype, like=flat)
        with self._enqueued("reduce_scatter", flat, total) as stream:
            for root, cut_out in enumerate(cuts):  # slices differ in length by one, which ncclReduceScatter cannot do
                for number, piece in enumerate(self._pieces(flat[cut_out])):
                    to = device.address(total[number * self.CHUNK :]) if root == self.rank else 0
                    kind = self._kinds[piece.dtype]
                    self._comm.reduce(device.address(piece), to, piece.size, kind, self._sum, root, stream)
        return total

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by rank ``root``'s."""
        flat, root = checked(x, gpu=self.gpu), checked_root(root, self.size)
        with self._enqueued(f"broadcast from rank {root}", flat) as stream:
            for piece in self._pieces(flat):
                self._comm.bcast(device.address(piece), piece.size, self._kinds[piece.dtype], root, stream)

    def barrier(self) -> None:
        """Return when every rank's host has come; raises PeerLeft if one never will."""
        self.control.vote("a barrier", fingerprint(["a barrier"]), lambda: ["a barrier"])

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Zeroed flat memory on the GPU."""
        self._check_thread()
        found: np.ndarray = device.gpu_zeros(n, dtype)
        return found

    # ------------------------------------------------------------------------------------------- streams

    @contextlib.contextmanager
    def _enqueued(self, verb: str, *arrays: np.ndarray) -> Iterator[int]:
        """NCCL's calls in this context are one operation of the own stream, whose number it gives."""
        if self._comm is None or self._failure:
            raise RuntimeError(f"rank {self.rank}: {self._failure or 'the communicator is closed'}")
        self._check_thread()
        self._order(device.current_stream(), self._stream)
        self._verb = f"{verb} of {arrays[0].size} {arrays[0].dtype}"
        self.history = zlib.crc32(f"{verb} {arrays[0].dtype.char} {self._purpose}".encode(), self.history)
        self._kept += arrays
        nccl = binding()
        try:
            with self._log(verb, arrays[0].nbytes, self._purpose):  # NCCL may wait for others before it enqueues
                nccl.groupStart()
                try:
                    yield self._stream.ptr
                finally:  # an open group would swallow all later calls of this thread
                    nccl.groupEnd()
        except Exception as error:
            raise self._failed(f"{self._verb}: {type(error).__name__}: {error}") from error
        except BaseException:  # a part was enqueued, and others may wait for the rest
            self._failed(f"{self._verb}, which was interrupted")
            raise

    def wait(self) -> None:
        """The caller's current stream waits for all collectives so far; the host does not."""
        stream = device.current_stream()
        unused = stream.is_capturing() and not self._stream.is_capturing()  # by what is being captured
        if stream.ptr != self._stream.ptr and not unused:
            # inside of aside() everything is in order, but not yet for the caller
            self._order(self._stream, stream)
            self._kept.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The own stream becomes the current one, after all that the caller's has been given so far.

        Memory that lasts still belongs to the caller's, which waits in the end.
        """
        caller = device.current_stream()
        self._order(caller, self._stream)
        with device.owned_by(caller), self._stream:
            yield

    def _check_thread(self) -> None:
        here = device.current_gpu()
        if here != self.gpu:
            raise ValueError(
                f"this rank's communicator works on GPU {self.gpu}, but this thread on GPU {here}: call "
                f"cupy.cuda.Device({self.gpu}).use() first"
            )

    def _room(self, sizes: Sequence[int], like: np.ndarray) -> list[np.ndarray]:
        """One piece of memory, cut into parts that start at aligned addresses."""
        step = ALIGNED // like.dtype.itemsize
        starts = np.cumsum([0] + [-(-n // step) * step for n in sizes])
        room = device.empty(int(starts[-1]), like.dtype, like=like)
        return [room[start : start + n] for start, n in zip(starts[:-1].tolist(), sizes, strict=True)]

    def _pieces(self, x: np.ndarray) -> list[np.ndarray]:
        """What one call takes; nothing of an empty array, which NCCL never sees."""
        if 0 < x.size <= self.CHUNK:
            return [x]
        return [x[start : start + self.CHUNK] for start in range(0, x.size, self.CHUNK)]

    def _duplicate(self) -> Communicator:
        """Itself: one thread enqueues everything, and without an order NCCL may deadlock between two communicators."""
        return self

    # ------------------------------------------------------------------------------------------- ends

    def check(self) -> None:
        """RuntimeError if a collective has failed, PeerLeft if a rank is known to have ended."""
        self.control.check()
        if self._comm is None or self._failure:
            raise RuntimeError(f"rank {self.rank}: {self._failure or 'the communicator is closed'}")
        try:
            self._comm.check_async_error()
        except KeyError as status:  # cupy's own table ends before NCCL's
            if status.args != (IN_PROGRESS,):
                raise self._failed(f"{self._verb}, or before: status {status}, a time limit") from status
        except binding().NcclError as error:
            raise self._failed(f"{self._verb}, or before: {error}") from error

    def _failed(self, text: str) -> RuntimeError:
        """After this nothing goes over the wire any more."""
        self._failure = f"NCCL failed on GPU {self.gpu} in {text}; NCCL_DEBUG=WARN says more"
        return RuntimeError(f"rank {self.rank}: {self._failure}")

    def abort(self, deadline: float = 5.0) -> bool:
        """Stop what is under way on this rank, not collective; did NCCL come back within ``deadline`` seconds?"""
        comm, kept = self._give_up()
        self._failure = self._failure or "the communicator was aborted"
        return comm is None or _within(deadline, comm.abort, (comm, kept))

    def close(self) -> None:
        """Wait for what is under way, and give back what NCCL and ``control`` hold; collective.

        Ends all captured steps on this GPU: NCCL waits for graphs that use a communicator.
        """
        if self._comm is None:
            return
        if self._failure:
            self.abort()
        else:
            with self._log("closing"):
                device.drop_graphs(self.gpu)
                device.finish(self._stream, self.check)
                self._give_up()[0].destroy()
        self.control.close()

    def _give_up(self) -> tuple[Any, list[np.ndarray]]:
        """cupy's communicator, None if it was given up already, and the arrays that it may still use."""
        device.drop_graphs(self.gpu)
        given = self._comm, self._kept
        self._comm, self._kept = None, []
        if self in _alive:
            _alive.remove(self)
        return given


@functools.cache
def _kinds() -> dict[Any, int]:
    """NCCL's numbers for dtypes."""
    nccl = binding()
    names = {
        np.float16: nccl.NCCL_FLOAT16,
        ml_dtypes.bfloat16: nccl.NCCL_BFLOAT16,
        np.float32: nccl.NCCL_FLOAT32,
        np.float64: nccl.NCCL_FLOAT64,
        np.int32: nccl.NCCL_INT32,
        np.int64: nccl.NCCL_INT64,
        np.uint8: nccl.NCCL_UINT8,
    }
    return {np.dtype(name): int(number) for name, number in names.items()}


# ----------------------------------------------------------------------------------------------------- ends

_alive: list[NcclCommunicator] = []  # a communicator that is collected would be destroyed then, alone, and may hang
_left_alone: list[Any] = []


@functools.cache
def _helper() -> "queue.SimpleQueue[Callable[[], object]]":
    """Jobs for a thread that was there before the interpreter's end: then, Python 3.12 starts none."""
    jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=work, name="NCCL's end", daemon=True).start()
    return jobs


def _within(seconds: float, end: Callable[[], object], owner: Any) -> bool:
    """Call ``end`` in the helper's thread; has it come back in time?  If not, its owner must never be collected."""
    done = threading.Event()

    def job() -> None:
        with contextlib.suppress(Exception):
            end()
        done.set()

    with contextlib.suppress(RuntimeError):  # a thread that cannot be started any more
        _helper().put(job)
        if done.wait(seconds):
            return True
        _helper.cache_clear()  # that one is stuck; while there can be another one, let it be there
        _helper()
    _left_alone.append(owner)
    return False


def end_all(deadline: float = 10.0) -> None:
    """At exit, for what was never closed: let other ranks have what they still wait for, but not at any price.

    What is not done after half of the ``deadline`` never will be, as a rank is gone: its kernels are told to stop.
    """
    found = [(c, *c._give_up()) for c in _alive[:]]
    half = time.monotonic() + deadline / 2

    def look() -> None:
        if time.monotonic() > half:
            raise TimeoutError

    def settle() -> None:
        stuck, done = [], []
        for owner, comm, _ in found:
            try:
                device.use_gpu(owner.gpu)
                if owner._failure:
                    raise RuntimeError(owner._failure)
                device.finish(owner._stream, look)
            except Exception:
                stuck.append(comm)
            else:
                done.append(comm)
        for comm in stuck:  # first: while one spins, ending another one may wait for it
            comm.abort()
        for comm in done:
            comm.destroy()

    if found:
        _within(deadline, settle, found)


atexit.register(end_all)  # before MPI's hooks, and so called after them, when all ranks have said good-bye


def _forget_all() -> None:
    """In a child, which owns no GPU, and has no threads."""
    _helper.cache_clear()
    _left_alone.extend(_alive)
    _alive.clear()


os.register_at_fork(after_in_child=_forget_all)
