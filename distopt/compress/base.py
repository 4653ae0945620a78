"""The interface of compressors, and the context of their calls.

Law 1, for every compressor and every x: before == after + decompress(compress(before))          (conservation)

Numbers of laws and bugs are explained in docs/laws.md.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distopt import device
from distopt.device import DeviceMirror, Recorder
from distopt.kernels.layout import BucketLayout

T = TypeVar("T")
Make = Callable[[], np.ndarray]
State = dict[str, np.ndarray]  # by name, arrays of the bucket's size that outlive a step


def new_scratch(name: str, nbytes: int) -> np.ndarray:
    """Allocate scratch memory on the host, new at every call."""
    return np.empty(nbytes, np.uint8)


def new_constant(name: str, make: Make) -> DeviceMirror:
    """Make the numbers of a constant, anew at every call."""
    return DeviceMirror(make())


class BucketContext(NamedTuple):
    """A bucket as compressors see it; one can live as long as the bucket.

    Args:
        layout: where the members of the bucket's flat arrays lie: at multiples of 64 bytes; gaps between them are
            always zero.  None: the flat array is the only member.
        parameters: the values of the members, for a compressor that decays them.
        scratch: ``scratch(name, nbytes)`` is memory of so many bytes, ``(nbytes,)`` of uint8, for a call and its
            payload, the same at every step: fresh memory costs a page fault for every 4 KiB, which is more than it
            takes to fill them.
        constant: ``constant(name, make)`` are a few numbers that ``make()`` makes once, for kernels on the host or on a
            GPU.

    Example:
        >>> from distopt.kernels.layout import BucketLayout
        >>> layout = BucketLayout(["w", "b"], [(3, 5), (5,)], [0, 16], "float32")
        >>> context = ExchangeContext(bucket=BucketContext(layout))
        >>> context.layout.extent
        21
    """

    layout: BucketLayout | None = None
    parameters: BucketLayout | None = None
    scratch: Callable[[str, int], np.ndarray] = new_scratch
    constant: Callable[[str, Make], DeviceMirror] = new_constant


class DeviceContext(NamedTuple):
    """Memory by which kernels of a GPU take decisions that the host does not see; one can live as long as a step.

    Args:
        skip_flag: a number, ``(1,)``; a kernel that finds it other than 0 leaves all that outlives the step as it is.
            None on a host.
        capacity: entries that a payload whose length depends on the data has room for, the same on every rank.  None:
            as many as there are.
        wanted: where a kernel writes how many entries it would have liked to send, ``(1,)`` of int64.
        recorder: replays the launches of a ``recordable`` compressor; None where there is nothing to gain.

    Example:
        >>> context = ExchangeContext(device=DeviceContext(capacity=256))
        >>> context.capacity, context.skip_flag
        (256, None)
    """

    skip_flag: np.ndarray | None = None
    capacity: int | None = None
    wanted: np.ndarray | None = None
    recorder: Recorder | None = None


class ExchangeContext(NamedTuple):
    """A call of a compressor in a step; ``ExchangeContext()`` is one outside of a step.

    Args:
        step: updates applied so far.
        rank: of this process, or of the one whose turn it is.
        size: ranks.
        divisor: what makes a mean of a sum over ranks: all gradients in it, of which a rank that has joined brings
            none.
        num_gradients: gradients of which x is the sum.
        bucket: the layout, the parameters and the memory of the bucket.
        device: of a GPU.

    Example:
        >>> context = ExchangeContext(rank=1, size=4)
        >>> context.scratch("payload", 8).nbytes
        8
    """

    step: int = 0
    rank: int = 0
    size: int = 1
    divisor: float = 1.0
    num_gradients: int = 1
    bucket: BucketContext = BucketContext()
    device: DeviceContext = DeviceContext()

    @property
    def layout(self) -> BucketLayout | None:
        """``bucket.layout``."""
        return self.bucket.layout

    @property
    def parameters(self) -> BucketLayout | None:
        """``bucket.parameters``."""
        return self.bucket.parameters

    def repeat(self, name: str, work: Callable[[], T], arrays: Sequence[np.ndarray]) -> T:
        """Return ``work()``; on a GPU its launches, if they are those of the last steps, are replayed as a CUDA graph.

        Args:
            name: of the work among those of the bucket.
            work: calls a ``recordable`` compressor.
            arrays: all arrays that it reads or writes, but for the bucket's scratch memory and constants.
        """
        recorder = self.device.recorder
        return work() if recorder is None else recorder.run(name, work, arrays)

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        """Return memory of so many bytes, ``(nbytes,)`` of uint8, the same at every step."""
        return self.bucket.scratch(name, nbytes)

    def constant(self, name: str, make: Make) -> DeviceMirror:
        """Return numbers that ``make()`` makes once, on the host and on a GPU."""
        return self.bucket.constant(name, make)

    @property
    def skip_flag(self) -> np.ndarray | None:
        """``device.skip_flag``."""
        return self.device.skip_flag

    @property
    def capacity(self) -> int | None:
        """``device.capacity``."""
        return self.device.capacity

    @property
    def wanted(self) -> np.ndarray | None:
        """``device.wanted``."""
        return self.device.wanted


class Compressor(abc.ABC):
    """A rule of what to send of a gradient; ``distopt.exchange`` derives the collective from its properties.

    A subclass defines ``payload_bytes``, ``compress`` and ``decompress``, and sets the class attributes that are not
    False.  Compressors have no state of their own, and all ranks use equal ones.

    Attributes:
        summable: payloads of different ranks may be added on the wire, so that one all-reduce sums them up.
        ragged: lengths of payloads depend on the data, so that they may differ from rank to rank.
        lossless: nothing is ever left behind.
        stateful: ``compress`` changes what outlives the step.
        may_overflow: a sum of finite payloads may be infinite.
        bounded: on a GPU a ragged payload has room for a number of entries that all ranks know.
        corrects_momentum: the compressor has the momentum, and the optimizer must have none.
        has_hooks: ``begin`` or ``finish`` does something.
        changes_with_step: ``at_step`` returns another compressor at some steps.
        elementwise: each element is sent by itself, so that neighbouring buckets may travel as one array.
        recordable: on a GPU all calls with the same arrays enqueue the same launches, whatever the step is, as long as
            the compressor's ``repr`` is the same.

    Example:
        >>> import numpy as np
        >>> class Signs(Compressor):
        ...     summable = True
        ...
        ...     def payload_bytes(self, n, itemsize=4, layout=None):
        ...         return itemsize * n
        ...
        ...     def compress(self, x, state, context):
        ...         return np.sign(x)
        ...
        ...     def decompress(self, payload, out, context):
        ...         out[...] = payload
        >>> Signs().compress(np.array([3, -2, 0], np.float32), {}, ExchangeContext())
        array([ 1., -1.,  0.], dtype=float32)
    """

    summable: bool = False
    ragged: bool = False
    lossless: bool = False
    stateful: bool = False
    may_overflow: bool = False
    bounded: bool = False
    corrects_momentum: bool = False
    has_hooks: bool = False
    changes_with_step: bool = False
    elementwise: bool = False
    recordable: bool = False

    @abc.abstractmethod
    def payload_bytes(self, n: int, itemsize: int = 4, layout: BucketLayout | None = None) -> int | None:
        """Return the bytes of the payload of a flat array, None if they depend on the data.

        Args:
            n: elements of the array; gaps between its members count.
            itemsize: bytes of an element.
            layout: where its members lie, if it has several.

        Raises:
            ValueError: the array is too large.
        """

    @abc.abstractmethod
    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Move the part that is worth sending out of x, and leave the rest in x.

        Args:
            x: the gradients of a bucket, ``(n,)``, float32 or float64.
            state: arrays of x's size by name, as 'residual' and 'velocity', that DistOpt allocates, saves and moves.
            context: the step, the rank, and the bucket's memory.

        Returns:
            The payload, flat; it may be x itself, or memory of ``context.scratch``.
        """

    @abc.abstractmethod
    def decompress(self, payload: np.ndarray, out: np.ndarray, context: ExchangeContext) -> None:
        """Write a payload to ``out``: overwrite it if ``summable``, add to it if not.

        Args:
            payload: what ``compress`` returned on any rank, or the sum over ranks of that if ``summable``.
            out: ``(n,)``, float32 or float64.
            context: as of ``compress``.
        """

    def decompress_all(self, payloads: Sequence[np.ndarray], out: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite ``out`` by the sum of payloads that are not ``summable``, added in their order.

        Args:
            payloads: what ``compress`` returned, in the order of ranks.
            out: ``(n,)``, float32 or float64.
            context: as of ``compress``.
        """
        device.clear(out)
        for payload in payloads:
            self.decompress(payload, out, context)

    def compress_copy(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Return the payload of an x that is about to be overwritten, and so need not be changed.

        Args:
            x: as of ``compress``; afterwards it may be as it was, or what ``compress`` leaves.
            state: as of ``compress``.
            context: as of ``compress``.
        """
        return self.compress(x, state, context)

    def at_step(self, k: int) -> "Compressor":
        """Return the compressor that update k is made with; k is 0 for the first."""
        return self

    def begin(self, x: np.ndarray, state: State, context: ExchangeContext) -> None:  # noqa: B027  most do nothing
        """Prepare a bucket before it is compressed.

        Args:
            x: as of ``compress``.
            state: as of ``compress``.
            context: as of ``compress``.
        """

    def finish(self, total: np.ndarray, state: State, context: ExchangeContext) -> None:  # noqa: B027  as begin
        """Add to the sum over ranks, before it is divided by ``context.divisor``.

        Args:
            total: the sum, ``(n,)``, float32 or float64, which may be changed.
            state: as of ``compress``.
            context: as of ``compress``.
        """

    def uncompressed(self, layout: BucketLayout, context: ExchangeContext) -> DeviceMirror | None:
        """Return which members stay in x, to be summed as they are: a number each, 1 for those; None: no member does.

        All ranks must return the same.
        """
        return None

    def __repr__(self) -> str:
        """Return the class and its public attributes, as a text that is the same on all ranks, which compare it.

        A subclass whose attributes do not tell all that it does, or have no such text, defines its own.

        Example:
            >>> from distopt.compress import Dense
            >>> class Scaled(Dense):
            ...     __repr__ = Compressor.__repr__
            ...
            ...     def __init__(self, factor):
            ...         self.factor = factor
            >>> Scaled(0.5)
            Scaled(factor=0.5)
        """
        shown = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(shown)})"

    def count_selected(self, x: np.ndarray, counts: np.ndarray) -> None:
        """Add to ``counts[0]``, an int64, how many entries of x a ``bounded`` compressor would send: by default all."""
        counts += x.size


