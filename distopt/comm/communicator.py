"""Interface of communicators, base class of wrappers, and sums in rank order."""

import collections
import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from distopt import device, kernels
from distopt.comm import objects
from distopt.comm.byte_counts import DIRECT, Algorithm
from distopt.comm.control import ControlChannel, PeerLeft, Waits
from distopt.comm.message import MessageTag, Tagging
from distopt.comm.ranks import Ranks
from distopt.comm.receive_buffer import ReceiveBuffer
from distopt.device import describe
from distopt.resilience.operation_log import silent

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
NUMBERS = (*map(np.dtype, (np.float32, np.float64, np.int32, np.int64, np.uint8)), *HALVES)
DTYPES = (*NUMBERS, *map(np.dtype, (np.int8, np.int16, np.bool_)))
# what a reduction makes of two ranks' numbers, and the kinds of dtypes that it takes; V is that of bfloat16
OPERATIONS = {
    "sum": (np.add, "iufV"),
    "mean": (np.add, "fV"),
    "min": (np.minimum, "biufV"),
    "max": (np.maximum, "biufV"),
    "product": (np.multiply, "biufV"),
}
Groups = tuple[tuple[int, ...], ...]  # of ranks
UNDER_WAY = 3  # operations that are begun and not complete, at most
# whether lengths differ, or the elements from each rank, if they are known
Ragged = bool | Sequence[int]
T = TypeVar("T")
# An operation, which yields its log wherever others may be begun.  It has a turn from 1 to UNDER_WAY, the tag of its
# messages, as no other that is under way.
Phases = Generator[AbstractContextManager[None], None, Any]


