"""What every communicator can do, and the two things that several of them share."""

import abc
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device, kernels
from distopt.comm import objects
from distopt.cost import DIRECT, Algorithm
from distopt.device import describe
from distopt.guard import Control, fingerprint
from distopt.ledger import Purpose
from distopt.tables import Members

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
NUMBERS = (*map(np.dtype, (np.float32, np.float64, np.int32, np.int64, np.uint8)), *HALVES)


class Communicator(abc.ABC):
    """The wire: ``size`` ranks that all call the same verbs in the same order, or wait for ever: votes are DistOpt's.

    Arrays are C-contiguous, of any shape and length, zero included, and of one of the dtypes in ``NUMBERS``.  Sums of
    float16 and bfloat16 are formed in float32, in rank order, and rounded once; NCCL's own are rounded at every hop.

    On a GPU a verb only enqueues: results are there for the caller's stream after ``wait()``, and what was handed over
    must not be written to before.
    """

    rank: int
    size: int
    local_rank: int
    control: Control
    xp: ModuleType = np
    gpu: int | None = None  # where the arrays are that it carries; None: on the host
    one_process = False  # are all ranks threads of one process, which might share what each must have of its own?
    rank_ordered = False  # does all_reduce add in rank order: ((x0 + x1) + x2) + ...?
    why = ""
    algorithm: Algorithm = DIRECT  # how collectives are done
    may_overlap = True  # may a thread exchange while another one computes?
    _beside: "Communicator | None" = None
    _hosts: Sequence[int] = ()
    history = 0  # a fingerprint of what was enqueued, for votes to compare: a GPU does not see when ranks differ
    _purpose = ""  # of what goes over the wire, for those who ask why it takes so long

    def on_behalf_of(self, purpose: Purpose) -> AbstractContextManager[None]:
        """What is exchanged in this context is part of something; the report of a time limit names it."""
        return self._named(str(purpose))

    @contextlib.contextmanager
    def _named(self, purpose: str) -> Iterator[None]:
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    @property
    def hosts(self) -> Sequence[int]:
        """Where each rank sits: numbers that are equal for those on one machine."""
        return self._hosts or (0,) * self.size

    @property
    def travels_meanwhile(self) -> bool:
        """Does ``all_reduce_each`` ask for an array while others travel?"""
        return False

    @property
    def spans_hosts(self) -> bool:
        """Do ranks sit on several machines?"""
        return len(set(self._hosts)) > 1

    @abc.abstractmethod
    def all_reduce(self, x: np.ndarray) -> None:
        """Replace x, in place, by its sum over ranks; the same bits on every rank."""

    def all_reduce_each(self, arrays: Iterable[np.ndarray | None]) -> Iterator[np.ndarray]:
        """Sums of arrays, in their places and in turn; the next one may be asked for before the last one is there.

        None among the arrays says that the next one will take a while.
        """
        for x in arrays:
            if x is not None:
                self.all_reduce(x)
                yield x

    @abc.abstractmethod
    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Every rank's x, flat, in rank order; with ``ragged`` the lengths may differ.

        ``into``: memory for all of them together, of x's dtype, where they are not ragged; else it is made.
        """

    @abc.abstractmethod
    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r; return the parts for this rank, flat, in rank order.

        Without ``ragged`` every rank's part for this one is as long as this rank's own part for itself.
        """

    @abc.abstractmethod
    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by rank ``root``'s."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come."""

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:
        """This rank's slice (see ``slices``) of the sum over ranks of x, added in rank order."""
        flat = checked(x, writable=False, gpu=device.place(x))
        return sum_in_rank_order(self.all_to_all([flat[s] for s in slices(x.size, self.size)]))

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank ``root``'s plain value, on every rank; what the other ranks give does not matter.

        Plain are None, flags, numbers and texts, and lists and dicts, with texts as keys, of these.  Integers are
        exact, floats are to the bit, a tuple becomes a list.  The ranks agree first that all of them are here.

        Raises, on every rank alike, TypeError for what is not plain; ValueError for ranks that are elsewhere or name
        another root, for a root that is no rank, for more than 100 levels, an integer of more than 8,192 bits, or more
        than 2^20 characters of JSON: send large data as arrays.
        """

        def text() -> str:
            checked_root(root, self.size)
            return objects.encode(value) if self.rank == root else ""

        return objects.decode(self.gather_texts([f"broadcast_object from rank {root}"], text)[root])

    def gather_texts(self, lines: Sequence[str], make: Callable[[], str]) -> list[str]:
        """One text per rank, of which one at least is not empty, in rank order, if all ranks bring the same ``lines``.

        Raises what ``make`` raises on one of them, and ValueError for lines that differ, on every rank alike.
        """
        error, text = None, ""
        try:
            text = make()
        except Exception as e:
            error = e
        verb = lines[0].split()[0]
        return self.control.vote(verb, fingerprint(lines), lambda: list(lines), error, text)

    def lengths(self, n: int) -> list[int]:
        """Every rank's n, in rank order."""
        return [int(x[0]) for x in self.all_gather(np.array([n]))]

    def wait(self) -> None:  # noqa: B027  host collectives have nothing to wait for
        """Results are visible to the caller's current stream from here on; does not block the host on a GPU."""

    def aside(self) -> AbstractContextManager[None]:
        """What is enqueued in this context goes on beside the caller's stream: after all that it has been given so far.

        Verbs and kernels in it follow each other without a ``wait()``, which comes once, after the context.
        """
        return contextlib.nullcontext()

    def check(self) -> None:  # noqa: B027  host collectives raise by themselves
        """Raise RuntimeError if what was enqueued can never end.  For whoever waits for a GPU, again and again."""

    def be_patient(self, seconds: float) -> None:  # noqa: B027  most wait without taking a core
        """Sleep so long between two looks at an exchange in progress, so that a core can compute; 0 waits busily."""

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Zeroed flat memory that this communicator likes; from 2 MiB on it starts at a multiple of 2 MiB."""
        return device.zeros(n, dtype)

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """The same array on every rank, in rank order, if all ranks can read and write all of them; else None.

        Collective, for a whole array that ``alloc`` returned.  Where arrays are shared, a rank must not go on before
        the others are done with its own: that takes a barrier, or a vote.
        """
        return None

    def add_parts(self, members: Members, parts: Sequence[np.ndarray], bad: np.ndarray) -> None:
        """One rank's share of an all-reduce of arrays of ``peers``: its part becomes the sum, in rank order, there.

        ``bad`` counts what is not finite, as the kernel says.
        """
        kernels.add_parts(members.share(self.rank, self.size), parts, parts[self.rank], bad)

    def add_half_parts(self, members: Members, parts: Sequence[np.ndarray], total: np.ndarray, scale: float) -> None:
        """The same of numbers of 16 bits, added in float32 and rounded once; this rank's share of ``total`` is that.

        It is divided by ``scale``.
        """
        kernel = kernels.add_bfloat16_parts if parts[0].dtype == BFLOAT16 else kernels.add_half_parts
        kernel(members.share(self.rank, self.size), list(parts), total, scale)

    @property
    def bare(self) -> "Communicator":
        """What does the work, for messages that are no part of what is exchanged."""
        return self

    @property
    def beside(self) -> "Communicator":
        """The same ranks on a wire of its own, for a thread that exchanges while this one is in use.

        Collective when it is first asked for.  Itself where one thread enqueues everything.
        """
        if self._beside is None:  # no cached_property, whose lock all ranks of this process would share
            self._beside = self._duplicate()
        return self._beside

    def _duplicate(self) -> "Communicator":
        raise NotImplementedError(f"{type(self).__name__} has but one wire")

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Give back what the communicator holds."""

    def __repr__(self) -> str:
        reason = f": {self.why}" if self.why else ""
        return f"<{type(self).__name__}, rank {self.rank} of {self.size}, {self.xp.__name__}{reason}>"


