"""A tree of values and arrays in one file that any safetensors tool can read; nobody need trust such a file.

It is whole, to the last bit, or it is refused, before anything is allocated for it or, where the data are damaged,
before anything of it is returned.  Nothing in it is executed.
"""

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from distopt import files
from distopt.checkpoint import foreign, head
from distopt.checkpoint.error import CheckpointError, Misfit
from distopt.checkpoint.head import Header, Tensor
from distopt.checkpoint.pending import Pending
from distopt.checkpoint.tree import place, put_together, take_apart

CHUNK = 1 << 20  # bytes, written while the cache still has what was summed up

Path = str | os.PathLike[str]


def write(path: Path, tree: Any, about: dict[str, Any]) -> None:
    """``prepare`` and commit."""
    prepare(path, tree, about).commit()


def prepare(path: Path, tree: Any, about: dict[str, Any]) -> Pending:
    """Write a tree beside ``path`` and onto the disk; its ``commit()`` gives it the name, its ``discard()`` removes it.

    A tree is made of dict with str or int as keys, list, tuple, named tuple, str, bytes, int, float, bool, None, and
    numpy's arrays and scalars: bool, integers, float16, bfloat16, float32, float64, of any shape, in native byte order.
    Torch's tensors come back as tensors on the CPU, as arrays in a process that has not imported torch; jax's arrays
    as numpy's; a named tuple as one with the same name and fields; an OrderedDict as a dict.  ``about`` is a dict of
    the same, without arrays.  Returns what has ``nbytes``, of the file, and ``digest``, 32 hex digits that
    stand for all of it and that ``header`` finds without reading it all.

    Raises before anything is written: TypeError, which names the place in the tree, for anything else;
    CheckpointError for what is too much: 8 MB of text, 64 levels, one value for every 10 letters and 100,000 beyond.
    Raises OSError; the temporary file is removed, and ``path`` is as it was.
    """
    arrays: dict[str, np.ndarray] = {}
    with _naming(path):
        texts = _without_arrays(about), take_apart(tree, arrays)
        tensors = head.arrange(arrays)
        start = _check(head.encode(*texts, tensors), tensors)
    pending = Pending(path)
    try:
        summed = [t._replace(crc32=_write(pending, arrays[t.name], start + t.begin)) for t in tensors]
        text = head.encode(*texts, summed)
        pending.write(text, 0)
        pending.finish(head.seal(text))
    except BaseException:
        pending.discard()
        raise
    return pending


def read(path: Path) -> tuple[Any, dict[str, Any]]:
    """The tree and ``about`` of a file; arrays are new.

    Raises CheckpointError for a file that is not whole or not one of ours; OSError for one that cannot be read.
    """
    with _opened(path) as file:
        found = _header(file)
        tensors = {t.name: t for t in found.tensors}

        def leaf(word: str, at: str) -> Any:
            x = _read(file, found.start, tensors[at])
            return x[()] if word == "scalar" else foreign.tensor(x) if word == "tensor" else x

        return put_together(found.plain, leaf), found.about


def header(path: Path) -> Header:
    """What a file says about itself; its data are not read, and raises as ``read``."""
    with _opened(path) as file:
        return _header(file)


def check(path: Path) -> Iterator[tuple[Tensor, bool]]:
    """Each tensor, and whether its data are what was written; in a buffer of 1 MB, and raises as ``read``."""
    buffer = memoryview(bytearray(CHUNK))
    with _opened(path) as file:
        found = _header(file)
        for tensor in found.tensors:
            chunks = (buffer[: min(CHUNK, tensor.nbytes - k)] for k in range(0, tensor.nbytes, CHUNK))
            yield tensor, _fill(file, found.start + tensor.begin, chunks) == tensor.crc32


def _without_arrays(about: dict[str, Any]) -> Any:
    arrays: dict[str, np.ndarray] = {}
    plain = take_apart(about, arrays, "about")
    if arrays or type(about) is not dict:
        raise TypeError(f"{next(iter(arrays), 'about')}: about must be a dict without numpy's arrays and scalars")
    return plain


def _check(text: bytes, tensors: list[Tensor]) -> int:
    """The length of a head that can be read again."""
    if len(text) > head.LONGEST:
        reason = f"takes {len(text)} bytes, more than {head.LONGEST}; put what is large into arrays"
        raise Misfit("header", reason, head.LONGEST / len(text))
    head.decode(text, len(text) + max((t.end for t in tensors), default=0))
    return len(text)


def _write(pending: Pending, x: np.ndarray, at: int) -> int:
    """Write an array's bytes; returns their CRC."""
    crc32 = 0
    for chunk in _chunks(np.ascontiguousarray(x)):
        crc32 = zlib.crc32(chunk, crc32)
        pending.write(chunk, at)
        at += len(chunk)
    return crc32


def _read(file: int, start: int, tensor: Tensor) -> np.ndarray:
    try:
        x = np.empty(tensor.shape, tensor.dtype)
    except (MemoryError, ValueError) as error:
        raise Misfit(place(tensor.name), f"cannot be allocated: {error}") from None
    if _fill(file, start + tensor.begin, _chunks(x)) != tensor.crc32:
        raise Misfit(place(tensor.name), "is damaged: its checksum differs")
    return x


def _chunks(x: np.ndarray) -> Iterator[memoryview]:
    """The bytes of a contiguous array."""
    data = x.reshape(-1).view(np.uint8).data
    return (data[k : k + CHUNK] for k in range(0, len(data), CHUNK))


def _fill(file: int, at: int, chunks: Iterable[memoryview]) -> int:
    """Read into one chunk after the other; returns the CRC of all."""
    crc32 = 0
    for chunk in chunks:
        _fill_one(file, at, chunk)
        at += len(chunk)
        crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _fill_one(file: int, at: int, chunk: memoryview) -> None:
    while chunk:
        count = os.preadv(file, [chunk], at)
        if not count:
            raise Misfit("data", f"ends at byte {at}")
        chunk, at = chunk[count:], at + count


def _header(file: int) -> Header:
    nbytes = os.fstat(file).st_size
    if nbytes < 8:
        raise Misfit("header", f"ends at byte {nbytes}")
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > min(head.LONGEST, nbytes - 8):
        raise Misfit("header", f"would be {length} bytes of {nbytes}, and must be at most {head.LONGEST}")
    text = bytearray(8 + length)
    _fill_one(file, 0, memoryview(text))
    return head.decode(text, nbytes)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a file, whose faults are named."""
    try:
        with files.opened(path) as file, _naming(path):
            yield file
    except files.NotRegularError:
        raise CheckpointError(path, "file", "is not a regular file") from None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Misfit as error:
        raise CheckpointError(path, error.field, error.reason, error.fits) from None