class Communicator:
    """One of ``size`` ranks that exchange arrays by collectives.

    All ranks must call the same collectives in the same order, or they wait for ever; only ``DistOpt`` lets ranks vote
    before they exchange.

    Arrays are C-contiguous, of any shape and length, zero included, and of one of the dtypes in ``DTYPES``.  Sums of
    float16 and bfloat16 are formed in float32, in rank order, and rounded once; NCCL's sums are rounded at every hop.

    A *reduction* ``op`` is 'sum'; 'mean', of floating-point numbers; 'min', 'max' or 'product', of flags too, which are
    then whether all, any or all of them are set.  All but sums are formed in rank order on every transport, 16-bit
    numbers in float32.  A NaN of any rank makes NaN, in 'min' and 'max' too; integers wrap around.

    On a GPU a collective is only enqueued.  Its results may be used on the caller's stream after ``wait()``; until then
    its arguments must not be written to.

    A transport defines ``rank``, ``size``, ``local_rank`` and ``control``, and ``exchange``, over which all collectives
    are written here; one that has a better way for some overrides these.  For threads that exchange concurrently it
    defines ``make_duplicate``, for the exchange by nodes ``make_subgroup``.

    Attributes:
        rank: this rank's number, from 0.
        size: number of ranks.
        local_rank: this rank's number among the ranks of its machine.
        control: the channel for votes.
        xp: module of the arrays, numpy or cupy.
        gpu: number of the GPU that has the arrays, None for arrays on the host.
        rank_ordered: ``all_reduce`` adds in rank order: ((x0 + x1) + x2) + ...
        exact: ``all_reduce`` of float32 is the same in any order.
        may_overlap: a thread may exchange while another one computes.
        pipelines: operations take a while, in which others are to be begun (``sum_in_phases``, ``exchange_in_phases``).
        algorithm: routes of the collectives, from which the bytes on the wire follow.
        hosts_summed: hosts, whatever ranks each has, between which ``all_reduce`` sends no more than a sum of each.
        reason: why this transport was chosen, for ``repr``.
        collectives_fingerprint: fingerprint of the collectives enqueued so far.  Votes compare it, since a GPU does not
            notice that ranks differ.
        membership: what goes on without the ranks that are lost, and admits others; None where all end together.
        outside: this process is alone until it calls ``membership.join_others``.
        epoch: grows whenever other ranks go on than before; ``rank``, ``size`` and ``control`` are new then.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import Communicator, run_ranks
        >>> def main(comm: Communicator):
        ...     x = np.full(2, comm.rank + 1, np.float32)
        ...     comm.all_reduce(x)
        ...     return x.tolist()
        >>> run_ranks(3, main)
        [[6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]
    """

    rank: int
    size: int
    local_rank: int
    control: ControlChannel
    xp: ModuleType = np
    gpu: int | None = None
    rank_ordered = False
    exact = False
    may_overlap = True
    pipelines = False
    algorithm: Algorithm = DIRECT
    hosts_summed = 1
    reason = ""
    collectives_fingerprint = 0
    membership: Any = None  # an `Elastic`
    outside = False
    epoch = 0
    _hosts: Sequence[int] = ()
    _log: Waits = staticmethod(silent)  # of operations, for the report of a time limit
    _tag = ""  # of the operation in progress
    _rooms: Sequence[ReceiveBuffer] = ()  # of the sums that are under way
    _second: "Communicator | None" = None  # the result of duplicate()
    _subgroups: Mapping[Groups, "Communicator"] = MappingProxyType({})  # the results of subgroup()
    _made_in = 0  # the epoch of these
    _own_rank = Ranks(0, ())
    _logical: "Communicator | None" = None  # the one of its logical ranks

    def tagged(self, tag: MessageTag) -> AbstractContextManager[None]:
        """Return a context whose messages are labelled with ``tag``, for ledgers and for the report of a time limit."""
        return Tagging(self, str(tag))

    @property
    def hosts(self) -> Sequence[int]:
        """Machine of each rank, ``(size,)``: numbers that are equal for ranks of one machine."""
        return self._hosts or (0,) * self.size

    @property
    def ranks(self) -> Ranks:
        """The ranks whose gradients make a mean: the processes, but for ``world(logical=V)``."""
        if (self._own_rank.size, self._own_rank.here) != (self.size, (self.rank,)):
            self._own_rank = Ranks(self.size, (self.rank,))
        return self._own_rank

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks sit on several machines."""
        return len(set(self.hosts)) > 1

    def exchange(self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Send ``parts[r]`` to every other rank r, and receive ``received[r]``.  Collective.

        Args:
            parts: flat arrays, one per rank; an empty one is no message.
            received: memory of the length that the part of each other rank has, which both ends know.
        """
        raise NotImplementedError(f"a {type(self).__name__} must define exchange, or each collective")

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Replace x, in place, by its sum over ranks, or another reduction, the same bits on every rank.  Collective.

        Args:
            x: the array.
            op: 'sum', 'mean', 'min', 'max' or 'product'.

        Raises:
            ValueError: ``op`` is none of these.
            TypeError: it is not defined for numbers of this dtype; or x is no array to be carried.
        """
        flat = as_flat(x, op=op)
        if op != "sum":
            all_reduce_in_rank_order(self, flat, op)
            return
        with self._log("all_reduce", flat.nbytes, self._tag):
            collections.deque(self._sum_in_phases(flat), maxlen=0)

    def sum_in_phases(self, x: np.ndarray, turn: int) -> Phases:
        """Replace x by its sum over ranks, while other operations are under way."""
        flat = as_flat(x)
        log = self._log("all_reduce", flat.nbytes, self._tag)
        for _ in self._sum_in_phases(flat, turn):
            yield log

    def exchange_in_phases(
        self, verb: str, parts: Sequence[np.ndarray], received: Sequence[np.ndarray], turn: int
    ) -> Phases:
        """Do an ``exchange`` while other operations are under way, and return ``received``, with this rank's own part.

        ``verb``: 'all_gather' or 'all_to_all', for logs.
        """
        log = self._log(verb, parts[self.rank].nbytes, self._tag)
        end = self._begin_exchange(parts, received, turn)
        received[self.rank][...] = parts[self.rank]
        yield log
        end()
        return received

    def _sum_in_phases(self, x: np.ndarray, turn: int = 1) -> Iterator[None]:
        """Replace a flat x by its sum, in three phases, each of which but the first begins with a wait."""
        # Each slice goes to the rank that owns it, is added up there in rank order, and comes back.
        self._rooms = self._rooms or [ReceiveBuffer() for _ in range(UNDER_WAY)]
        parts = [x[s] for s in slices(x.size, self.size)]
        mine = parts[self.rank]
        received = split(self._rooms[turn - 1].view(x.dtype, self.size * mine.size), [mine.size] * self.size)
        received[self.rank] = mine
        end = self._begin_exchange(parts, received, turn)
        yield
        end()
        if x.dtype in HALVES:
            sum_halves(received, mine)
        else:
            mine[...] = sum_in_rank_order(received)
        end = self._begin_exchange([mine] * self.size, parts, turn)
        yield
        end()

    def _begin_exchange(
        self, parts: Sequence[np.ndarray], received: Sequence[np.ndarray], tag: int = 0
    ) -> Callable[[], None]:
        """Begin an ``exchange``, and return what waits for its end: here all of it is done at once."""
        self.exchange(parts, received)
        return lambda: None

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return every rank's x, flat, in rank order.  Collective.

        Args:
            x: an array of n elements, of the same length on every rank unless ``ragged``.
            ragged: whether lengths may differ; or the lengths, by rank, where they are known and need not be sent.
            into: memory for the results, ``(size * n,)`` of x's dtype; only used without ``ragged``.  Default: new
                memory.
        """
        flat = as_flat(x, writable=False)
        with self._log("ragged all_gather" if ragged else "all_gather", flat.nbytes, self._tag):
            return self._swap([flat] * self.size, ragged, into)

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r, and return the parts for this rank, flat, in rank order.  Collective.

        Args:
            parts: one array per rank, all of one dtype.
            ragged: whether lengths may differ; or those of the parts for this rank, where they are known.  If not,
                every rank's part for this rank has the length of ``parts[rank]``.
        """
        flats = flat_parts(parts, self.size)
        with self._log("ragged all_to_all" if ragged else "all_to_all", 0, self._tag):
            return self._swap(flats, ragged)

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Replace x, in place, by the x of rank ``root``.  Collective."""
        # Each slice goes to the rank that owns it, and from there to all that do not have it.
        flat, root = as_flat(x), check_root(root, self.size)
        parts, none, is_root = [flat[s] for s in slices(flat.size, self.size)], flat[:0], self.rank == root
        mine = parts[self.rank]
        with self._log("broadcast", flat.nbytes, self._tag):
            self.exchange(
                parts if is_root else [none] * self.size,
                [none if is_root or r != root else mine for r in range(self.size)],
            )
            self.exchange(
                [none if r == root else mine for r in range(self.size)], [none] * self.size if is_root else parts
            )

    def barrier(self) -> None:
        """Wait until every rank has called this.  Collective."""
        with self._log("barrier"):
            self._lengths([0] * self.size)

    def _lengths(self, sent: Sequence[int]) -> list[int]:
        """Return the number that each rank has for this one, ``(size,)``.  Collective."""
        numbers = np.array(sent, np.int64).reshape(-1, 1)
        received = numbers.copy()
        self.exchange(list(numbers), list(received))
        lengths: list[int] = received.reshape(-1).tolist()
        return lengths

    def _swap(self, parts: Sequence[np.ndarray], ragged: Ragged, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Send ``parts[r]`` to rank r, and return what each rank sent.  Collective."""
        mine = parts[self.rank]
        if into is not None and not ragged:
            received = split(into, [mine.size] * self.size)
        else:
            lengths = self._lengths([x.size for x in parts]) if ragged is True else ragged or [mine.size] * self.size
            received = [np.empty(n, mine.dtype) for n in lengths]
        received[self.rank][...] = mine
        self.exchange(parts, received)
        return received

    def reduce_scatter(self, x: np.ndarray, op: str = "sum") -> np.ndarray:
        """Return this rank's slice of the sum over ranks of x, or of another reduction, in rank order.  Collective.

        Args:
            x: an array of n elements.
            op: as for ``all_reduce``.

        Returns:
            A flat array, the slice ``slices(n, size)[rank]`` of the sum.
        """
        flat = as_flat(x, writable=False, gpu=device.gpu_of(x), op=op)
        return reduce_in_rank_order(self.all_to_all([flat[s] for s in slices(x.size, self.size)]), op)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank ``root`` on every rank, with its types and its bits.  Collective.

        Args:
            value: None, a bool, number, text or bytes; an array of numpy or a tensor of PyTorch, which is on the CPU
                where it arrives; or a list, tuple, named tuple or dict of these, whose keys are texts or integers, as
                the ``state_dict()`` of an optimizer.  Ignored on ranks other than ``root``.
            root: the rank whose value is sent.

        Raises:
            TypeError: on every rank alike, for anything else, which it names by its place in the value, '/state/0/x'.
            ValueError: on every rank alike, if ranks are in another call or name another root; if ``root`` is no rank;
                for more than 64 levels of nesting, or more than 2^24 characters of JSON without the arrays.

        Example:
            >>> from distopt.comm import LocalCommunicator
            >>> LocalCommunicator().broadcast_object({"betas": (0.9, 0.999), "state": {0: {"step": 3}}})
            {'betas': (0.9, 0.999), 'state': {0: {'step': 3}}}
        """
        lines, arrays = [f"broadcast_object from rank {root}"], dict[str, np.ndarray]()

        def text() -> str:
            nonlocal arrays
            check_root(root, self.size)
            text, arrays = objects.encode(value) if self.rank == root else ("", {})
            return text

        def send() -> Any:
            head = json.loads(self.control.gather_texts(lines, text)[root])
            received = objects.empty_arrays(head)
            for name, x in received.items():
                if self.rank == root:
                    x[...] = arrays[name]
                raw = x.reshape(-1).view(np.uint8)
                there = raw if self.gpu is None else self.xp.asarray(raw)
                self.broadcast(there, root)
                if there is not raw:
                    self.wait()
                    raw[...] = device.host_copy(there)
            return objects.rebuilt(head, received)

        return self.transaction(send)

    def lengths(self, n: int) -> list[int]:
        """Return every rank's n, in rank order.  Collective."""
        return [int(x[0]) for x in self.all_gather(np.array([n]))]

    def wait(self) -> None:
        """Make the caller's current stream wait for all collectives so far, without blocking the host."""

    def on_comm_stream(self) -> AbstractContextManager[None]:
        """Return a context that enqueues on the communicator's stream, after the work that the caller's stream has.

        Collectives and kernels in the context follow each other without a ``wait()``; call that once, after it.
        """
        return contextlib.nullcontext()

    def check(self) -> None:
        """Raise RuntimeError if an enqueued collective can never end; to be called while a GPU is polled."""

    def set_poll_interval(self, seconds: float) -> None:
        """Set the seconds of sleep between two polls of an exchange, which leave a core free; 0 for busy waiting."""

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Allocate zeros, ``(n,)``, in memory that suits this communicator.

        An array of 2 MiB or more starts at a multiple of 2 MiB.
        """
        return device.zeros(n, dtype)

    def register(self, x: np.ndarray) -> None:
        """Tell the network of an array that ``alloc`` returned and collectives will use, at once or in parts.

        Collective: each rank gives an array of the same size.
        """

    def peers(self, x: np.ndarray) -> list[np.ndarray] | None:
        """Return the arrays of all ranks, in rank order, as shared memory.  Collective.

        A rank must not change its array before the others are done with it, which takes a barrier or a vote.

        Args:
            x: a complete array that ``alloc`` returned, the same one on every rank.

        Returns:
            One array per rank, or None unless all ranks can read and write all of them.
        """
        return None

    def first_of_peers(self, x: np.ndarray) -> np.ndarray | None:
        """Return the first rank's array, as ``peers``.  Collective.

        Any rank that has it can be the first one, and give it, when others come that do not have it.
        """
        peers = self.peers(x)
        return None if peers is None else peers[0]

    def count_all_reduce(self, x: np.ndarray) -> None:
        """Count a sum that was formed in shared memory as an all-reduce of x."""

    @property
    def unwrapped(self) -> "Communicator":
        """Communicator inside all wrappers, for messages that wrappers must not count or change."""
        return self

    def duplicate(self) -> "Communicator":
        """Return a communicator of the same ranks with separate messages, for a thread that exchanges concurrently.

        The first call is collective; later ones return the same object.  Where one thread must enqueue everything, the
        result is this communicator.
        """
        self._forget_those_before()
        # Python 3.11's cached_property has a lock that all ranks of this process would share
        if self._second is None:
            self._second = self.make_duplicate()
        return self._second

    def _forget_those_before(self) -> None:
        """Drop the duplicate and the subgroups of an earlier epoch, which had other ranks."""
        if self._made_in != self.epoch:
            self._second, self._subgroups, self._made_in = None, {}, self.epoch

    def _made_of_it(self) -> "list[Communicator]":
        """The duplicate and the subgroups, as far as they have been made."""
        return [made for made in (self._second, *self._subgroups.values()) if made is not None]

    def make_duplicate(self) -> "Communicator":
        """Make what ``duplicate`` returns, which calls this once.  Collective.

        Here it is this communicator, as one thread alone may exchange; then ``may_overlap`` is False.
        """
        return self

    def separate(self) -> "Communicator":
        """Return a communicator as ``duplicate`` does, but another one at each call, for the caller alone.  Collective.

        The caller closes it, unless it is this one.
        """
        return self.make_duplicate()

    def subgroup(self, groups: Iterable[Iterable[int]]) -> "Communicator":
        """Return a communicator of this rank's group, with separate messages.

        The first call with these groups is collective over all ranks; later ones return the same object.

        Args:
            groups: of all ranks, the same on each: the ranks of each group, ascending.  In a group, ranks are numbered
                from 0 in this order.

        Raises:
            ValueError: a rank is in no group or in several, or the ranks of a group do not ascend.

        Example:
            >>> from distopt.comm import run_ranks
            >>> def main(comm):
            ...     neighbours = comm.subgroup([[0, 1], [2, 3]])
            ...     return neighbours.rank, neighbours.lengths(comm.rank)
            >>> run_ranks(4, main)
            [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
        """
        key = tuple(map(tuple, groups))
        if sorted(rank for group in key for rank in group) != list(range(self.size)) or any(
            list(group) != sorted(group) for group in key
        ):
            raise ValueError(f"groups must have each of {self.size} ranks once, ascending, got {list(map(list, key))}")
        self._forget_those_before()
        if key not in self._subgroups:
            self._subgroups = {**self._subgroups, key: self.make_subgroup(key)}
        return self._subgroups[key]

    def make_subgroup(self, groups: Groups) -> "Communicator":
        """Make what ``subgroup`` returns, which calls this once for the same groups.  Collective over all ranks.

        Raises:
            ValueError: this communicator has no groups of ranks; one that has them overrides this.
        """
        raise ValueError(
            f"the exchange by nodes needs a communicator that defines make_subgroup, got a {type(self).__name__}"
        )

    # -- ranks that are lost: a transport whose others may go on defines the last four

    def transaction(
        self, operation: Callable[[], T], undo: Callable[[], object] = lambda: None, votes: bool = True
    ) -> T:
        """Return what an operation returns, which may be done again by fewer ranks (``comm.Elastic``).  Collective.

        Here it is done once.

        Args:
            operation: exchanges with the other ranks, and changes nothing that ``undo`` does not put right.
            undo: is called before it is done again.
            votes: False for an operation that no rank ends before all have come to it, and that has no outcome.
        """
        return operation()

    def transaction_on(self, x: np.ndarray, verb: str, operation: Callable[[], T]) -> T:
        """Return what a collective returns that writes to x, which is put back before it is done again.  Collective."""
        return operation()

    def settle(self) -> None:
        """Wait on the host until all collectives so far have their results.

        Raises:
            PeerLeft: a rank was lost meanwhile.
        """

    def lost(self, error: BaseException) -> bool:
        """Tell if an error means that a rank has ended, or that another rank has called ``revoke``."""
        return isinstance(error, PeerLeft)

    def revoke(self) -> None:
        """Make all that any rank waits for on this communicator raise what ``lost`` knows, now and from now on.

        Its duplicate, its subgroups and its votes too.  Not collective.
        """

    def next_epoch(self, text: str, admit: bool = False) -> "tuple[Communicator, list[str]]":
        """Return a communicator of the ranks that live, in their order, and a text of each.  Collective of these.

        All of them have called ``revoke`` before.  It returns on all that live, or is called again on all of them.

        Args:
            text: this rank's.
            admit: whether processes that wait to be admitted may be among them.

        Raises:
            PeerLeft: another rank was lost meanwhile; call it again.
            ValueError: this communicator cannot go on without a rank; one that can overrides this.
        """
        raise ValueError(f"a lost rank needs a communicator that defines next_epoch, got a {type(self).__name__}")

    def joiner_waits(self) -> bool:
        """Tell if a process waits to be admitted, as far as this rank knows, which may start one."""
        return False

    def close(self) -> None:
        """Release the resources of the communicator."""

    def __repr__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"<{type(self).__name__}, rank {self.rank} of {self.size}, {self.xp.__name__}{reason}>"


class _OfWrapped:
    """A name that is read of the wrapped communicator, whose ranks may change, unless it is assigned."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.comm, self._name)


class Wrapper(Communicator):
    """Communicator around another one, of which it has every public name but those that a subclass defines."""

    # And but these, which call the wrapper's own verbs, or keep what is of its own.
    KEPT = "pipelines broadcast_object reason spans_hosts duplicate subgroup next_epoch".split()
    for _name in {*Communicator.__annotations__, *vars(Communicator)}.difference(KEPT):
        if not _name.startswith("_"):
            locals()[_name] = _OfWrapped(_name)

    def __init__(self, comm: Communicator):
        self.comm = comm

    @property
    def hosts(self) -> Sequence[int]:
        return self._hosts or self.comm.hosts

    @property
    def unwrapped(self) -> Communicator:
        return self.comm.unwrapped

    def make_duplicate(self) -> Communicator:
        return self.moved_to(self.comm.duplicate())

    def separate(self) -> Communicator:
        return self.moved_to(self.comm.separate())

    def moved_to(self, comm: Communicator) -> Communicator:
        """Return the same wrapper around another communicator of this rank."""
        other = copy.copy(self)
        other.comm = comm
        other._second, other._subgroups = None, {}
        return other

    def make_subgroup(self, groups: Groups) -> Communicator:
        return self.moved_to(self.comm.subgroup(groups))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm!r})"