class Wrapper(Communicator):
    """A communicator around a communicator: subclasses change the verbs they care about."""

    def __init__(self, comm: Communicator):
        self.comm, self.rank, self.size, self.local_rank = comm, comm.rank, comm.size, comm.local_rank
        self.control, self.xp, self.gpu, self.rank_ordered = comm.control, comm.xp, comm.gpu, comm.rank_ordered
        self.one_process = comm.one_process
        self._hosts, self.may_overlap, self.algorithm = comm.hosts, comm.may_overlap, comm.algorithm

    def on_behalf_of(self, purpose: Purpose) -> AbstractContextManager[None]:  # noqa: D102
        return self.comm.on_behalf_of(purpose)

    def all_reduce(self, x: np.ndarray) -> None:
        """As the inner communicator, like all verbs below."""
        self.comm.all_reduce(x)

    def all_gather(  # noqa: D102
        self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None
    ) -> list[np.ndarray]:
        return self.comm.all_gather(x, ragged, into)

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:  # noqa: D102
        return self.comm.all_to_all(parts, ragged)

    def reduce_scatter(self, x: np.ndarray) -> np.ndarray:  # noqa: D102
        return self.comm.reduce_scatter(x)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:  # noqa: D102
        self.comm.broadcast(x, root)

    def barrier(self) -> None:  # noqa: D102
        self.comm.barrier()

    def wait(self) -> None:  # noqa: D102
        self.comm.wait()

    def aside(self) -> AbstractContextManager[None]:  # noqa: D102
        return self.comm.aside()

    def check(self) -> None:  # noqa: D102
        self.comm.check()

    def lengths(self, n: int) -> list[int]:  # noqa: D102
        return self.comm.lengths(n)

    def be_patient(self, seconds: float) -> None:  # noqa: D102
        self.comm.be_patient(seconds)

    def alloc(self, n: int, dtype: Any) -> np.ndarray:  # noqa: D102
        return self.comm.alloc(n, dtype)

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:  # noqa: D102
        return self.comm.peers(x)

    def add_parts(self, members: Members, parts: Sequence[np.ndarray], bad: np.ndarray) -> None:  # noqa: D102
        self.comm.add_parts(members, parts, bad)

    def add_half_parts(  # noqa: D102
        self, members: Members, parts: Sequence[np.ndarray], total: np.ndarray, scale: float
    ) -> None:
        self.comm.add_half_parts(members, parts, total, scale)

    @property
    def bare(self) -> Communicator:
        """That of the inner communicator."""
        return self.comm.bare

    def _duplicate(self) -> Communicator:
        twin = copy.copy(self)
        twin.comm = self.comm.beside
        twin.control = twin.comm.control
        return twin

    def close(self) -> None:  # noqa: D102
        self.comm.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm!r})"


