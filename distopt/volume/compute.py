"""What it takes to compress and to decompress, measured on this machine."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distopt.buckets import Buffer, Buffers, plan
from distopt.compress import At
from distopt.compress.compressor import decompress_all
from distopt.volume.forecast import Sending
from distopt.volume.modes import Mode

SHAPE = 2048, 4096  # of the gradient that is measured: 32 MiB, which with a memory beside it no cache holds
MANY = 9  # payloads, against one
TIMES = 4


class Compute(NamedTuple):
    """Seconds for each element, whatever is sent of it, and for each byte of a payload that is decompressed."""

    per_element: float = 0.0
    per_byte: float = 0.0

    def seconds(self, sending: Sending) -> float:
        """What a bucket takes, beside the wire."""
        return self.per_element * sending.elements + self.per_byte * sending.decompressed


FREE = Compute()


def measure(mode: Mode, clock: Callable[[], float] = time.perf_counter) -> Compute:
    """The fastest of some times, of normal gradients in float32, on one thread of this host.

    A GPU takes other times, and shorter ones.
    """
    compressor = mode.compressor
    if compressor.lossless:
        return FREE
    buffers = Buffers(plan(["x"], [SHAPE[0] * SHAPE[1]], ["float32"], 0), {"x": np.zeros(SHAPE, "f4")}, np.zeros)
    (buffer,) = buffers
    x = buffer.gradient
    at = At(0, 0, 2, buffer.gradients, buffer.scratch, buffer.constant)
    gradient = np.random.default_rng(0).standard_normal(x.size, np.float32)

    def compress() -> float:
        x[:] = gradient
        begin = clock()
        compressor.compress(x, buffer.state, at)
        return clock() - begin

    compressing = min(compress() for _ in range(TIMES))
    x[:] = gradient
    payload = compressor.compress(x, buffer.state, at).copy()
    if not payload.size:  # all of it is summed as it is
        return Compute(compressing / x.size)
    if compressor.summable:
        once = min(_timed(clock, lambda: compressor.decompress(payload, x, at)) for _ in range(TIMES))
        return Compute(compressing / x.size, once / payload.nbytes)
    return _gathered(clock, mode, buffer, payload, compressing, at)


def _gathered(
    clock: Callable[[], float], mode: Mode, buffer: Buffer, payload: np.ndarray, compressing: float, at: At
) -> Compute:
    """A pass over what is decompressed to is there once, whatever the number of payloads."""
    x, compressor = buffer.gradient, mode.compressor

    def decompress(payloads: int) -> float:
        given = [payload.copy() for _ in range(payloads)]
        return min(_timed(clock, lambda: decompress_all(compressor, given, x, at)) for _ in range(TIMES))

    one, many = decompress(1), decompress(MANY)
    per_byte = max(0.0, many - one) / ((MANY - 1) * max(1, payload.nbytes))
    return Compute((compressing + max(0.0, one - per_byte * payload.nbytes)) / x.size, per_byte)


def _timed(clock: Callable[[], float], call: Callable[[], None]) -> float:
    begin = clock()
    call()
    return clock() - begin
