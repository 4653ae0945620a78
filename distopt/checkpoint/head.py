"""The head of a checkpoint: what is in the file and where, in safetensors' layout, sealed by a checksum.

A little-endian uint64, the length of the JSON text that follows, padded by spaces; then the tensors' bytes without
gaps.  ``__metadata__`` says the rest in texts.  It begins with the *seal*, a hash of the head without the seal's own
digits.  The head has the CRC of each tensor, so the seal stands for the whole file.
"""

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from distopt.checkpoint.error import Misfit
from distopt.checkpoint.strict import parse
from distopt.checkpoint.tree import place, put_together
from distopt.version import __version__

LONGEST = 8 << 20  # bytes of JSON
VALUES, SPARSE = 100_000, 10  # in a text, beside one for every so many letters: a tensor takes 9, and 95 letters
ALIGN = 8  # the largest dtype's size
DIMS = 64  # numpy's limit

FORMAT, VERSION = "distopt checkpoint", "2"
VERSIONS = "1", VERSION  # that can be read; the first had no tensors, named tuples, and integers as keys
BEGIN = b'{"__metadata__":{"seal":"'
SEAL = slice(8 + len(BEGIN), 8 + len(BEGIN) + 32)
FIELDS = ["seal", "format", "version", "distopt", "about", "tree", "crc32"]

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"I{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """An array in a file: its bytes are ``[begin, end)`` behind the head."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32: int = 0

    @property
    def nbytes(self) -> int:
        """Of its data."""
        return self.end - self.begin


class Header(NamedTuple):
    """What a file says about itself."""

    about: dict[str, Any]
    tree: Any  # with a Tensor where an array or a numpy scalar is
    tensors: tuple[Tensor, ...]  # in the file's order
    distopt: str  # the version that wrote it
    digest: str  # 32 hex digits that stand for the whole file
    nbytes: int  # of the whole file
    start: int  # of the data, in bytes
    plain: Any  # the tree as JSON knows it


def arrange(arrays: dict[str, np.ndarray]) -> list[Tensor]:
    """One after another, large items first, so that all are aligned; TypeError for a dtype that has no code."""
    for name, x in arrays.items():
        if x.dtype not in CODES:
            raise TypeError(f"{place(name)}: a checkpoint cannot hold an array of {x.dtype!r}")
    order = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    ends = itertools.accumulate(x.nbytes for _, x in order)
    return [Tensor(name, x.dtype, x.shape, end - x.nbytes, end) for (name, x), end in zip(order, ends, strict=True)]


