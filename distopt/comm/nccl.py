"""Communicator for cupy arrays over NCCL, with one GPU per rank.  Votes and lengths go between hosts without NCCL."""

import atexit
import concurrent.futures
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
from distopt.comm.byte_counts import RING
from distopt.comm.communicator import (
    Communicator,
    Groups,
    Ragged,
    all_reduce_in_rank_order,
    as_flat,
    check_root,
    flat_parts,
    group_of,
    slices,
    split,
)
from distopt.comm.control import ControlChannel, fingerprint
from distopt.comm.nccl_buffers import RegisteredMemory
from distopt.comm.nccl_library import (
    REGISTER,
    binding,
    check_one_gpu_each,
    gpu_identity,
    isolated,
    nccl_unique_id,
    nccl_version,
    registers,
    select_gpu,
    version_text,
)
from distopt.resilience.watchdog import say

ID_BYTES = 128
IN_PROGRESS = 7  # ncclInProgress, for which cupy has no name; it is no failure
ALIGNED = 64  # bytes; NCCL copies faster between aligned addresses


class NcclCommunicator(Communicator):
    """Communicator for cupy arrays over NCCL, with a separate GPU per rank.  Making one is collective.

    Collectives run on the communicator's stream, after the work that the caller's current stream had when they were
    called; ``wait()`` makes the caller's stream wait for them, and the host does not wait.  Until then the communicator
    keeps their arrays alive, so that the memory is not used again.  Only ``ragged`` collectives exchange lengths
    between hosts first.

    ``all_reduce`` is NCCL's: it adds in an order that NCCL chooses, and rounds float16 and bfloat16 at every hop.
    ``reduce_scatter`` and ``Ordered`` add in rank order, 16-bit numbers in float32.

    Args:
        control: the channel for votes, which determines rank and size.
        gpu: number of the GPU, which becomes this thread's current one; default: ``local_rank`` modulo the number of
            GPUs that this process sees.
        local_rank: this rank's number among the ranks of its host; default: its rank.
        reason: why this transport was chosen, for ``repr``.
        unique_id: the result of ``nccl_unique_id()``, the same on every rank; by default rank 0 makes one.
        hosts: host of each rank, ``(size,)``, as numbers; default: one host.

    Raises:
        RuntimeError: on every rank alike, if a rank has no driver, GPU or NCCL, or if ranks do not find each other.
        ValueError: on every rank alike, if NCCL's versions or DISTOPT_NCCL_REGISTER differ, or if two ranks are on one
            GPU.

    Example:
        Skipped where examples run as tests: it needs MPI, cupy and a GPU for each of two processes.

        >>> import cupy  # doctest: +SKIP
        >>> from distopt.comm import NcclCommunicator
        >>> comm = NcclCommunicator.from_mpi()  # doctest: +SKIP
        >>> x = cupy.ones(2, "float32")  # doctest: +SKIP
        >>> comm.all_reduce(x)  # doctest: +SKIP
        >>> comm.wait()  # doctest: +SKIP
        >>> x.tolist()  # doctest: +SKIP
        [2.0, 2.0]
    """

    CHUNK = 1 << 30  # elements per call
    algorithm = RING
    CONNECT_SECONDS = 120.0  # for the ranks to find each other
    TRIALS = 3  # of the same ranks, after failures of NCCL

    def __init__(
        self,
        control: ControlChannel,
        gpu: int | None = None,
        local_rank: int | None = None,
        reason: str = "",
        unique_id: bytes | None = None,
        hosts: Sequence[int] = (),
    ):
        self.control, self.rank, self.size, self._hosts = control, control.rank, control.size, hosts
        self.local_rank = self.rank if local_rank is None else local_rank
        self.rank_ordered = self.size == 1
        # of the same ranks, which goes on without those that are lost
        self._host: Communicator | None = None
        self._trials = 0  # communicators of the same ranks that have failed
        # verb, size and dtype, for the text of an error
        self._last: tuple[str, int, Any] = "its start", 0, None
        self._failure = ""
        number, advice = self._select_gpu(gpu)
        self.gpu: int = number
        self.xp = device.array_module()
        self._kinds, self._sum = _kinds(), binding().NCCL_SUM
        self._comm: Any = self._meet(self._agree_on_id(unique_id))
        self._memory, self._registers = RegisteredMemory(self._comm), registers()
        # NCCL's few blocks must not wait behind those of a backward pass, for which other ranks would wait too
        self._stream, self._order = device.new_stream(first=True), device.StreamEvent()
        self._log = control.log("NCCL")
        self._kept: list[np.ndarray] = []  # arrays that the communicator's stream may still use
        _alive.append(self)
        _helper()
        name = f"NCCL {version_text(nccl_version())} on GPU {self.gpu} ({device.bus_id(self.gpu)})"
        self.reason = "; ".join(filter(None, (name, "buckets registered" * self._registers, reason, advice)))
        if advice and self.rank == 0:
            say(f"distopt: {advice}\n")

    @classmethod
    def from_mpi(cls, comm: Any = None, gpu: int | None = None, reason: str = "") -> "NcclCommunicator":
        """Make a communicator of the ranks of an MPI communicator, over which they vote.  Collective.

        Args:
            comm: one of mpi4py's communicators, by default COMM_WORLD.
            gpu: number of the GPU, as for the constructor.
            reason: why this transport was chosen, for ``repr``.

        Raises:
            ImportError: there is no mpi4py.
            RuntimeError: as for ``MpiCommunicator`` and the constructor.
            ValueError: as for ``MpiCommunicator`` and the constructor.
        """
        control, local_rank, hosts = mpi_control.join(mpi_control.world_comm() if comm is None else comm)
        votes = f"votes over {mpi_control.brand()}, {'several hosts' if len(set(hosts)) > 1 else 'one host'}"
        return cls(control, gpu, local_rank, f"{votes}{'; ' + reason if reason else ''}", hosts=hosts)

    @classmethod
    def from_process_group(
        cls, ranks: Sequence[int] | None = None, gpu: int | None = None, reason: str = ""
    ) -> "NcclCommunicator":
        """Make a communicator of ranks of torch's default process group, over which they vote by gloo.  Collective.

        NCCL is the library that torch has loaded, as the first one that a process loads is that of all.

        Args:
            ranks: their numbers there, ascending; None for all.
            gpu: number of the GPU, as for the constructor.
            reason: why this transport was chosen, for ``repr``.

        Raises:
            ImportError: there is no torch.
            RuntimeError: as for the constructor.
            ValueError: as for the constructor.
        """
        # torch is there, if anybody has made a process group
        from distopt.comm.process_group import join

        control, local_rank, hosts = join(ranks)
        votes = f"votes over gloo, {'several hosts' if len(set(hosts)) > 1 else 'one host'}"
        return cls(control, gpu, local_rank, f"{votes}{'; ' + reason if reason else ''}", hosts=hosts)

    @classmethod
    def from_id(
        cls, unique_id: bytes, local_rank: int, world_size: int, gpu: int | None = None, patience: float | None = None
    ) -> "NcclCommunicator":
        """Make a communicator of processes of this machine, which vote over local sockets, without MPI.  Collective.

        Args:
            unique_id: the result of ``nccl_unique_id()`` in the parent process.
            local_rank: this process's rank.
            world_size: number of ranks.
            gpu: number of the GPU, as for the constructor.
            patience: seconds for all ranks to connect, by default 60.

        Raises:
            TypeError: an argument is of a wrong type, or ``unique_id`` of a wrong length.
            ValueError: ``local_rank`` or ``world_size`` is out of range, or as for the constructor.
            RuntimeError: on all ranks that have connected, if one has not in time; or as for the constructor.
        """
        from multiprocessing.util import Finalize

        # imported late: it takes as long as the rest of this package
        from distopt.comm.sockets import SocketControl

        if not isinstance(unique_id, bytes) or len(unique_id) != ID_BYTES:
            raise TypeError(
                f"nccl_id must be the {ID_BYTES} bytes that distopt.comm.nccl_unique_id() returned in the parent, got "
                f"{type(unique_id).__name__}{f' of {len(unique_id)}' if isinstance(unique_id, bytes) else ''}"
            )
        control = SocketControl(unique_id, local_rank, world_size, *([] if patience is None else [patience]))
        comm = cls(control, gpu, local_rank, "votes over local sockets, one host", unique_id)
        # multiprocessing's children skip atexit.  After the votes say farewell: NCCL's end may wait for the others.
        Finalize(None, end_all, exitpriority=0)
        return comm

    @classmethod
    def over(cls, host: Communicator, gpu: int | None = None, reason: str = "") -> "NcclCommunicator":
        """Make a communicator of the ranks of another one, which can go on without those that are lost.  Collective.

        It votes over the other one's channel, and is of no use once that is closed.  Ranks that are lost meanwhile are
        not in it.

        Args:
            host: a communicator of arrays on hosts.
            gpu: number of the GPU, as for the constructor.
            reason: why this transport was chosen, for ``repr``.

        Raises:
            RuntimeError: as for the constructor.
            ValueError: as for the constructor.
        """
        return cls._over(host, gpu, reason, "")[0]

    @classmethod
    def _over(
        cls, host: Communicator, gpu: int | None, reason: str, text: str, lost: bool = False
    ) -> tuple["NcclCommunicator", list[str]]:
        """Return a communicator of the ranks of ``host`` that live, and a text of each.  Collective of these."""
        # lost: a rank of `host` is known to be lost.
        texts: list[str] = []
        while True:
            try:
                if lost:
                    host.revoke()
                    host, texts = host.next_epoch(text)
                votes = f"votes over {host.reason}" if host.reason else ""
                because = "; ".join(filter(None, (votes, reason)))
                comm = cls(host.control, gpu, host.local_rank, because, hosts=host.hosts)
                comm._host = host
                return comm, texts
            except Exception as error:
                if not host.lost(error):
                    raise
                lost = True

    # ------------------------------------------------------------------------------------------- start

    def _select_gpu(self, gpu: int | None) -> tuple[int, str]:
        """Choose a GPU, and vote on all that can be checked before NCCL is called."""
        # Returns the GPU's number, and advice for the user, '' for none.
        error, version, number, location, setting = None, 0, 0, "", False
        try:
            number = select_gpu(gpu, self.local_rank)
            version, location, setting = nccl_version(), gpu_identity(number, self.rank), registers()
        except Exception as problem:
            error = problem
        lines = [f"NCCL {version_text(version)}", f"{REGISTER}={int(setting)}"]
        identities = self.control.vote("NCCL's start", fingerprint(lines), lambda: lines, error, location)
        check_one_gpu_each(identities, self.rank)
        return number, isolated(identities)

    def _agree_on_id(self, unique_id: bytes | None) -> bytes:
        if unique_id is not None:
            return unique_id
        error, text = None, ""
        try:
            text = nccl_unique_id().hex() if self.rank == 0 else ""
        except Exception as problem:
            error = problem
        return bytes.fromhex(self.control.vote("NCCL's id", 0, list, error, text)[0])

    def _meet(self, unique_id: bytes) -> Any:
        """Return cupy's communicator, made in a thread: NCCL has no time limit for ranks that never start."""
        comm = device.in_thread(
            lambda: binding().NcclCommunicator(self.size, unique_id, self.rank), self.gpu, "NCCL's start"
        )
        deadline = time.monotonic() + self.CONNECT_SECONDS
        try:
            while self.control.vote("NCCL's start", 0, list, *self._progress(comm, deadline)):
                concurrent.futures.wait([comm], 0.01)
        except Exception:
            if comm.done() and not comm.exception():
                self._abort(comm.result(), (), 5.0)
            raise
        return comm.result()

    def _progress(self, start: "concurrent.futures.Future[Any]", deadline: float) -> tuple[Exception | None, str]:
        """The state of this rank's start, for a vote: an error or None, and a text, '' once it has ended."""
        if not start.done():
            late = time.monotonic() > deadline
            text = (
                f"NCCL's ranks did not find each other within {self.CONNECT_SECONDS:g} s: NCCL_DEBUG=INFO says where "
                "they look, NCCL_SOCKET_IFNAME chooses the network"
            )
            return RuntimeError(text) if late else None, "waits"
        error = start.exception()
        return RuntimeError(f"NCCL cannot start: {error}") if error else None, ""

    # ------------------------------------------------------------------------------------------- collectives

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Replace x, in place, by its sum over ranks, or another reduction.  Collective."""
        flat = as_flat(x, gpu=self.gpu, op=op)
        # of two numbers one of which is NaN, NCCL's min and max are the other one; it has no sums of 16-bit integers
        if op != "sum" or flat.dtype == np.int16:
            all_reduce_in_rank_order(self, flat, op)
            return
        with self._enqueued("all_reduce", flat) as stream:
            for piece in self._pieces(flat):
                pointer, kind = device.address(piece), self._kinds[piece.dtype]
                self._comm.allReduce(pointer, pointer, piece.size, kind, self._sum, stream)

    def lengths(self, n: int) -> list[int]:
        """Return every rank's n, in rank order, sent from host to host.  Collective."""
        return [int(text) for text in self.control.gather(str(n))]

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return every rank's x, flat, in rank order, as parts of one piece of memory.  Collective."""
        flat = as_flat(x, writable=False, gpu=self.gpu)
        if not ragged and flat.size <= self.CHUNK:
            return self._all_gather(flat, into)
        sizes = self.lengths(flat.size) if ragged is True else list(ragged or [flat.size] * self.size)
        received = self._aligned_arrays(sizes, flat) if into is None or ragged else split(into, sizes)
        with self._enqueued("all_gather", flat, *received) as stream:
            for root, part in enumerate(received):
                sources = self._pieces(flat if root == self.rank else part)
                for source, target in zip(sources, self._pieces(part), strict=True):
                    addresses, kind = (device.address(source), device.address(target)), self._kinds[target.dtype]
                    self._comm.broadcast(*addresses, target.size, kind, root, stream)
        return received

    def _all_gather(self, flat: np.ndarray, into: np.ndarray | None) -> list[np.ndarray]:
        n = flat.size
        room = device.empty(n * self.size, flat.dtype, like=flat) if into is None else as_flat(into, gpu=self.gpu)
        if room.dtype != flat.dtype:
            raise TypeError(f"into must be of x's dtype {flat.dtype}, got {device.describe(room)}")
        parts = split(room, [n] * self.size)
        with self._enqueued("all_gather", flat, room) as stream:
            if n:
                kind = self._kinds[flat.dtype]
                self._comm.allGather(device.address(flat), device.address(room), n, kind, stream)
        return parts

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r, and return the parts for this rank, flat, in rank order.  Collective."""
        flats = flat_parts(parts, self.size, self.gpu)
        sizes = list(ragged or [flats[self.rank].size] * self.size) if ragged is not True else []
        if ragged is True:
            texts = self.control.gather(" ".join(str(x.size) for x in flats))
            sizes = [int(text.split()[self.rank]) for text in texts]
        received = self._aligned_arrays(sizes, flats[0])
        with self._enqueued("all_to_all", *flats, *received) as stream:
            with self._stream:
                device.copy(received[self.rank], flats[self.rank])
            for peer in range(self.size):
                if peer != self.rank:
                    for piece in self._pieces(flats[peer]):
                        self._comm.send(device.address(piece), piece.size, self._kinds[piece.dtype], peer, stream)
                    for piece in self._pieces(received[peer]):
                        self._comm.recv(device.address(piece), piece.size, self._kinds[piece.dtype], peer, stream)
        return received

    def reduce_scatter(self, x: np.ndarray, op: str = "sum") -> np.ndarray:
        """Return this rank's slice (see ``slices``) of the sum over ranks of x, or another reduction.  Collective.

        Floats are added in rank order, by kernels; integers, whose sum does not depend on the order, by NCCL.
        """
        flat = as_flat(x, writable=False, gpu=self.gpu, op=op)
        if flat.dtype.kind not in "iu" or flat.dtype == np.int16 or op != "sum":
            with self.on_comm_stream():
                return super().reduce_scatter(flat, op)
        cuts = slices(flat.size, self.size)
        n = cuts[self.rank].stop - cuts[self.rank].start
        total = device.empty(n, flat.dtype, like=flat)
        with self._enqueued("reduce_scatter", flat, total) as stream:
            # slices differ in length by one, which ncclReduceScatter cannot do
            for root, cut_out in enumerate(cuts):
                for number, piece in enumerate(self._pieces(flat[cut_out])):
                    target = device.address(total[number * self.CHUNK :]) if root == self.rank else 0
                    kind = self._kinds[piece.dtype]
                    self._comm.reduce(device.address(piece), target, piece.size, kind, self._sum, root, stream)
        return total

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by the x of rank ``root``.  Collective."""
        flat, root = as_flat(x, gpu=self.gpu), check_root(root, self.size)
        with self._enqueued(f"broadcast from rank {root}", flat) as stream:
            for piece in self._pieces(flat):
                self._comm.bcast(device.address(piece), piece.size, self._kinds[piece.dtype], root, stream)

    def barrier(self) -> None:
        """Wait until every rank's host has called this; GPUs may still be at work.  Collective.

        Raises:
            PeerLeft: a rank has ended.
        """
        self.control.vote("a barrier", fingerprint(["a barrier"]), lambda: ["a barrier"])

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Allocate zeros, ``(n,)``, on the communicator's GPU."""
        self._check_thread()
        array: np.ndarray = (self._memory.zeros if self._registers else device.gpu_zeros)(n, dtype)
        return array

    def register(self, x: np.ndarray) -> None:
        """Register an array of ``alloc`` with NCCL, if DISTOPT_NCCL_REGISTER is 1.  Collective."""
        if self._registers:
            with self._log("registering", x.nbytes):
                self.wait()
                device.synchronize(device.current_stream(), self.check)
                self._memory.register(x)

    # ------------------------------------------------------------------------------------------- streams

    @contextlib.contextmanager
    def _enqueued(self, verb: str, *arrays: np.ndarray) -> Iterator[int]:
        """Enqueue NCCL's calls in this context as one operation on the communicator's stream; yield its pointer."""
        if self._comm is None or self._failure:
            raise RuntimeError(f"rank {self.rank}: {self._failure or 'the communicator is closed'}")
        self._check_thread()
        self._order(device.current_stream(), self._stream)
        self._last = verb, arrays[0].size, arrays[0].dtype
        self.collectives_fingerprint = zlib.crc32(
            f"{verb} {arrays[0].dtype.char} {self._tag}".encode(), self.collectives_fingerprint
        )
        self._kept += arrays
        nccl = binding()
        try:
            # NCCL may wait for others before it enqueues
            with self._log(verb, arrays[0].nbytes, self._tag):
                with _group():
                    yield self._stream.ptr
        except nccl.NcclError as error:
            raise self._failed(f"{self._verb}: {error}") from error
        except Exception as error:  # of distopt, or of cupy in its name
            raise self._failed(f"{self._verb}: {type(error).__name__}: {error}", nccl=False) from error
        except BaseException:  # a part was enqueued, and other ranks may wait for the rest
            self._failed(f"{self._verb}, which was interrupted", nccl=False)
            raise

    def wait(self) -> None:
        """Make the caller's current stream wait for all collectives so far, without blocking the host."""
        stream = device.current_stream()
        # the captured work has no collective
        unused = stream.is_capturing() and not self._stream.is_capturing()
        if stream.ptr != self._stream.ptr and not unused:
            # not within on_comm_stream(): its stream needs no wait, and the caller's waits after the context
            self._order(self._stream, stream)
            self._kept.clear()

    @contextlib.contextmanager
    def on_comm_stream(self) -> Iterator[None]:
        """Make the communicator's stream the current one, after the work that the caller's stream has so far.

        Lasting memory still belongs to the caller's stream; call ``wait()`` after the context.
        """
        caller = device.current_stream()
        self._order(caller, self._stream)
        with device.owned_by(caller), self._stream:
            yield

    def _check_thread(self) -> None:
        current = device.current_gpu()
        if current != self.gpu:
            raise ValueError(
                f"this thread's current GPU must be {self.gpu}, the communicator's, got {current}; "
                f"call cupy.cuda.Device({self.gpu}).use() first"
            )

    def _aligned_arrays(self, sizes: Sequence[int], like: np.ndarray) -> list[np.ndarray]:
        """Return arrays of these sizes, in elements, at aligned addresses of one new piece of memory."""
        step = ALIGNED // like.dtype.itemsize
        starts = np.cumsum([0] + [-(-n // step) * step for n in sizes])
        memory = device.empty(int(starts[-1]), like.dtype, like=like)
        return [memory[start : start + n] for start, n in zip(starts[:-1].tolist(), sizes, strict=True)]

    def _pieces(self, x: np.ndarray) -> list[np.ndarray]:
        """Cut a flat array into pieces that one call of NCCL can take; an empty array has none."""
        if 0 < x.size <= self.CHUNK:
            return [x]
        return [x[start : start + self.CHUNK] for start in range(0, x.size, self.CHUNK)]

    def make_duplicate(self) -> Communicator:
        """Return this communicator.

        One thread enqueues everything: NCCL may deadlock if ranks use two communicators in different orders.
        """
        return self

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Make a communicator of a group on the same GPUs; this one if all are in it.  Collective.

        Wait for one of them before another one is used (``wait``): NCCL may deadlock if ranks differ in the order.
        """
        members = group_of(self.rank, groups)
        if len(members) == self.size:
            return self
        hosts = [self.hosts[member] for member in members]
        reason = f"{len(members)} of {self.size} ranks"
        return NcclCommunicator(self.control.subgroup(members), self.gpu, self.local_rank, reason, hosts=hosts)

    # ------------------------------------------------------------------------------------------- ends

    @property
    def _verb(self) -> str:
        """The last operation, in words."""
        verb, size, dtype = self._last
        return verb if dtype is None else f"{verb} of {size} {dtype}"

    def check(self) -> None:
        """Check the collectives that are under way.

        Raises:
            RuntimeError: a collective has failed, or the communicator is closed.
            PeerLeft: a rank is known to have ended.
        """
        self.control.check()
        if self._host is not None:
            self.control.check_ends()
        if self._comm is None or self._failure:
            raise RuntimeError(f"rank {self.rank}: {self._failure or 'the communicator is closed'}")
        try:
            self._comm.check_async_error()
        except KeyError as status:  # cupy's table of statuses is shorter than NCCL's
            if status.args != (IN_PROGRESS,):
                raise self._failed(f"{self._verb}, or before: status {status}, a time limit") from status
        except binding().NcclError as error:
            raise self._failed(f"{self._verb}, or before: {error}") from error

    def _failed(self, text: str, nccl: bool = True) -> RuntimeError:
        """Return the error for a failed collective; no collective is possible after it."""
        # nccl: whether NCCL has failed, and not its caller.
        who, more = ("NCCL", "; NCCL_DEBUG=WARN says more") if nccl else ("distopt", "")
        self._failure = f"{who} failed on GPU {self.gpu} in {text}{more}"
        return (NcclFailure if nccl else RuntimeError)(f"rank {self.rank}: {self._failure}")

    # -- ranks that are lost

    def settle(self) -> None:
        """Wait on the host until the caller's stream has the results of all collectives so far.

        Only then it is known that every rank has sent its part: NCCL may wait for a lost one for ever.
        """
        self.wait()
        device.synchronize(device.current_stream(), self.check)

    def lost(self, error: BaseException) -> bool:
        """Tell if an error means that a rank was lost: NCCL's own errors may, and do not say so.

        If none was, the same ranks go on, with another communicator of NCCL's; after three in a row the error counts.
        """
        if self._host is None:
            return super().lost(error)
        return self._host.lost(error) or (isinstance(error, NcclFailure) and self._trials < self.TRIALS)

    def revoke(self) -> None:
        """Stop the collectives that are under way on this rank, and let all that any rank waits for raise PeerLeft."""
        self.abort()
        if self._host is not None:
            self._host.revoke()

    def next_epoch(self, text: str, admit: bool = False) -> tuple[Communicator, list[str]]:
        """Return a communicator of the ranks that live, on the same GPUs, and a text of each.  Collective of these."""
        if self._host is None:
            return super().next_epoch(text, admit)
        new, texts = NcclCommunicator._over(self._host, self.gpu, "", text, lost=True)
        new._trials = self._trials + 1 if new.size == self.size else 0
        return new, texts

    def abort(self, deadline: float = 5.0) -> bool:
        """Stop the collectives that are under way on this rank.  Not collective.

        Args:
            deadline: seconds to wait for NCCL.

        Returns:
            Whether NCCL stopped in time.
        """
        comm, kept = self._give_up()
        self._failure = self._failure or "the communicator was aborted"
        if comm is None:
            return True
        self._memory.abandon()
        return self._abort(comm, kept, deadline)

    def _abort(self, comm: Any, kept: Sequence[np.ndarray], deadline: float) -> bool:
        """Abort NCCL in another thread, and return whether it has done so in time."""

        def abort() -> None:
            device.use_gpu(self.gpu)
            comm.abort()

        return _within(deadline, abort, (comm, kept))

    def close(self) -> None:
        """Wait for the collectives under way, and release the resources of NCCL and ``control``.  Collective.

        All captured steps on this GPU are dropped: NCCL would wait for graphs that use the communicator.
        """
        if self._comm is None:
            return
        for group in self._subgroups.values():
            if group is not self:
                group.close()
        if self._failure:
            self.abort()
            self.control.close()
            return
        with self._log("closing"):
            device.drop_graphs(self.gpu)
            device.synchronize(self._stream, self.check)
            # before NCCL waits for the others: those that still vote learn that this rank leaves
            self.control.close()
            self._memory.deregister()
            self._give_up()[0].destroy()

    def _give_up(self) -> tuple[Any, list[np.ndarray]]:
        """Detach cupy's communicator, and return it, or None at later calls, with the arrays that it may still use."""
        device.drop_graphs(self.gpu)
        comm, arrays = self._comm, self._kept
        self._comm, self._kept = None, []
        if self in _alive:
            _alive.remove(self)
        return comm, arrays


class NcclFailure(RuntimeError):
    """NCCL has failed, perhaps since another rank has ended."""


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """A context whose calls of this thread NCCL takes as one."""
    binding().groupStart()
    try:
        yield
    finally:  # an open group would swallow all later calls of this thread
        binding().groupEnd()


@functools.cache
def _kinds() -> dict[Any, int]:
    """NCCL's numbers of dtypes."""
    nccl = binding()
    names = {
        np.float16: nccl.NCCL_FLOAT16,
        ml_dtypes.bfloat16: nccl.NCCL_BFLOAT16,
        np.float32: nccl.NCCL_FLOAT32,
        np.float64: nccl.NCCL_FLOAT64,
        np.int32: nccl.NCCL_INT32,
        np.int64: nccl.NCCL_INT64,
        np.uint8: nccl.NCCL_UINT8,
        np.int8: nccl.NCCL_INT8,
        # carried, never added by NCCL
        np.int16: nccl.NCCL_FLOAT16,
        np.bool_: nccl.NCCL_UINT8,
    }
    return {np.dtype(name): int(number) for name, number in names.items()}


# ----------------------------------------------------------------------------------------------------- ends

# Open communicators: if one were garbage collected, this rank would destroy it without the others, and might hang.
_alive: list[NcclCommunicator] = []
_left_alone: list[Any] = []  # objects that must never be garbage collected


@functools.cache
def _helper() -> "queue.SimpleQueue[Callable[[], object]]":
    """Return the queue of a thread that runs jobs, started early: Python 3.12 starts no thread at shutdown."""
    # Each job begins with the choice of its GPU: a process may have communicators on several.
    jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=work, name="NCCL's end", daemon=True).start()
    return jobs


def _within(seconds: float, end: Callable[[], object], owner: Any) -> bool:
    """Call ``end`` in the helper's thread, and return whether it returned within these seconds."""
    # If it did not, `owner` is kept alive for ever, since NCCL may still use it.
    done = threading.Event()

    def job() -> None:
        with contextlib.suppress(Exception):
            end()
        done.set()

    with contextlib.suppress(RuntimeError):  # at shutdown no thread can be started
        _helper().put(job)
        if done.wait(seconds):
            return True
        _helper.cache_clear()  # that thread is stuck; start another one while it is possible
        _helper()
    _left_alone.append(owner)
    return False


def end_all(deadline: float = 10.0) -> None:
    """Call ``end`` in the helper's thread, and return whether it returned within these seconds."""
    # If it did not, `owner` is kept alive for ever, since NCCL may still use it.
    unclosed = [(c, *c._give_up()) for c in _alive[:]]
    half = time.monotonic() + deadline / 2

    def poll() -> None:
        if time.monotonic() > half:
            raise TimeoutError

    def settle() -> None:
        stuck, done = [], []
        for owner, comm, _ in unclosed:
            try:
                device.use_gpu(owner.gpu)
                if owner._failure:
                    raise RuntimeError(owner._failure)
                device.synchronize(owner._stream, poll)
                owner._memory.deregister()
            except Exception:
                owner._memory.abandon()
                stuck.append((owner.gpu, comm))
            else:
                done.append((owner.gpu, comm))
        if stuck:  # first: destroy() may wait for the kernels of a stuck communicator
            # which waits for kernels when all have been told to end
            with contextlib.suppress(Exception), _group():
                for gpu, comm in stuck:
                    device.use_gpu(gpu)
                    comm.abort()
        for gpu, comm in done:
            device.use_gpu(gpu)
            comm.destroy()

    if unclosed:
        _within(deadline, settle, unclosed)


atexit.register(end_all)  # before MPI's hooks, and so called after them, when all ranks have left


def _forget_all() -> None:
    """Forget all communicators in a forked child, which has no GPU and no threads."""
    _helper.cache_clear()
    _left_alone.extend(_alive)
    _alive.clear()


os.register_at_fork(after_in_child=_forget_all)
