"""The context of a call of a compressor, and what compressors ask of it."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from distopt import kernels
from distopt.device import DeviceMirror, Recorder
from distopt.kernels.layout import BucketLayout

T = TypeVar("T")
Make = Callable[[], np.ndarray]


def new_scratch(name: str, nbytes: int) -> np.ndarray:
    """Allocate scratch memory on the host, new at every call."""
    return np.empty(nbytes, np.uint8)


def new_constant(name: str, make: Make) -> DeviceMirror:
    """Make the numbers of a constant, anew at every call."""
    return DeviceMirror(make())


class BucketContext(NamedTuple):
    """A bucket as compressors see it; one can live as long as the bucket.

    Attributes:
        layout: where the members of the bucket's flat arrays lie: at multiples of 64 bytes; gaps between them are
            always zero.  None: the flat array is the only member.
        parameters: the values of the members, for a compressor that decays them.
        scratch: ``scratch(name, nbytes)`` is memory of so many bytes, ``(nbytes,)`` of uint8, for a call and its
            payload, the same at every step: fresh memory costs a page fault for every 4 KiB, which is more than it
            takes to fill them.
        constant: ``constant(name, make)`` are a few numbers that ``make()`` makes once, for kernels on the host or on a
            GPU.
        number: the number of the bucket in the plan.
        payload_bytes: how long its payload must be; None if that depends on the data, or outside of a plan.

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
    number: int = 0
    payload_bytes: int | None = None


class DeviceContext(NamedTuple):
    """Memory by which kernels of a GPU take decisions that the host does not see; one can live as long as a step.

    Attributes:
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


class Senders(NamedTuple):
    """The ranks over which the mean of an entry is, if they have sent it.

    Attributes:
        brought: how many ranks bring gradients; the sum over ranks becomes so many means.
        joined: those that bring none, and may still send of their residuals: what they send counts unless it is 0.
    """

    brought: int
    joined: frozenset[int] = frozenset()


class ExchangeContext(NamedTuple):
    """A call of a compressor in a step; ``ExchangeContext()`` is one outside of a step.

    Attributes:
        step: updates applied so far.
        rank: of this process, or of the one whose turn it is.
        size: ranks.
        divisor: what makes a mean of a sum over ranks: all gradients in it, of which a rank that has joined brings
            none.
        num_gradients: gradients of which x is the sum.
        bucket: the layout, the parameters and the memory of the bucket.
        device: of a GPU.
        senders: for sums that become, once divided, means over the ranks that have sent an entry; None for sums.
        sketch: the sum over ranks of what ``Compressor.sketch`` has returned; None before, or if that is nothing.

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
    senders: Senders | None = None
    sketch: np.ndarray | None = None

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


def layout_of(x: np.ndarray, context: ExchangeContext) -> BucketLayout:
    """Return the layout of x: that of its bucket, or of one member outside of a bucket."""
    return context.bucket.layout or BucketLayout(["x"], [x.shape], [0], x.dtype)


def sizes_of(n: int, layout: BucketLayout | None) -> np.ndarray:
    """Return the sizes of the members of a flat array of n elements, ``(members,)``; without a layout it is the one."""
    return np.array([n], np.int64) if layout is None else layout.records["size"].astype(np.int64)


def per_payload(name: str, numbers: list[int], context: ExchangeContext) -> DeviceMirror:
    """Return an array for a kernel with a number for each payload, kept from step to step."""
    mirror = context.bucket.constant(f"{name} of {len(numbers)}", functools.partial(np.zeros, len(numbers), np.int64))
    mirror.host[:] = numbers
    return mirror


def check_fits(x: np.ndarray, add: np.ndarray) -> None:
    """Raise ValueError for a gradient that is not of its memory's size."""
    if add.size != x.size:
        raise ValueError(f"a gradient must be of {x.size} elements, as its memory, got {add.size}")


def decayed(memory: np.ndarray, decay: float, context: ExchangeContext) -> np.ndarray:
    """Multiply a memory by how much of it outlives a step, unless the step is refused, and return it."""
    if decay != 1:
        kernels.scale(memory, decay, context.skip_flag)
    return memory