def encode(about: Any, plain: Any, tensors: Sequence[Tensor]) -> bytes:
    """The head, whose length does not depend on the checksums; ``about`` and ``plain`` as JSON knows them."""
    crc32 = b"".join(t.crc32.to_bytes(4, "big") for t in tensors).hex()
    texts = ["0" * 32, FORMAT, VERSION, __version__, _compact(about), _compact(plain), crc32]
    entries = {
        t.name: {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": [t.begin, t.end]} for t in tensors
    }
    text = _compact({"__metadata__": dict(zip(FIELDS, texts, strict=True)), **entries}).encode()
    text += b" " * (-len(text) % ALIGN)
    head = bytearray(struct.pack("<Q", len(text)) + text)
    head[SEAL] = seal(head).encode()
    return bytes(head)


def seal(head: bytes | bytearray) -> str:
    """The hash of a head, but for the digits of the seal in it."""
    digest = hashlib.blake2b(head[: SEAL.start], digest_size=16)
    digest.update(memoryview(head)[SEAL.stop :])
    return digest.hexdigest()


def decode(head: bytes | bytearray, nbytes: int) -> Header:
    """What the head of a file of ``nbytes`` bytes says; Misfit unless it is one that ``encode`` may have written."""
    if not head.startswith(BEGIN, 8):
        raise Misfit("header", "is not that of a checkpoint")
    if head[SEAL] != seal(head).encode():
        raise Misfit("header", "is damaged: its checksum differs")
    entries = _parse(_ascii(memoryview(head)[8:]), "header")
    texts = _metadata(entries.pop("__metadata__"))
    tensors = _tensors(entries, texts["crc32"], nbytes - len(head))
    about = put_together(_parse(texts["about"], "about"), _nothing, "about")
    if type(about) is not dict:
        raise Misfit("about", "is no dict")
    plain = _parse(texts["tree"], "tree")
    tree = _tree(plain, tensors)
    return Header(about, tree, tuple(tensors), texts["distopt"], texts["seal"], nbytes, len(head), plain)


def _parse(text: str, field: str) -> Any:
    return parse(text, field, VALUES + len(text) // SPARSE)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _ascii(text: memoryview) -> str:
    try:
        return str(text, "ascii")
    except UnicodeDecodeError as error:
        raise Misfit("header", f"is not ASCII at byte {8 + error.start}") from None


def _metadata(texts: Any) -> dict[str, str]:
    if type(texts) is not dict or any(type(text) is not str for text in texts.values()):
        raise Misfit("__metadata__", "is no object of texts")
    form, version = texts.get("format", "?"), texts.get("version", "?")
    if form != FORMAT or version not in VERSIONS:
        known = f"{FORMAT} {' and '.join(VERSIONS)}"
        raise Misfit("format", f"is {form:.40} {version:.40}, and distopt {__version__} reads {known}")
    if list(texts) != FIELDS:
        raise Misfit("__metadata__", f"has other fields than {', '.join(FIELDS)}")
    return texts


def _tensors(entries: dict[str, Any], crc32: str, nbytes: int) -> list[Tensor]:
    """The entries as they lie behind each other in ``nbytes`` bytes, to the last one."""
    try:
        checksums = np.frombuffer(bytes.fromhex(crc32), ">u4").tolist()
    except ValueError:
        checksums = []
    if len(checksums) != len(entries):
        raise Misfit("crc32", f"is not {len(entries)} checksums")
    tensors, end = [], 0
    for (name, entry), checksum in zip(entries.items(), checksums, strict=True):
        tensors.append(_tensor(name, entry, checksum, begin=end, most=nbytes))
        end = tensors[-1].end
    if end != nbytes:
        raise Misfit("data", f"is {nbytes} bytes, and the header says {end}")
    return tensors


def _tensor(name: str, entry: Any, checksum: int, begin: int, most: int) -> Tensor:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [first, end]} if len(entry) == 3:
            pass
        case _:
            raise Misfit(place(name), "is not dtype, shape and data_offsets")
    if code not in DTYPES:
        raise Misfit(place(name), f"has the dtype {code!r:.20}")
    if len(shape) > DIMS or any(type(n) is not int or n < 0 for n in (*shape, first, end)):
        raise Misfit(place(name), f"has a shape or offsets that are none, or more than {DIMS} dimensions")
    if not begin == first <= end <= most:
        raise Misfit(place(name), f"lies at {first}:{end} of {most} bytes, behind one that ends at {begin}")
    if math.prod(shape) * DTYPES[code].itemsize != end - first:
        raise Misfit(place(name), f"has {end - first} bytes, which its shape and dtype do not have")
    return Tensor(name, DTYPES[code], tuple(shape), first, end, checksum)


def _tree(plain: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree, in which each tensor is once."""
    left = {t.name: t for t in tensors}

    def leaf(word: str, at: str) -> Tensor:
        if at not in left or (word == "scalar" and left[at].shape):
            raise Misfit(place(at), f"is no {word} in the file")
        return left.pop(at)

    tree = put_together(plain, leaf)
    for name in left:
        raise Misfit(place(name), "is not in the tree")
    return tree


def _nothing(word: str, at: str) -> Any:
    raise Misfit(at, f"is an {word}: those belong into the tree")
