"""Plain values as valid JSON, which has no numbers for NaN and infinity: they are strings there, as in protobuf's."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from distopt import files

MOST = 1 << 26  # bytes of a file
CONTAINERS, VALUES = 1 << 18, 1 << 22  # objects and lists, and commas, of a text: what parsing it takes is bounded
LARGEST = sys.float_info.max
LEVELS = 100  # of lists and dicts in each other
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Check = Callable[[str, Any], object]


def plain(name: str, given: Any) -> Any:
    """``given`` as texts, numbers, flags, None, and lists and dicts of these; a copy, of which nobody else has parts.

    Raises TypeError that names the field for anything else, ValueError for a text that stands for a number in JSON, for
    an integer that no float can hold, and for what contains itself.
    """
    return copied(name, given, _in_json)


def copied(name: str, given: Any, check: Check) -> Any:
    """``given`` as texts, numbers, flags, None, and lists and dicts of these, each of which passes ``check``; a copy.

    Raises TypeError that names the field for anything else, ValueError for more than 100 levels of lists and dicts, and
    what ``check`` raises.
    """
    try:
        return _copied(name, given, check, LEVELS)
    except RecursionError:
        raise ValueError(f"{name} must not be nested so deep, nor contain itself") from None


def _copied(name: str, given: Any, check: Check, levels: int) -> Any:
    if levels < 0:
        raise RecursionError
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, Mapping):
        if not all(isinstance(key, str) for key in given):
            raise TypeError(f"{name} must have texts as keys, got {given!r:.60}")
        return {str(key): _copied(f"{name}.{key}", value, check, levels - 1) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_copied(f"{name}[{k}]", value, check, levels - 1) for k, value in enumerate(given)]
    if given is not None and not isinstance(given, str | int | float):
        raise TypeError(f"{name} must be a text, number, flag, None, list or dict, got {given!r:.60}")
    check(name, given)
    return given


def _in_json(name: str, given: Any) -> None:
    """ValueError for what a file of JSON, and who reads it, takes for something else."""
    if isinstance(given, str) and given in WORDS:
        raise ValueError(f"{name} must not be the text {given!r}: it stands for the number in JSON")
    if isinstance(given, int) and abs(given) > LARGEST:
        raise ValueError(f"{name} must be a number that a float can hold, got one that is too large")


def dumps(value: Any) -> str:
    """What ``plain`` returned as JSON in one line."""
    return json.dumps(_worded(value), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """What ``dumps`` was given.  Raises as ``parse``."""
    return _numbered(parse(text, parse_constant=_refuse))


def read(path: str | Path, **hooks: Any) -> Any:
    """What a file of JSON says; raises OSError, and as ``files.read``, of 64 MiB at most, and ``parse``."""
    return parse(files.read(path, MOST), **hooks)


def parse(text: str | bytes, **hooks: Any) -> Any:
    """``json.loads`` for the text of a stranger; the hooks are its own.

    Raises ValueError for what is no JSON or is not ``readable``, RecursionError for thousands of levels.
    """
    found = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if not readable(found):
        raise ValueError(f"it must have at most {MOST} bytes, {CONTAINERS} objects and lists, and {VALUES} values")
    return json.loads(text, **hooks)


def readable(text: bytes) -> bool:
    """Is a text of JSON one that ``parse`` takes?"""
    return len(text) <= MOST and text.count(b"{") + text.count(b"[") <= CONTAINERS and text.count(b",") <= VALUES


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
    raise ValueError(f"{word} is no JSON")
