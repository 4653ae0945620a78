"""Planes: the values and the indices of entries that were moved out of an array, values first."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import device, kernels
from distopt.compress.context import ExchangeContext, per_payload
from distopt.kernels.layout import BucketLayout

INDEX = 4  # bytes of an index


def payload_size(k: int, itemsize: int) -> int:
    """Return the bytes of k entries: a multiple of the value's, so that payloads one after the other are aligned."""
    return -(-int(k) * (itemsize + INDEX) // itemsize) * itemsize


def unpack_entries(payload: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes of indices and of values; values come first in a payload, so that both are aligned."""
    itemsize = np.dtype(dtype).itemsize
    k = payload.size // (itemsize + INDEX)
    return payload[k * itemsize : k * (itemsize + INDEX)].view(np.int32), payload[: k * itemsize].view(dtype)


def plane_addresses(payload: np.ndarray, itemsize: int) -> tuple[int, int, int]:
    """Return where the planes of indices and of values begin in memory, and how many entries they have."""
    k, start = payload.size // (itemsize + INDEX), device.address(payload)
    return start + k * itemsize, start, k


def truncate(payload: np.ndarray, k: int, dtype: Any) -> np.ndarray:
    """Return the payload of the first k entries, in the same memory: the indices move down to the values."""
    index, entry = unpack_entries(payload, dtype)
    split = k * entry.itemsize
    payload[split : split + k * INDEX] = index[:k].view(np.uint8)
    return payload[: payload_size(k, entry.itemsize)]


def add_planes(planes: Sequence[tuple[np.ndarray, np.ndarray]], out: np.ndarray, context: ExchangeContext) -> None:
    """Overwrite ``out`` by the sum of entries: in one launch on a GPU, those of one after the other on the host.

    With ``context.senders`` it is the mean over those that have an entry, times the ranks that bring gradients.
    """
    if not device.on_gpu(out):
        device.clear(out)
        for index, entry in planes:
            kernels.decode_sparse(out, index, entry)
        if context.senders is None:
            return
    indices = per_payload("indices", [device.address(index) for index, _ in planes], context)
    entries = per_payload("entries", [device.address(entry) for _, entry in planes], context)
    lengths = per_payload("lengths", [index.size for index, _ in planes], context)
    if device.on_gpu(out):
        kernels.decode_all(out, indices, entries, lengths)
    if context.senders is not None:
        brought, joined = context.senders
        zeros = per_payload("zeros", [rank not in joined for rank in range(len(planes))], context)
        kernels.divide_by_senders(out, indices, entries, lengths, zeros, brought)


@functools.lru_cache(1024)
def combination_bits(n: int, k: int) -> int:
    """Return the bits that tell which k of n: the logarithm of the binomial coefficient."""
    return round((math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2))


def counts_by_member(index: np.ndarray, layout: BucketLayout) -> np.ndarray:
    """Count how many of these indices, on the host, belong to each member; they ascend, and none is in a gap."""
    starts = layout.records["offset"].astype(index.dtype)
    return np.diff(np.searchsorted(index, starts), append=index.size)
