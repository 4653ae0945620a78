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
from distopt.resilience import files
from distopt.resilience.pending import Pending

CHUNK = 1 << 20  # bytes, written while the cache still has what was summed up

Path = str | os.PathLike[str]


def write(path: Path, tree: Any, about: dict[str, Any]) -> None:
    """Write a tree to a file, which is there whole or not at all: ``prepare`` and commit.

    Args:
        path: the file, which is replaced.
        tree: values and arrays (see ``prepare``).
        about: a dict of values that describe the file, without arrays.

    Raises:
        TypeError: the tree has a value of another type; the text names its place.
        CheckpointError: the tree is too large or too deep.
        OSError: the file cannot be written; ``path`` is as it was.

    Example:
        >>> import numpy as np
        >>> from distopt.checkpoint import read, write
        >>> write("state.ckpt", {"w": np.arange(3), "step": 7}, {"run": "a"})
        >>> tree, about = read("state.ckpt")
        >>> tree["w"].tolist(), tree["step"], about
        ([0, 1, 2], 7, {'run': 'a'})
    """
    prepare(path, tree, about).commit()


def prepare(path: Path, tree: Any, about: dict[str, Any]) -> Pending:
    """Write a tree beside ``path`` and onto the disk, under a temporary name.

    A tree is made of dict with str or int as keys, list, tuple, named tuple, str, bytes, int, float, bool, None, and
    numpy's arrays and scalars: bool, integers, float16, bfloat16, float32, float64, of any shape, in native byte order.
    Torch's tensors come back as tensors on the CPU, as arrays in a process that has not imported torch; jax's arrays as
    numpy's; a named tuple as one with the same name and fields; an OrderedDict as a dict.

    Args:
        path: the file's final name.
        tree: the values and arrays.
        about: a dict of values that describe the file, without arrays.

    Returns:
        The file, whose ``commit()`` gives it the name and whose ``discard()`` removes it.  It has ``nbytes``, and
        ``digest``: 32 hex digits that stand for the whole file and that ``header`` finds without reading it all.

    Raises:
        TypeError: the tree has a value of another type; the text names its place.  Nothing has been written then.
        CheckpointError: the tree takes more than 8 MB of text, 64 levels, or one value for every 10 letters and 100,000
            beyond.  Nothing has been written then.
        OSError: the file cannot be written; the temporary file is removed, and ``path`` is as it was.

    Example:
        >>> import numpy as np
        >>> from distopt.checkpoint import header, prepare
        >>> pending = prepare("state.ckpt", {"w": np.zeros(3)}, {})
        >>> pending.commit()
        >>> pending.digest == header("state.ckpt").digest
        True
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
    """Read a file; every tensor's checksum is verified.

    Returns:
        The tree, whose arrays are new, and ``about``.

    Raises:
        CheckpointError: the file is not whole, or no checkpoint.
        OSError: the file cannot be read.

    Example:
        >>> import numpy as np
        >>> from distopt.checkpoint import read, write
        >>> write("state.ckpt", [np.float32(0.5), ("adam", 3)], {})
        >>> read("state.ckpt")[0][1]
        ('adam', 3)
    """
    with _opened(path) as file:
        contents = _header(file)
        tensors = {t.name: t for t in contents.tensors}

        def leaf(word: str, at: str) -> Any:
            array = _read(file, contents.start, tensors[at])
            return array[()] if word == "scalar" else foreign.tensor(array) if word == "tensor" else array

        return put_together(contents.plain, leaf), contents.about


def header(path: Path) -> Header:
    """Read what a file says about itself, and not its data.

    Raises:
        CheckpointError: the header is not whole, or not that of a checkpoint.
        OSError: the file cannot be read.

    Example:
        >>> import numpy as np
        >>> from distopt.checkpoint import header, write
        >>> write("state.ckpt", {"w": np.zeros((2, 3))}, {"run": "a"})
        >>> [(tensor.name, tensor.shape) for tensor in header("state.ckpt").tensors]
        [('/w', (2, 3))]
    """
    with _opened(path) as file:
        return _header(file)


def check(path: Path) -> Iterator[tuple[Tensor, bool]]:
    """Verify the checksum of each tensor in a file, in a buffer of 1 MB.

    Yields:
        Each tensor, and whether its data are those that were written.

    Raises:
        CheckpointError: the header is not whole, or not that of a checkpoint.
        OSError: the file cannot be read.

    Example:
        >>> import numpy as np
        >>> from distopt.checkpoint import check, write
        >>> write("state.ckpt", {"w": np.zeros(3)}, {})
        >>> [(tensor.name, whole) for tensor, whole in check("state.ckpt")]
        [('/w', True)]
    """
    buffer = memoryview(bytearray(CHUNK))
    with _opened(path) as file:
        contents = _header(file)
        for tensor in contents.tensors:
            chunks = (buffer[: min(CHUNK, tensor.nbytes - k)] for k in range(0, tensor.nbytes, CHUNK))
            yield tensor, _fill(file, contents.start + tensor.begin, chunks) == tensor.crc32


def _without_arrays(about: dict[str, Any]) -> Any:
    arrays: dict[str, np.ndarray] = {}
    plain = take_apart(about, arrays, "about")
    if arrays or type(about) is not dict:
        raise TypeError(f"{next(iter(arrays), 'about')}: about must be a dict without numpy's arrays and scalars")
    return plain


def _check(text: bytes, tensors: list[Tensor]) -> int:
    """Check that a head can be read again, and return its length in bytes; Misfit if it cannot."""
    if len(text) > head.MAX_HEAD_BYTES:
        reason = f"must be at most {head.MAX_HEAD_BYTES} bytes, got {len(text)}; put what is large into arrays"
        raise Misfit("header", reason, head.MAX_HEAD_BYTES / len(text))
    head.decode(text, len(text) + max((t.end for t in tensors), default=0))
    return len(text)


def _write(pending: Pending, x: np.ndarray, at: int) -> int:
    """Write an array's bytes at an offset, and return their CRC-32.

    Args:
        pending: the file.
        x: the array.
        at: the offset in the file, in bytes.
    """
    crc32 = 0
    for chunk in _chunks(np.ascontiguousarray(x)):
        crc32 = zlib.crc32(chunk, crc32)
        pending.write(chunk, at)
        at += len(chunk)
    return crc32


def _read(file: int, start: int, tensor: Tensor) -> np.ndarray:
    try:
        array = np.empty(tensor.shape, tensor.dtype)
    except (MemoryError, ValueError) as error:
        raise Misfit(json_pointer(tensor.name), f"must fit into memory, got {tensor.nbytes} bytes: {error}") from None
    if _fill(file, start + tensor.begin, _chunks(array)) != tensor.crc32:
        raise Misfit(json_pointer(tensor.name), DAMAGED)
    return array


def _chunks(x: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous array in chunks of at most 1 MB."""
    data = x.reshape(-1).view(np.uint8).data
    return (data[k : k + CHUNK] for k in range(0, len(data), CHUNK))


def _fill(file: int, at: int, chunks: Iterable[memoryview]) -> int:
    """Read from an offset into one chunk after the other, and return the CRC-32 of all.

    Args:
        file: the file's descriptor.
        at: the offset in the file, in bytes.
        chunks: memory to read into.
    """
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