def slices(n: int, size: int) -> list[slice]:
    """Cut [0, n) into one slice per rank, of lengths that differ by at most one."""
    bounds = [n * r // size for r in range(size + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def sum_in_rank_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """((x0 + x1) + x2) + ..., a new array; halves are added in float32 and rounded once."""
    if parts[0].dtype in HALVES:
        found: np.ndarray = device.empty(parts[0].size, parts[0].dtype, like=parts[0])
        sum_halves([x.reshape(-1) for x in parts], found)
        return found.reshape(parts[0].shape)
    total = device.copied(parts[0])
    with np.errstate(over="ignore", invalid="ignore"):  # as on any wire; who cares looks at the sum
        for x in parts[1:]:
            if device.on_gpu(total):
                kernels.accumulate(x, total)
            else:
                total += x
    return total


def sum_halves(parts: Sequence[np.ndarray], found: np.ndarray) -> None:
    """Overwrite ``found``, which may be one of the flat parts, by their sum: one pass."""
    kernel = kernels.sum_bfloat16 if found.dtype == BFLOAT16 else kernels.sum_half
    kernel(found, list(parts))


def all_reduce_in_rank_order(comm: Communicator, x: np.ndarray) -> None:
    """Replace x, in place, by its sum over ranks, added in rank order.

    Slices go to their owners, are added there, and are gathered: the bytes of a ring, and the same bits on any
    transport and in any chunking.
    """
    flat = checked(x, gpu=device.place(x))
    with comm.aside():
        parts = comm.all_gather(comm.reduce_scatter(flat), ragged=True)
        for part, s in zip(parts, slices(flat.size, comm.size), strict=True):
            device.copy(flat[s], part)


def checked(x: np.ndarray, writable: bool = True, gpu: int | None = None) -> np.ndarray:
    """x as a flat view; TypeError unless a communicator can carry it that works on a GPU, or on the host (None).

    Raises ValueError for an array on another GPU.
    """
    if not device.is_array(x) or x.dtype not in NUMBERS:
        raise TypeError(f"a communicator carries arrays of {', '.join(map(str, NUMBERS))}, got {describe(x)}")
    if not x.flags.c_contiguous or (writable and not device.writable(x)):
        raise TypeError(f"a communicator wants C-contiguous{' writable' * writable} arrays, got {describe(x)}")
    device.check_place("what this communicator carries", x, gpu)
    return x.reshape(-1)


def checked_parts(parts: Sequence[np.ndarray], size: int, gpu: int | None = None) -> list[np.ndarray]:
    """The parts as flat views; ValueError unless there is one per rank."""
    if len(parts) != size:
        raise ValueError(f"parts must be {size} arrays, one per rank, got {len(parts)}")
    return [checked(x, writable=False, gpu=gpu) for x in parts]


def cut(room: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Memory in consecutive parts of these sizes; ValueError if it has not as many elements."""
    if room.size != sum(sizes):
        raise ValueError(f"into must have room for {sum(sizes)} elements, the parts of all ranks, got {room.size}")
    ends = itertools.accumulate(sizes)
    return [room[end - n : end] for n, end in zip(sizes, ends, strict=True)]


def checked_root(root: int, size: int) -> int:
    """A rank; ValueError if there is none with this number."""
    if not 0 <= root < size:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, got {root}")
    return root
