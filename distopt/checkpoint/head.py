"""The head of a checkpoint file: a safetensors header with the file's contents, sealed by a checksum.

It is a little-endian uint64, the length of the JSON text that follows, padded by spaces; then come the tensors' bytes
without gaps.  ``__metadata__`` has all else in texts.  It begins with the *seal*, a hash of the head without the seal's
own digits.  The head has the CRC-32 of each tensor, so the seal stands for the whole file.
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

from distopt.checkpoint.error import DAMAGED, REMEDY, Misfit
from distopt.checkpoint.tree import CANNOT, DEPTH, json_pointer, put_together
from distopt.io import strict_json
from distopt.version import __version__

# of JSON
MAX_HEAD_BYTES = 8 << 20
# a text has VALUES + letters / SPARSE values at most: a tensor takes 9, and 95 letters
VALUES, SPARSE = 100_000, 10
# levels of a tree, and of the words for what is deepest in it
NESTED = DEPTH + 2
# the largest dtype's size
ALIGN = 8
# numpy's limit
DIMS = 64

FORMAT, VERSION = "distopt checkpoint", "2"
# readable ones; the first had no torch tensors, named tuples, or integers as keys
VERSIONS = "1", VERSION
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
    """An array in a file: its bytes are ``[begin, end)`` after the head."""

    # its place in the tree, as a JSON pointer
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32: int = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes of its data."""
        return self.end - self.begin


class Header(NamedTuple):
    """A file's description of itself."""

    # the dict that was written with the tree
    about: dict[str, Any]
    # the tree, with a `Tensor` in the place of each array and numpy scalar
    tree: Any
    # in the file's order
    tensors: tuple[Tensor, ...]
    # the version of distopt that wrote the file
    distopt: str
    # 32 hex digits that stand for the whole file
    digest: str
    # the size of the whole file, and the offset of the data
    nbytes: int
    start: int
    # the tree as JSON has it
    plain: Any


def arrange(arrays: dict[str, np.ndarray]) -> list[Tensor]:
    """Return the places of arrays in a file, one after another, large items first, so that all are aligned."""
    for name, x in arrays.items():
        if x.dtype not in CODES:
            raise TypeError(f"{json_pointer(name)}: {CANNOT} an array of {x.dtype!r}")
    order = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    ends = itertools.accumulate(x.nbytes for _, x in order)
    return [Tensor(name, x.dtype, x.shape, end - x.nbytes, end) for (name, x), end in zip(order, ends, strict=True)]


