"""Planes: the values and the indices of entries that were moved out of an array, values first."""

from typing import Any

import numpy as np

INDEX = 4  # bytes of an index


def payload_size(k: int, itemsize: int) -> int:
    """Return the bytes of k entries: a multiple of the value's, so that payloads behind each other are aligned."""
    return -(-int(k) * (itemsize + INDEX) // itemsize) * itemsize


def unpack_entries(payload: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes of indices and of values; values come first in a payload, so that both are aligned."""
    itemsize = np.dtype(dtype).itemsize
    k = payload.size // (itemsize + INDEX)
    return payload[k * itemsize : k * (itemsize + INDEX)].view(np.int32), payload[: k * itemsize].view(dtype)


def truncate(payload: np.ndarray, k: int, dtype: Any) -> np.ndarray:
    """Return the payload of the first k entries, in the same memory: the indices move down to the values."""
    index, entry = unpack_entries(payload, dtype)
    split = k * entry.itemsize
    payload[split : split + k * INDEX] = index[:k].view(np.uint8)
    return payload[: payload_size(k, entry.itemsize)]
