"""The compute cost of compressing and decompressing, measured on this machine."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distopt.buckets import BucketSet, plan
from distopt.compress import BucketContext, ExchangeContext
from distopt.compress.base import sketched
from distopt.lab.forecast import Sending
from distopt.lab.modes import Mode

SHAPE = 2048, 4096  # of the measured gradient: 32 MiB, which with a residual exceeds any cache
PAYLOADS = 9  # gathered payloads, compared with one
TIMES = 4


class Compute(NamedTuple):
    """The compute cost of a mode, as a linear model.

    Attributes:
        per_element: seconds for each element of a bucket, however much of it is sent.
        per_byte: seconds for each byte of a payload that is decompressed.

    Example:
        >>> from distopt.lab import Compute, buckets, mode, sendings
        >>> (sending,) = sendings(buckets([("weight", (1000, 1000))]), mode("half"), 8)
        >>> round(Compute(per_element=1e-9, per_byte=1e-10).seconds(sending), 6)
        0.0012
    """

    per_element: float = 0.0
    per_byte: float = 0.0

    def seconds(self, sending: Sending) -> float:
        """Return the seconds that one bucket takes beside its time on the wire."""
        return self.per_element * sending.elements + self.per_byte * sending.decompressed


FREE = Compute()


def measure(mode: Mode, clock: Callable[[], float] = time.perf_counter) -> Compute:
    """Measure the compute cost of a mode on one thread of this host.

    The gradient is 2048 x 4096 float32 numbers from a normal distribution; of several calls the fastest counts.  A GPU
    takes other, shorter times.

    Args:
        mode: the mode; lossless ones cost nothing.
        clock: returns seconds.

    Example:
        >>> from distopt.lab import measure, mode
        >>> measure(mode("dense"))
        Compute(per_element=0.0, per_byte=0.0)
    """
    compressor = mode.compressor
    if compressor.traits.lossless:
        return FREE
    buckets = BucketSet(plan(["x"], [SHAPE[0] * SHAPE[1]], ["float32"], 0), {"x": np.zeros(SHAPE, "f4")}, np.zeros)
    (bucket,) = buckets
    x = bucket.gradient
    bucket_context = BucketContext(bucket.gradients, scratch=bucket.scratch, constant=bucket.constant)
    context = ExchangeContext(size=2, bucket=bucket_context)
    gradient = np.random.default_rng(0).standard_normal(x.size, np.float32)

    def compress() -> float:
        x[:] = gradient
        begin = clock()
        compressor.compress(x, bucket.state, sketched(compressor, x, bucket.state, context))
        return clock() - begin

    compressing = min(compress() for _ in range(TIMES))
    x[:] = gradient
    context = sketched(compressor, x, bucket.state, context)
    payload = compressor.compress(x, bucket.state, context).copy()
    if not payload.size:  # nothing is compressed: all of it is summed as it is
        return Compute(compressing / x.size)
    if compressor.traits.summable:
        once = min(_timed(clock, lambda: compressor.decompress(payload, x, context)) for _ in range(TIMES))
        return Compute(compressing / x.size, once / payload.nbytes)

    # the pass over the decompressed array happens once, whatever the number of payloads, and so counts per element
    def decompress(payloads: int) -> float:
        copies = [payload.copy() for _ in range(payloads)]
        return min(_timed(clock, lambda: compressor.decompress_all(copies, x, context)) for _ in range(TIMES))

    seconds_of_one, seconds_of_many = decompress(1), decompress(PAYLOADS)
    per_byte = max(0.0, seconds_of_many - seconds_of_one) / ((PAYLOADS - 1) * max(1, payload.nbytes))
    return Compute((compressing + max(0.0, seconds_of_one - per_byte * payload.nbytes)) / x.size, per_byte)


def _timed(clock: Callable[[], float], call: Callable[[], None]) -> float:
    begin = clock()
    call()
    return clock() - begin