def group_of(rank: int, groups: Groups) -> tuple[int, ...]:
    """Return the group that a rank is in.

    Example:
        >>> group_of(1, ((0, 2), (1, 3)))
        (1, 3)
    """
    return next(group for group in groups if rank in group)


def slices(n: int, size: int) -> list[slice]:
    """Cut [0, n) into one slice per rank, of lengths that differ by at most one.

    Example:
        >>> slices(5, size=2)
        [slice(0, 2, None), slice(2, 5, None)]
    """
    bounds = [n * r // size for r in range(size + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def sum_in_rank_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return ((x0 + x1) + x2) + ... as a new array; 16-bit numbers are added in float32 and rounded once.

    Example:
        >>> import numpy as np
        >>> sum_in_rank_order([np.array([1, 2]), np.array([10, 20])]).tolist()
        [11, 22]
    """
    if parts[0].dtype in HALVES:
        flat: np.ndarray = device.empty(parts[0].size, parts[0].dtype, like=parts[0])
        sum_halves([x.reshape(-1) for x in parts], flat)
        return flat.reshape(parts[0].shape)
    total = device.copied(parts[0])
    # other transports do not warn either; see the sum for overflow
    with np.errstate(over="ignore", invalid="ignore"):
        for x in parts[1:]:
            if device.on_gpu(total):
                kernels.accumulate(x, total)
            else:
                total += x
    return total


def reduce_in_rank_order(parts: Sequence[np.ndarray], op: str = "sum") -> np.ndarray:
    """Return the reduction of arrays of one shape as a new array: op(op(x0, x1), x2) ...

    Example:
        >>> import numpy as np
        >>> reduce_in_rank_order([np.array([1.0, np.nan]), np.array([3.0, 4.0])], "max").tolist()
        [3.0, nan]
    """
    if op == "sum":
        return sum_in_rank_order(parts)
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    total = parts[0].astype(wide)
    with np.errstate(all="ignore"):
        for x in parts[1:]:
            OPERATIONS[op][0](total, x.astype(wide, copy=False), out=total)
        if op == "mean":
            total /= len(parts)
        return total.astype(dtype, copy=False)


def sum_halves(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Write the sum of flat 16-bit arrays to ``out``, which may be one of them, in one pass over memory."""
    kernel = kernels.sum_bfloat16 if out.dtype == BFLOAT16 else kernels.sum_half
    kernel(out, list(parts))


def all_reduce_in_rank_order(comm: Communicator, x: np.ndarray, op: str = "sum") -> None:
    """Replace x, in place, by its sum over ranks, or another reduction, in rank order.  Collective."""
    # Each slice goes to the rank that owns it, is added up there, and is gathered by all.  That moves as many bytes as
    # a ring, and gives the same bits on any transport and in any chunking.
    flat = as_flat(x, gpu=device.gpu_of(x), op=op)
    with comm.on_comm_stream():
        parts = comm.all_gather(comm.reduce_scatter(flat, op), ragged=True)
        for part, s in zip(parts, slices(flat.size, comm.size), strict=True):
            device.copy(flat[s], part)


def as_flat(x: np.ndarray, writable: bool = True, gpu: int | None = None, op: str | None = None) -> np.ndarray:
    """Return x as a flat view, if a communicator can carry it, and reduce it by ``op``."""
    if not (type(x) is np.ndarray or device.is_array(x)) or x.dtype not in DTYPES:
        raise TypeError(f"a communicator's array must be of {', '.join(map(str, DTYPES))}, got {describe(x)}")
    if op is not None:
        check_operation(op, x.dtype)
    if not x.flags.c_contiguous or (writable and not device.writable(x)):
        raise TypeError(f"a communicator's array must be C-contiguous{' and writable' * writable}, got {describe(x)}")
    if gpu is not None or type(x) is not np.ndarray:
        device.check_gpu("what this communicator carries", x, gpu)
    return x.reshape(-1)


def check_operation(op: str, dtype: np.dtype) -> None:
    """Raise an error unless ``op`` is a reduction, and of numbers of this dtype."""
    if op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    if dtype.kind not in OPERATIONS[op][1]:
        remedy = "min is whether all of them are set, max whether any is" if dtype.kind == "b" else "divide their sum"
        raise TypeError(f"op must be another one than {op} for {dtype}: {remedy}")


def flat_parts(parts: Sequence[np.ndarray], size: int, gpu: int | None = None) -> list[np.ndarray]:
    """Return the parts, one array per rank, as flat views."""
    if len(parts) != size:
        raise ValueError(f"parts must be {size} arrays, one per rank, got {len(parts)}")
    return [as_flat(x, writable=False, gpu=gpu) for x in parts]


def split(memory: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Cut a flat array into consecutive parts of these sizes, in elements."""
    if memory.size != sum(sizes):
        raise ValueError(f"into must be of {sum(sizes)} elements, the parts of all ranks, got {memory.size}")
    return [memory[end - n : end] for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def check_root(root: int, size: int) -> int:
    """Return ``root``; ValueError if it is no rank."""
    if not 0 <= root < size:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, got {root}")
    return root
