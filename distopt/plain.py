"""Plain values as valid JSON, which has no numbers for NaN and infinity: they are strings there, as in protobuf's."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MOST = 1 << 26  # bytes of a file
LARGEST = sys.float_info.max
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(name: str, given: Any) -> Any:
    """``given`` as texts, numbers, flags, None, and lists and dicts of these; a copy, of which nobody else has parts.

    Raises TypeError that names the field for anything else, ValueError for a text that stands for a number in JSON, for
    an integer that no float can hold, and for what contains itself.
    """
    try:
        return _plain(name, given)
    except RecursionError:
        raise ValueError(f"{name} must not be nested so deep, nor contain itself") from None


def _plain(name: str, given: Any) -> Any:
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, Mapping):
        if not all(isinstance(key, str) for key in given):
            raise TypeError(f"{name} must have texts as keys, got {given!r:.60}")
        return {str(key): _plain(f"{name}.{key}", value) for key, value in given.items()}
    if isinstance(given, list | tuple):
        return [_plain(f"{name}[{k}]", value) for k, value in enumerate(given)]
    if isinstance(given, str) and given in WORDS:
        raise ValueError(f"{name} must not be the text {given!r}: it stands for the number in JSON")
    if given is not None and not isinstance(given, str | int | float):
        raise TypeError(f"{name} must be a text, number, flag, None, list or dict, got {given!r:.60}")
    if isinstance(given, int) and abs(given) > LARGEST:
        raise ValueError(f"{name} must be a number that a float can hold, got one that is too large")
    return given


def dumps(value: Any) -> str:
    """What ``plain`` returned as JSON in one line."""
    return json.dumps(_worded(value), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """What ``dumps`` was given.  Raises ValueError for what is no JSON, RecursionError for thousands of levels."""
    return _numbered(json.loads(text, parse_constant=_refuse))


def text(path: str | Path) -> bytes:
    """What stands in a file of JSON.  Raises OSError, and ValueError for more than 64 MiB."""
    with open(path, "rb") as file:
        found = file.read(MOST + 1)
    if len(found) > MOST:
        raise ValueError(f"{path} has more than {MOST} bytes")
    return found


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
