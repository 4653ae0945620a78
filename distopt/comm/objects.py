"""Plain values as texts that go from rank to rank, and come back as they were."""

import json
from typing import Any

from distopt import plain

MOST = 1 << 20  # characters of a text
BITS = 8192  # of an integer


def encode(value: Any) -> str:
    """A text for ``decode``.

    Raises TypeError for what is not None, a flag, number or text, or a list, tuple or dict with texts as keys of these;
    ValueError for more than 100 levels, an integer of more than 8,192 bits, or more than 2^20 characters of text.
    """
    text = json.dumps(plain.copied("object", value, _check))
    if len(text) > MOST:
        remedy = "send large data as arrays"
        raise ValueError(f"object must be at most {MOST} characters of JSON, got {len(text)}; {remedy}")
    return text


def decode(text: str) -> Any:
    """The value, with lists in the place of tuples; numbers to the bit, infinities and NaN among them."""
    return json.loads(text)


def _check(name: str, value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError(f"{name} must be an integer of at most {BITS} bits, got {value.bit_length()} bits")
