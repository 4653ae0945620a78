"""Payloads that can be added on the wire: one all-reduce."""

import collections
from collections.abc import Iterable, Iterator

import numpy as np

from distopt.comm import Communicator
from distopt.compress import At, Compressor

Bucket = tuple[np.ndarray, dict[str, np.ndarray], At]


def reduce(x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At) -> None:
    """Replace x by the sum over ranks of what each rank's compressor took from it.

    What that leaves in x nobody reads, so that a compressor that can ``copy`` need not write it.
    """
    with comm.aside():
        payload = getattr(compressor, "copy", compressor.compress)(x, state, at)
        comm.all_reduce(payload)
        compressor.decompress(payload, x, at)


def reduce_each(buckets: Iterable[Bucket | None], compressor: Compressor, comm: Communicator) -> Iterator[np.ndarray]:
    """The same on the host, of one bucket after the other; while one travels, the next may be compressed.

    None among the buckets says that the next one will take a while.
    """
    sent: collections.deque[Bucket] = collections.deque()

    def payloads() -> Iterator[np.ndarray | None]:
        for bucket in buckets:
            if bucket is None:
                yield None
                continue
            sent.append(bucket)
            x, state, at = bucket
            with comm.on_behalf_of(at.purpose):
                yield getattr(compressor, "copy", compressor.compress)(x, state, at)

    for total in comm.all_reduce_each(payloads()):
        x, _, at = sent.popleft()
        compressor.decompress(total, x, at)
        yield x
