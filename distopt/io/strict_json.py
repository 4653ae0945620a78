"""Plain values as valid JSON, and a bounded parser for texts that need not be trusted.

JSON has no numbers for NaN and infinity: they are strings there, as in protobuf's JSON.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from distopt.io import files

MAX_BYTES = 1 << 26  # of a file
# objects and lists, and commas, of a text: they bound the parser's memory
CONTAINERS, VALUES = 1 << 18, 1 << 22
MAX_NUMBER = sys.float_info.max  # that a float can hold
LEVELS = 100  # of lists and dicts in each other
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
DIGITS = 20  # of an integer in an ``EXACT`` text
TOKEN = re.compile(rb'\\.|["{}\[\]]', re.DOTALL)
Check = Callable[[str, Any], object]


class TooLarge(ValueError):
    """A JSON text that its reader does not take."""

    def __init__(self, reason: str, fits: float = 0.0):
        super().__init__(reason)
        # the fraction of its values that would not be too many; 0 if it is too large in another way
        self.fits = fits


def plain(name: str, value: Any) -> Any:
    """Return a copy of a value that JSON can hold: texts, numbers, flags, None, and lists and dicts of these."""
    # Raises TypeError for anything else; ValueError for a text that stands for a number in JSON, as 'NaN' does, an
    # integer larger than any float, or nesting too deep, as of a value that contains itself.
    return copied(name, value, _in_json)


def copied(name: str, value: Any, check: Check) -> Any:
    """Return a copy of texts, numbers, flags, None, and lists and dicts of these, each leaf of which passes a check."""
    # Raises TypeError for anything else, ValueError for more than 100 levels.
    # check: is called with the name and value of each leaf, and raises an error for one that must not be.
    try:
        return _copied(name, value, check, LEVELS)
    except RecursionError:
        text = f"{name} must be at most {LEVELS} levels of lists and dicts, got more, as what contains itself has"
        raise ValueError(text) from None


def _copied(name: str, node: Any, check: Check, levels: int) -> Any:
    if levels < 0:
        raise RecursionError
    if isinstance(node, np.generic):
        node = node.item()
    if isinstance(node, Mapping):
        if not all(isinstance(key, str) for key in node):
            raise TypeError(f"keys of {name} must be texts, got {node!r:.60}")
        return {str(key): _copied(f"{name}.{key}", value, check, levels - 1) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_copied(f"{name}[{k}]", value, check, levels - 1) for k, value in enumerate(node)]
    if node is not None and not isinstance(node, str | int | float):
        raise TypeError(f"{name} must be a text, number, flag, None, list or dict, got {node!r:.60}")
    check(name, node)
    return node


def _in_json(name: str, value: Any) -> None:
    """Check a leaf; ValueError for one that a reader of JSON takes for something else."""
    if isinstance(value, str) and value in WORDS:
        raise ValueError(f"{name} must be another text, got {value!r}; it stands for the number in JSON")
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise ValueError(f"{name} must be a number that a float can hold, got one that is too large")


def dumps(value: Any) -> str:
    """Return a value that ``plain`` returned as JSON in one line."""
    return json.dumps(_worded(value), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Return the value that ``dumps`` was given; raises as ``parse``."""
    return _numbered(parse(text, parse_constant=_refuse))


def read(path: str | Path, **hooks: Any) -> Any:
    """Return the value of a JSON file of 64 MiB at most; raises OSError, and as ``files.read`` and ``parse``."""
    return parse(files.read(path, MAX_BYTES), **hooks)


def parse(text: str | bytes, most: int | None = None, levels: int | None = None, **hooks: Any) -> Any:
    """Return the value of a JSON text that need not be trusted."""
    # most: the largest number of objects, lists and values that it may have; by default it must be `readable`.
    # levels: the largest number of objects and lists in each other; by default what is left of the stack.
    # **hooks: the keyword arguments of `json.loads`, such as `EXACT`.
    # Raises TooLarge: the text is larger than these bounds.
    # Raises RecursionError: the text has thousands of levels.
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if most is None and not readable(raw):
        raise TooLarge(
            f"it must be at most {MAX_BYTES} bytes, {CONTAINERS} objects and lists and {VALUES} values, got more"
        )
    if most is not None and (values := sum(map(raw.count, (b"{", b"[", b",")))) > most:
        raise TooLarge(f"must have at most {most} values, got {values}", most / values)
    if levels is not None and _depth(raw) > levels:
        raise TooLarge(f"must be nested at most {levels} deep, got more")
    return json.loads(text, **hooks)


def readable(text: bytes) -> bool:
    """Tell if a JSON text is small enough for ``parse``: in bytes, in objects and lists, and in values."""
    return len(text) <= MAX_BYTES and text.count(b"{") + text.count(b"[") <= CONTAINERS and text.count(b",") <= VALUES


def _depth(text: bytes) -> int:
    """The depth of nesting of objects and lists."""
    depth = deepest = 0
    quoted = False
    for match in TOKEN.finditer(text):
        token = match[0]
        if token == b'"':
            quoted = not quoted
        elif not quoted and token in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        elif not quoted and token in b"}]":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's entries as a dict; ValueError for a name that comes twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name comes twice")
    return entries


def _short(digits: str) -> int:
    """An integer; ValueError for a long one, which takes long to read."""
    if len(digits) > DIGITS:
        raise ValueError(f"{digits[:DIGITS]} is no number here")
    return int(digits)


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _inside(_worded, value)


def _numbered(value: Any) -> Any:
    return WORDS.get(value, value) if isinstance(value, str) else _inside(_numbered, value)


def _inside(change: Any, value: Any) -> Any:
    """A list or dict with its values changed; anything else as it is."""
    if isinstance(value, dict):
        return {key: change(x) for key, x in value.items()}
    return [change(x) for x in value] if isinstance(value, list) else value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


# one reading, soon done
EXACT = {"object_pairs_hook": _unique, "parse_int": _short, "parse_constant": _refuse}
