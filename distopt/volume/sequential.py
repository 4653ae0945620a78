"""The exchange of ranks that take turns in one process: their payloads are added up in rank order."""

from collections.abc import Callable

import numpy as np

from distopt import device, kernels
from distopt.comm.communicator import BFLOAT16, HALVES
from distopt.comm.message import LazyBreakdown, MessageTag, PayloadBreakdown
from distopt.comm.meter import Meter
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.base import State, layout_of
from distopt.exchange.breakdown import payload_breakdown
from distopt.exchange.mixed import UncompressedMembers
from distopt.exchange.traffic import traffic


class RunningSum:
    """Sum of flat arrays in their order, ((x0 + x1) + x2) + ...; 16-bit numbers are added in float32, rounded once.

    Args:
        alloc: returns memory of so many bytes for the sum.

    Example:
        >>> import numpy as np
        >>> running, x = RunningSum(lambda nbytes: np.empty(nbytes, np.uint8)), np.ones(2, np.float32)
        >>> running.add(x, first=True)
        >>> running.add(2 * x, first=False)
        >>> running.total
        array([3., 3.], dtype=float32)
    """

    def __init__(self, alloc: Callable[[int], np.ndarray]):
        self._alloc, self.total = alloc, np.empty(0)

    def add(self, x: np.ndarray, first: bool) -> None:
        """Add the next rank's array, or begin with the first one's."""
        half = x.dtype in HALVES
        if first:
            dtype = np.dtype(np.float32) if half else x.dtype
            self.total = self._alloc(x.size * dtype.itemsize).view(dtype)
        if half:
            kind, verb = "bfloat16" if x.dtype == BFLOAT16 else "half", "from" if first else "add"
            getattr(kernels, f"{verb}_{kind}")(x, self.total)
        elif first:
            device.copy(self.total, x)
        else:
            kernels.accumulate(x, self.total)

    def write_sum(self, x: np.ndarray) -> None:
        """Overwrite x, of the dtype of what was added, by the sum."""
        if x.dtype in HALVES:
            getattr(kernels, "to_bfloat16" if x.dtype == BFLOAT16 else "to_half")(self.total, x)
        else:
            device.copy(x, self.total)


class SequentialReduce:
    """Exchange of one bucket in one step: ``add`` what each rank sends, in rank order, then ``write_sum``.

    Args:
        compressor: what is sent of the bucket.
        scratch: memory of the bucket, by name and bytes.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> memory = {}
        >>> scratch = lambda name, nbytes: memory.setdefault(name, np.empty(nbytes, np.uint8))
        >>> turns = SequentialReduce(TopK(0.5), scratch)
        >>> for rank, x in enumerate(np.array([[1, 2], [-3, 0]], np.float32)):
        ...     turns.add(x, {}, ExchangeContext(rank=rank, size=2))
        >>> turns.write_sum(x, ExchangeContext(size=2))
        >>> x
        array([-3.,  2.], dtype=float32)
    """

    def __init__(self, compressor: Compressor, scratch: Callable[[str, int], np.ndarray]):
        self._compressor, self._scratch = compressor, scratch
        self._sum = RunningSum(lambda nbytes: scratch("sum over ranks", nbytes))
        self._sizes: list[int] = []  # of each rank's payload
        self._breakdown: LazyBreakdown = lambda: PayloadBreakdown(0)  # of the first one's
        self._summed: np.ndarray | None = None  # what the last rank brought to be summed
        self._uncompressed: UncompressedMembers | None = None

    def add(self, x: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Add the bucket of one rank, and change what the compressor keeps of it.

        Args:
            x: the rank's bucket, ``(n,)``.
            state: what the compressor keeps of this rank.
            context: the place of the exchange; ``context.rank`` is the rank.
        """
        compressor, first = self._compressor, not self._sizes
        payload = compressor.compress(x, state, context)
        self._sizes.append(payload.nbytes)
        if compressor.summable:
            self._summed = payload
        elif (mask := compressor.uncompressed(layout_of(x, context), context)) is not None:
            self._uncompressed = UncompressedMembers(x, mask, context)
            self._summed = None if self._uncompressed.none else self._uncompressed.flat
        if self._summed is not None:
            self._sum.add(self._summed, first)
        if self._gathers:
            total = self._entries(x)
            if first:
                device.clear(total)
                self._breakdown = payload_breakdown(compressor, payload, x, context)
            compressor.decompress(payload, total, context)

    def write_sum(self, x: np.ndarray, context: ExchangeContext) -> None:
        """Overwrite x, the last rank's bucket, by the sum."""
        if self._summed is not None:
            self._sum.write_sum(self._summed)
        if self._compressor.summable:
            assert self._summed is not None
            self._compressor.decompress(self._summed, x, context)
        if self._gathers:
            device.copy(x, self._entries(x))
        if self._gathers and self._uncompressed and not self._uncompressed.none:
            self._uncompressed.put_back()

    def write_messages(self, meter: Meter, x: np.ndarray, tag: MessageTag, break_even: bool) -> None:
        """Write the messages by which ranks would have exchanged this bucket into a ledger."""
        uncompressed = self._uncompressed
        elements = uncompressed.flat.size if uncompressed and not uncompressed.none else None
        for message in traffic(self._compressor, x.size, x.itemsize, self._sizes, elements, break_even):
            members = uncompressed.members if uncompressed and message.uncompressed else tag.members
            with meter.tagged(tag._replace(members=members)):
                message.write(meter, self._breakdown)

    @property
    def _gathers(self) -> bool:
        return not self._compressor.summable and not (self._uncompressed and self._uncompressed.all)

    def _entries(self, x: np.ndarray) -> np.ndarray:
        return self._scratch("sum of entries", x.nbytes).view(x.dtype)
