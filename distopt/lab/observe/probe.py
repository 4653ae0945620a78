"""Measure what is sent, and change nothing of it."""

from collections.abc import Callable, Sequence

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import layout_of
from distopt.compress.shards import Payload, Piece, ShardCodec
from distopt.compress.state import RESIDUAL, State
from distopt.compress.wrapper import CompressorWrapper
from distopt.device import DeviceMirror
from distopt.exchange import Algorithm
from distopt.exchange.all_reduce import TravellingBucket
from distopt.kernels.layout import BucketLayout
from distopt.lab.observe.quality import Quality
from distopt.lab.sequential import RunningSum


class Probe(CompressorWrapper):
    """A compressor for one bucket of one step, which tells ``quality`` what of each rank's gradient is sent.

    While it lives there is one more array of the bucket's size, and another one while a rank has its turn.
    """

    def __init__(self, compressor: Compressor, quality: Quality):
        super().__init__(compressor)
        self._quality = quality
        self._sum, self._turns = RunningSum(lambda nbytes: device.zeros(nbytes, np.uint8)), 0

    @property
    def dense(self) -> np.ndarray:
        """The sum of the gradients of the ranks that had their turn, as they came, ``(n,)``."""
        return self._sum.total

    def sketch(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray | None:
        sketch = self.compressor.sketch(x, state, context)
        if sketch is not None:  # other ranks have the memory of x until this one compresses
            self._add_gradient(x, context)
        return sketch

    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        layout, share = layout_of(x, context), self._quality.of_rank(context.rank)
        if context.sketch is None:
            self._add_gradient(x, context)
        payload = self.compressor.compress(x, state, context)
        spent = np.may_share_memory(payload, x)
        carried = x.copy() if spent else self._carried(payload, x, context)
        share.add_sent(layout, carried, left_behind(self.compressor, x, spent, state))
        return payload

    def uncompressed(self, layout: BucketLayout, context: ExchangeContext) -> DeviceMirror | None:
        return self.compressor.uncompressed(layout, context)

    def _add_gradient(self, x: np.ndarray, context: ExchangeContext) -> None:
        self._sum.add(x, first=not self._turns)
        self._turns += 1
        self._quality.of_rank(context.rank).add_gradient(layout_of(x, context), x)

    def _carried(self, payload: np.ndarray, x: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Return what a payload stands for, ``(n,)``; members that are summed as they are stand in x."""
        carried = device.zeros(x.size, x.dtype)
        layout = layout_of(x, context)
        mask = self.uncompressed(layout, context)
        summed = np.zeros(1, bool) if mask is None else mask.host != 0
        if self.traits.summable:
            self.decompress(payload, carried, context)
        elif not summed.all():
            self.decompress_all([payload], carried, context)
        for row in np.flatnonzero(summed).tolist():
            layout.view(carried, row)[...] = layout.view(x, row)
        return carried

    def compare(self, total: np.ndarray, context: ExchangeContext) -> None:
        """Compare the sum over ranks of what was sent, ``(n,)``, with that of the gradients."""
        self._quality.compare(layout_of(total, context), total, self.dense)


def left_behind(compressor: Compressor, x: np.ndarray, spent: bool, state: State) -> np.ndarray:
    """Return what has not left x, nothing if it is ``spent`` and was sent; NaN if only the compressor knows."""
    if not compressor.traits.stateful:
        return np.zeros_like(x) if spent else x
    return state[RESIDUAL] if RESIDUAL in state else np.full_like(x, np.nan)


class ObservedShards:
    """Tells ``quality`` what each rank sends in the first phase of an exchange in two."""

    def __init__(self, compressor: Compressor, quality: Quality):
        self._compressor, self._quality = compressor, quality
        self._dense: dict[BucketLayout, RunningSum] = {}  # of gradients as they came

    def before(self, bucket: TravellingBucket) -> None:
        """Add the gradient of a bucket."""
        x, _, context, _ = bucket
        layout = layout_of(x, context)
        first = layout not in self._dense
        running = self._dense.setdefault(layout, RunningSum(lambda nbytes: device.zeros(nbytes, np.uint8)))
        running.add(x, first)
        self._quality.of_rank(context.rank).add_gradient(layout, x)

    def after(
        self, bucket: TravellingBucket, codec: ShardCodec, pieces: Sequence[Piece], payloads: Sequence[Payload]
    ) -> None:
        """Add what is sent of it."""
        x, state, context, _ = bucket
        layout, carried = layout_of(x, context), device.zeros(x.size, x.dtype)
        if pieces:
            codec.decompress([payloads], [carried], [context], [pieces], summed=False)
        mask = self._compressor.uncompressed(layout, context)
        for row in np.flatnonzero([] if mask is None else mask.host).tolist():
            layout.view(carried, row)[...] = layout.view(x, row)
        self._quality.of_rank(context.rank).add_sent(layout, carried, left_behind(self._compressor, x, False, state))

    def compare(self, buckets: Sequence[TravellingBucket], add: Callable[[np.ndarray, MessageTag], None]) -> None:
        """Compare the sums of those buckets that took part with those of the gradients, which ``add`` adds up."""
        for x, _, context, tag in buckets:
            layout = layout_of(x, context)
            if layout in self._dense:
                dense = self._dense[layout].total
                add(dense, tag._replace(phase="quality"))
                self._quality.compare(layout, x, dense)


def observed(algorithm: Algorithm, quality: Quality) -> Algorithm:
    """Return the same algorithm with one more all-reduce after it, which tells what a dense step would have been."""

    def exchange(
        x: np.ndarray,
        compressor: Compressor,
        comm: Communicator,
        state: State,
        context: ExchangeContext,
        tag: MessageTag,
    ) -> None:
        probe = Probe(compressor, quality)
        algorithm(x, probe, comm, state, context, tag)
        with comm.tagged(tag._replace(phase="quality")):
            comm.all_reduce(probe.dense)
        probe.compare(x, context)

    return exchange
