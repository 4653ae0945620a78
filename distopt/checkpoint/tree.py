"""The values that a checkpoint may hold, as JSON and arrays; every value comes back with its type and its bits.

What JSON has is written as it is, and an object is a dict.  All else is a JSON array that begins with a word:
``["list", 1, 2]``, ``["int", "0x1f"]``, ``["array"]``, ``["tensor"]`` for torch's, ``["named", "State", "count", 1]``
for a named tuple, ``["dict", 0, "a", 1, "b"]`` where keys are integers.  An array's name is its place in the tree as a
JSON pointer (RFC 6901), ``/params/w``, so that no two places have the same name.
"""

import itertools
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from distopt.checkpoint import foreign
from distopt.checkpoint.error import REMEDY, Misfit

# levels of dicts, lists and tuples
DEPTH = 64
# of a name
MAX_NAME_CHARACTERS = 2000
# JSON's integers end here in most languages
EXACT = 2**53

CANNOT = "neither a checkpoint nor a message holds"
WORDS = "list", "tuple", "dict", "named", "array", "scalar", "tensor", "int", "float", "bytes"
READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "bytes": bytes.fromhex,
}


def take_apart(tree: Any, arrays: dict[str, np.ndarray], at: str = "") -> Any:
    """Return a tree as JSON has it, without its arrays, which are added to ``arrays`` by name."""
    # Other subclasses of these types are refused, since they would come back as something else.
    kind = type(tree)
    if kind is dict or kind is OrderedDict:
        values = {_key(key, at): take_apart(value, arrays, below(at, str(key))) for key, value in tree.items()}
        if all(type(key) is str for key in values):
            return values
        if len(set(map(str, values))) < len(values):
            raise Misfit(json_pointer(at), "must have a name of its own for each key, got two alike, as 1 and '1' are")
        return ["dict", *itertools.chain.from_iterable(values.items())]
    if kind is list or kind is tuple:
        return [kind.__name__, *(take_apart(value, arrays, below(at, str(k))) for k, value in enumerate(tree))]
    if foreign.is_named(tree):
        pairs = ((f, take_apart(x, arrays, below(at, f))) for f, x in zip(kind._fields, tree, strict=True))
        return ["named", kind.__name__, *itertools.chain.from_iterable(pairs)]
    if kind is np.ndarray or isinstance(tree, np.generic) or foreign.is_jax_array(tree):
        arrays[at] = foreign.array(tree)
        return ["scalar" if isinstance(tree, np.generic) else "array"]
    if foreign.is_tensor(tree):
        try:
            arrays[at] = foreign.array(tree)
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"{json_pointer(at)}: {CANNOT} this tensor: {error}") from None
        return ["tensor"]
    return _plain(tree, at)


def put_together(plain: Any, leaf: Callable[[str, str], Any], at: str = "") -> Any:
    """Return the tree that ``take_apart`` took apart."""
    if type(plain) is dict:
        return {key: put_together(value, leaf, below(at, key)) for key, value in plain.items()}
    if type(plain) is not list:
        return plain
    match plain:
        case ["list", *values]:
            return [put_together(value, leaf, below(at, str(k))) for k, value in enumerate(values)]
        case ["tuple", *values]:
            return tuple(put_together(value, leaf, below(at, str(k))) for k, value in enumerate(values))
        case ["dict", *items] if _are_pairs(items, (int, str)):
            return _below(items, leaf, at)
        case ["named", str(name), *items] if _are_pairs(items, (str,)):
            fields = _below(items, leaf, at)
            try:
                return foreign.named(name, tuple(fields))(*fields.values())
            except ValueError:
                raise Misfit(
                    json_pointer(at),
                    f"must have the names of a named tuple and its fields, got {plain!r:.60}; {REMEDY}",
                ) from None
        case ["array" | "scalar" | "tensor" as word]:
            return leaf(word, at)
        case ["int" | "float" | "bytes" as word, str(text)]:
            try:
                return READ[word](text)
            except (ValueError, struct.error):
                raise Misfit(json_pointer(at), f"must be {word}, got {text!r:.40}; {REMEDY}") from None
    raise Misfit(json_pointer(at), f"must begin with one of {', '.join(WORDS)}, got {plain!r:.60}; {REMEDY}")


def _are_pairs(items: list[Any], kinds: tuple[type, ...]) -> bool:
    """Tell if items are keys of these types, no two with one name, each followed by a value."""
    keys = items[::2]
    return len(items) % 2 == 0 and all(type(key) in kinds for key in keys) and len(set(map(str, keys))) == len(keys)


def _below(items: list[Any], leaf: Callable[[str, str], Any], at: str) -> dict[Any, Any]:
    return {k: put_together(x, leaf, below(at, str(k))) for k, x in zip(items[::2], items[1::2], strict=True)}


def json_pointer(at: str) -> str:
    """Return the name of a place in a tree for people: the JSON pointer, or 'the tree' for its root."""
    return at or "the tree"


def below(at: str, key: str) -> str:
    """Return the JSON pointer of the value under a key; Misfit if it is too long or too deep."""
    if len(at) + len(key) > MAX_NAME_CHARACTERS:
        raise Misfit(
            json_pointer(at),
            f"must have keys of at most {MAX_NAME_CHARACTERS} characters with its own name, got {key!r:.20}...",
        )
    if at.count("/") >= DEPTH:
        raise Misfit(json_pointer(at), f"must be nested at most {DEPTH} deep, got more; a tree must not contain itself")
    return f"{at}/{key.replace('~', '~0').replace('/', '~1')}"


def _key(key: Any, at: str) -> str | int:
    if type(key) is int and abs(key) < EXACT:
        return key
    if type(key) is not str:
        raise TypeError(f"{json_pointer(at)}: a key must be str or int, got {_name(type(key))}")
    return _unicode(key, at)


def _plain(value: Any, at: str) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _unicode(value, at)
    if kind is int:
        return value if abs(value) < EXACT else ["int", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    raise TypeError(f"{json_pointer(at)}: {CANNOT} {_name(kind)}")


def _unicode(text: str, at: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Misfit(json_pointer(at), f"must be Unicode, got {text!a:.40}") from None
    return text


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
