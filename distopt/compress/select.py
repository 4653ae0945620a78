"""Selection of entries: one call of a kernel on the host, a fixed sequence of launches on a GPU.

A GPU never returns to the host in between, so everything that depends on the data stays in memory that the caller
gives: ``state`` (int64) and candidates (int32, and the dtype of x), whose sizes follow from ``parts_table``.
"""

from typing import Any

import numpy as np

from distopt import kernels
from distopt.device import on_gpu
from distopt.kernels.layout import CHUNK, BucketLayout

LINE, LINES = 16, 1024  # of topk_device.cu: neighbours that are sampled together, and so many of them at most
CELLS = 8  # numbers that describe a part


def digits(dtype: Any) -> int:
    """Return the digits of a magnitude of a dtype: a launch sorts by one, of 8 bits."""
    return int(np.dtype(dtype).itemsize)


def parts_table(offsets: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``struct Part`` of topk_device.cu for parts of x, in ascending order, flat: ``(CELLS * parts,)`` of int64.

    The guess is a rank in the sample that all but one in some thousand samples reach with ``counts`` entries; there is
    room for what lies above it in all but a few samples.  Where many are taken none are guessed.
    """
    sizes, counts = np.asarray(sizes, np.int64), np.asarray(counts, np.int64)
    sample = np.minimum(sizes // LINE, LINES) * LINE
    expected = counts * sample / np.maximum(sizes, 1)
    rank = np.where(counts > 0, expected + 3 * (np.sqrt(expected) + 1), 0).astype(np.int64)
    rank[4 * rank > sample] = 0
    share = (rank + 6 * np.sqrt(rank) + 4) / np.maximum(sample, 1)
    capacity = np.where(rank > 0, np.minimum(np.ceil(share * sizes), sizes), 0).astype(np.int64)
    tiles = -(-sizes // CHUNK)
    first, place, held = (np.cumsum(a) - a for a in (tiles, counts, capacity))
    return np.stack([np.asarray(offsets, np.int64), sizes, counts, first, place, held, capacity, rank], 1).reshape(-1)


def candidates(table: np.ndarray) -> int:
    """Return for how many candidates ``select_largest`` needs memory."""
    return int(table.reshape(-1, CELLS)[:, 6].sum())


def largest_words(table: np.ndarray, dtype: Any) -> int:
    """Return the 8-byte words of the state of ``select_largest``."""
    parts = table.reshape(-1, CELLS)
    tiles = int((-(-parts[:, 1] // CHUNK)).sum())
    return 8 + len(parts) * (2 + 128 * digits(dtype)) + 2 * tiles


def above_words(n: int) -> int:
    """Return the 8-byte words of the state of ``select_above`` on n elements."""
    return 8 + -(-n // CHUNK)


def select_above(
    x: Any, add: Any, index: Any, entry: Any, place: Any, bound: int, state: Any = None, skip_flag: Any = None
) -> None:
    """Set x to x + add, and move entries whose magnitude is above ``bound`` out of x, in the order of their indices.

    ``place[0]`` becomes how much of x was looked at, ``place[1]`` how many were found.  A device looks at all of x;
    what there is no room for stays in x, and unused places of the planes get index -1 and entry 0: 2 launches.  The
    host stops where its room ends, and a further call goes on from there (``topk_host.cu``).
    """
    if not on_gpu(x):
        kernels.encode_above(x, add, index, entry, place, bound, skip_flag)
        return
    kernels.blank(index, entry, state)
    kernels.sift_above(x, add, index, entry, place, state, bound, skip_flag)


def select_largest(
    members: BucketLayout,
    x: Any,
    add: Any,
    table: Any,
    index: Any,
    entry: Any,
    state: Any,
    held_index: Any,
    held: Any,
    skip_flag: Any = None,
) -> None:
    """Set x to x + add, and move the largest entries of each part of ``table`` out of x: 9 launches, 13 for float64.

    This is for GPUs; on the host it is ``kernels.encode_largest``.
    """
    parts = table.size // CELLS
    guessed = (table, state, held_index, held)
    kernels.blank(index, entry, state)
    kernels.guess_bounds(x, add, table, state, parts, skip_flag)
    kernels.sift_parts(x, add, *guessed, parts, skip_flag)
    kernels.put_back(x, *guessed, parts, skip_flag)
    for digit in range(digits(x.dtype)):
        kernels.count_digits(x, table, state, held, parts, digit, skip_flag)
    kernels.deliver(x, members.edges, *guessed, index, entry, parts, skip_flag)
