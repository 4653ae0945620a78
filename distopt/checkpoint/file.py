"""Checkpoint files: a tree of values and arrays in one file that any safetensors tool can read.

A file need not be trusted: it is whole, to the last bit, or it is refused, before anything is allocated for it or,
where the data are damaged, before anything of it is returned.  Nothing in it is executed.
"""

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from distopt.checkpoint import foreign, head
from distopt.checkpoint.error import DAMAGED, REMEDY, CheckpointError, Misfit
from distopt.checkpoint.head import Header, Tensor
from distopt.checkpoint.tree import json_pointer, put_together, take_apart
from distopt.io import files
from distopt.io.pending import Pending

# bytes, written while the cache still has what was summed up
CHUNK = 1 << 20

Path = str | os.PathLike[str]


def write(path: Path, tree: Any, about: dict[str, Any]) -> None:
    """Write a tree to a file, which is there whole or not at all: ``prepare`` and commit."""
    prepare(path, tree, about).commit()


def prepare(path: Path, tree: Any, about: dict[str, Any]) -> Pending:
    """Write a tree beside ``path`` and onto the disk, under a temporary name, which ``commit()`` of the result changes.

    A tree is made of dict with str or int as keys, list, tuple, named tuple, str, bytes, int, float, bool, None, and
    numpy's arrays and scalars: bool, integers, float16, bfloat16, float32, float64, of any shape, in native byte order.
    Torch's tensors come back as tensors on the CPU, as arrays in a process that has not imported torch; jax's arrays as
    numpy's; a named tuple as one with the same name and fields; an OrderedDict as a dict.
    """
    # Nothing has been written where an error is raised before there is a `Pending`.
    arrays, in_about = dict[str, np.ndarray](), dict[str, np.ndarray]()
    with _naming(path):
        described = take_apart(about, in_about, "about")
        if in_about or type(about) is not dict:
            raise TypeError(f"{next(iter(in_about), 'about')}: about must be a dict without numpy's arrays and scalars")
        texts = described, take_apart(tree, arrays)
        tensors = head.arrange(arrays)
        text = head.encode(*texts, tensors)
        start = len(text)
        if start > head.MAX_HEAD_BYTES:
            reason = f"must be at most {head.MAX_HEAD_BYTES} bytes, got {start}; put what is large into arrays"
            raise Misfit("header", reason, head.MAX_HEAD_BYTES / start)
        # It must be possible to read it again.
        head.decode(text, start + max((t.end for t in tensors), default=0))
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
    """Return the tree of a file, whose arrays are new, and ``about``; every tensor's checksum is verified."""
    with _opened(path) as file:
        contents = _header(file)
        tensors = {t.name: t for t in contents.tensors}

        def leaf(word: str, at: str) -> Any:
            tensor = tensors[at]
            try:
                array = np.empty(tensor.shape, tensor.dtype)
            except (MemoryError, ValueError) as error:
                got = f"got {tensor.nbytes} bytes: {error}"
                raise Misfit(json_pointer(at), f"must fit into memory, {got}") from None
            if _fill(file, contents.start + tensor.begin, _chunks(array)) != tensor.crc32:
                raise Misfit(json_pointer(at), DAMAGED)
            return array[()] if word == "scalar" else foreign.tensor(array) if word == "tensor" else array

        return put_together(contents.plain, leaf), contents.about


def header(path: Path) -> Header:
    """Read what a file says about itself, and not its data."""
    with _opened(path) as file:
        return _header(file)


def check(path: Path) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor of a file, and whether its data are those that were written; the buffer is of 1 MB."""
    buffer = memoryview(bytearray(CHUNK))
    with _opened(path) as file:
        contents = _header(file)
        for tensor in contents.tensors:
            chunks = (buffer[: min(CHUNK, tensor.nbytes - k)] for k in range(0, tensor.nbytes, CHUNK))
            yield tensor, _fill(file, contents.start + tensor.begin, chunks) == tensor.crc32


def _write(pending: Pending, x: np.ndarray, at: int) -> int:
    """Write an array's bytes at an offset, and return their CRC-32."""
    crc32 = 0
    for chunk in _chunks(np.ascontiguousarray(x)):
        crc32 = zlib.crc32(chunk, crc32)
        pending.write(chunk, at)
        at += len(chunk)
    return crc32


def _chunks(x: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous array in chunks of at most 1 MB."""
    data = x.reshape(-1).view(np.uint8).data
    return (data[k : k + CHUNK] for k in range(0, len(data), CHUNK))


def _fill(file: int, at: int, chunks: Iterable[memoryview]) -> int:
    """Read from an offset into one chunk after the other, and return the CRC-32 of all."""
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
            raise Misfit("data", f"must be complete, got its end at byte {at}; {REMEDY}")
        chunk, at = chunk[count:], at + count


def _header(file: int) -> Header:
    nbytes = os.fstat(file).st_size
    if nbytes < 8:
        raise Misfit("header", f"must begin with 8 bytes, got {nbytes}; {REMEDY}")
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > min(head.MAX_HEAD_BYTES, nbytes - 8):
        most = min(head.MAX_HEAD_BYTES, nbytes - 8)
        got = f"{length}: the file was cut, or is no safetensors file"
        raise Misfit("header", f"must be at most {most} bytes in a file of {nbytes}, got {got}; {REMEDY}")
    text = bytearray(8 + length)
    _fill_one(file, 0, memoryview(text))
    return head.decode(text, nbytes)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading, and give errors its name."""
    try:
        with files.opened(path) as file, _naming(path):
            yield file
    except files.NotRegularError:
        raise CheckpointError(path, "file", files.NOT_REGULAR) from None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Misfit as error:
        raise CheckpointError(path, error.field, error.reason, error.fits) from None