class Lossy(Compressor):
    """A compressor that leaves something behind, and so can have a memory (``ErrorFeedback``)."""

    @abc.abstractmethod
    def compress(
        self, x: np.ndarray, state: State, context: ExchangeContext, add: np.ndarray | None = None
    ) -> np.ndarray:
        """Move the part that is worth sending out of x + ``add``, and leave the rest in x.

        Args:
            x: the memory, or the gradient of a compressor without one, ``(n,)``.
            state: as of any compressor.
            context: as of any compressor.
            add: the new gradient, ``(n,)``, which is added to x in the same pass.
        """


def check_compressor(compressor: Any) -> None:
    """Raise TypeError for an object that is no ``Compressor``."""
    if not isinstance(compressor, Compressor):
        raise TypeError(f"compressor must derive from distopt.compress.Compressor, got {compressor!r:.60}")


def layout_of(x: np.ndarray, context: ExchangeContext) -> BucketLayout:
    """Return the layout of x: that of its bucket, or of one member outside of a bucket."""
    return context.layout or BucketLayout(["x"], [x.shape], [0], x.dtype)


def sizes_of(n: int, layout: BucketLayout | None) -> np.ndarray:
    """Return the sizes of the members of a flat array of n elements, ``(members,)``; without a layout it is the one."""
    return np.array([n], np.int64) if layout is None else layout.records["size"].astype(np.int64)


def per_payload(name: str, numbers: list[int], context: ExchangeContext) -> DeviceMirror:
    """Return an array for a kernel with a number for each payload, kept from step to step.

    Args:
        name: of the array among the bucket's constants.
        numbers: one for each payload, which become int64.
        context: the call of the compressor.
    """
    mirror = context.constant(f"{name} of {len(numbers)}", functools.partial(np.zeros, len(numbers), np.int64))
    mirror.host[:] = numbers
    return mirror


def check_fits(x: np.ndarray, add: np.ndarray) -> None:
    """Raise ValueError for a gradient that is not of its memory's size."""
    if add.size != x.size:
        raise ValueError(f"a gradient must be of {x.size} elements, as its memory, got {add.size}")


def state_array(state: State, name: str, x: np.ndarray) -> np.ndarray:
    """Return an array of a compressor's state, of x's size and dtype, zeros at first.

    Args:
        state: arrays by name, to which it is added if it is not there.
        name: of the array.
        x: the gradients of a bucket, ``(n,)``.
    """
    if name not in state:
        state[name] = device.persistent_zeros(x.size, x.dtype, x)
    return state[name]
