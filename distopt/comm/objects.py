"""Plain values as texts that ranks can exchange, without loss."""

import json
from typing import Any

from distopt.io import strict_json

MAX_CHARACTERS = 1 << 20  # of a text
MAX_BITS = 8192  # of an integer


def encode(value: Any) -> str:
    """Return a text from which ``decode`` makes the value again.

    Example:
        >>> decode(encode({"lr": 0.1, "steps": (1, 2)}))
        {'lr': 0.1, 'steps': [1, 2]}
    """
    text = json.dumps(strict_json.copied("object", value, _check))
    if len(text) > MAX_CHARACTERS:
        remedy = "send large data as arrays"
        raise ValueError(f"object must be at most {MAX_CHARACTERS} characters of JSON, got {len(text)}; {remedy}")
    return text


def decode(text: str) -> Any:
    """Return the value, with lists in place of tuples; floats are the same to the bit, infinities and NaN included."""
    return json.loads(text)


def _check(name: str, value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"{name} must be an integer of at most {MAX_BITS} bits, got {value.bit_length()} bits")
