"""JSON that a stranger may have written: what reading it takes is bounded."""

import json
import re
from typing import Any

from distopt.checkpoint.error import Misfit
from distopt.checkpoint.tree import DEPTH

NESTED = DEPTH + 2  # a tree in it, and the words for what is deepest there
DIGITS = 20
TOKEN = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def parse(text: str, field: str, most: int) -> Any:
    """A JSON text of at most ``most`` values, in which no name comes twice."""
    values = sum(map(text.count, "{[,"))
    if values > most:
        raise Misfit(field, f"has more than {most} values", most / values)
    if _depth(text) > NESTED:
        raise Misfit(field, f"is nested deeper than {NESTED}")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_short, parse_constant=_short)
    except (ValueError, RecursionError) as error:
        raise Misfit(field, f"is not JSON: {error}") from None


def _depth(text: str) -> int:
    """How deep a text nests; the parser's own limit is what is left of the stack."""
    depth = deepest = 0
    quoted = False
    for match in TOKEN.finditer(text):
        token = match[0]
        if token == '"':
            quoted = not quoted
        elif not quoted and token in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif not quoted and token in "}]":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name comes twice")
    return entries


def _short(digits: str) -> int:
    """Long numbers take long to read, and NaN is none."""
    if len(digits) > DIGITS or digits in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{digits[:DIGITS]} is no number here")
    return int(digits)