def encode(about: Any, plain: Any, tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of a head, whose length does not depend on the checksums."""
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
    """Return the hash of a head, 32 hex digits, computed without the digits of the seal in it."""
    digest = hashlib.blake2b(head[: SEAL.start], digest_size=16)
    digest.update(memoryview(head)[SEAL.stop :])
    return digest.hexdigest()


def decode(head: bytes | bytearray, nbytes: int) -> Header:
    """Return the contents of a head."""
    if not head.startswith(BEGIN, 8):
        raise Misfit("header", "must be that of a checkpoint, got another; give a file that distopt has saved")
    if head[SEAL] != seal(head).encode():
        raise Misfit("header", DAMAGED)
    try:
        text = str(memoryview(head)[8:], "ascii")
    except UnicodeDecodeError as error:
        raise Misfit("header", f"must be ASCII, got something else at byte {8 + error.start}; {REMEDY}") from None
    entries = _parse(text, "header")
    texts = _metadata(entries.pop("__metadata__"))
    tensors = _tensors(entries, texts["crc32"], nbytes - len(head))
    about = put_together(_parse(texts["about"], "about"), _nothing, "about")
    if type(about) is not dict:
        raise Misfit("about", f"must be a dict, got {type(about).__name__}; {REMEDY}")
    plain = _parse(texts["tree"], "tree")
    tree = _tree(plain, tensors)
    return Header(about, tree, tuple(tensors), texts["distopt"], texts["seal"], nbytes, len(head), plain)


def parse(text: str, field: str, most: int) -> Any:
    """Return the value of a JSON text that has one reading."""
    try:
        return strict_json.parse(text, most, NESTED, **strict_json.EXACT)
    except strict_json.TooLarge as error:
        raise Misfit(field, str(error), error.fits) from None
    except (ValueError, RecursionError) as error:
        raise Misfit(field, f"must be JSON, got another text: {error}; {REMEDY}") from None


def _parse(text: str, field: str) -> Any:
    return parse(text, field, VALUES + len(text) // SPARSE)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _metadata(texts: Any) -> dict[str, str]:
    if type(texts) is not dict or any(type(text) is not str for text in texts.values()):
        raise Misfit("__metadata__", f"must be an object of texts, got {texts!r:.60}; {REMEDY}")
    form, version = texts.get("format", "?"), texts.get("version", "?")
    if form != FORMAT or version not in VERSIONS:
        readable = f"{FORMAT} {' or '.join(VERSIONS)}"
        remedy = f"read it with the version of distopt that wrote it; this is {__version__}"
        raise Misfit("format", f"must be {readable}, got {form:.40} {version:.40}; {remedy}")
    if list(texts) != FIELDS:
        raise Misfit("__metadata__", f"must have the fields {', '.join(FIELDS)}, got {', '.join(texts):.100}; {REMEDY}")
    return texts


def _tensors(entries: dict[str, Any], crc32: str, nbytes: int) -> list[Tensor]:
    """Return the tensors of the header's entries, which must fill ``nbytes`` bytes without gaps."""
    try:
        checksums = np.frombuffer(bytes.fromhex(crc32), ">u4").tolist()
    except ValueError:
        checksums = []
    if len(checksums) != len(entries):
        raise Misfit("crc32", f"must be {len(entries)} checksums, got {len(checksums)}; {REMEDY}")
    tensors, end = [], 0
    for (name, entry), checksum in zip(entries.items(), checksums, strict=True):
        tensors.append(_tensor(name, entry, checksum, begin=end, most=nbytes))
        end = tensors[-1].end
    if end != nbytes:
        raise Misfit("data", f"must be {end} bytes, as the header says, got {nbytes}; {REMEDY}")
    return tensors


def _tensor(name: str, entry: Any, checksum: int, begin: int, most: int) -> Tensor:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [first, end]} if len(entry) == 3:
            pass
        case _:
            raise Misfit(
                json_pointer(name), f"must have dtype, shape and data_offsets alone, got {entry!r:.60}; {REMEDY}"
            )
    if code not in DTYPES:
        raise Misfit(json_pointer(name), f"must have a dtype of {', '.join(DTYPES)}, got {code!r:.20}")
    if len(shape) > DIMS or any(type(n) is not int or n < 0 for n in (*shape, first, end)):
        raise Misfit(
            json_pointer(name),
            f"must have a shape of at most {DIMS} integers and two offsets, got {entry!r:.60}; {REMEDY}",
        )
    if not begin == first <= end <= most:
        raise Misfit(
            json_pointer(name), f"must lie in {begin}:{most} of the data without a gap, got {first}:{end}; {REMEDY}"
        )
    if math.prod(shape) * DTYPES[code].itemsize != end - first:
        raise Misfit(json_pointer(name), f"must have the bytes of its shape and dtype, got {end - first}; {REMEDY}")
    return Tensor(name, DTYPES[code], tuple(shape), first, end, checksum)


def _tree(plain: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the tree with a ``Tensor`` for each array; Misfit unless each tensor is in it once."""
    unplaced = {t.name: t for t in tensors}

    def leaf(word: str, at: str) -> Tensor:
        if at not in unplaced or (word == "scalar" and unplaced[at].shape):
            raise Misfit(json_pointer(at), f"must be one {word} of the file, got another or none; {REMEDY}")
        return unplaced.pop(at)

    tree = put_together(plain, leaf)
    for name in unplaced:
        raise Misfit(json_pointer(name), f"must be in the tree, got a tensor beside it; {REMEDY}")
    return tree


def _nothing(word: str, at: str) -> Any:
    raise Misfit(at, f"must be a value without arrays, got an {word}; put arrays into the tree")
