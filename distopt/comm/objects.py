"""Trees of values and arrays as texts and arrays that ranks can exchange, without loss and without pickle."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from distopt.checkpoint import foreign, tree
from distopt.checkpoint.error import Misfit
from distopt.checkpoint.head import CODES, DTYPES

MAX_CHARACTERS = 1 << 24  # of a text
Head = list[Any]  # a tree as JSON has it, and the name, dtype and shape of each of its arrays


def described(values: Any) -> tuple[Head, dict[str, np.ndarray]]:
    """Return a tree as JSON, with the dtypes and shapes of its arrays; and these."""
    arrays: dict[str, np.ndarray] = {}
    plain = tree.take_apart(values, arrays)
    for name, x in arrays.items():
        if x.dtype not in CODES:
            raise TypeError(f"{tree.json_pointer(name)}: {tree.CANNOT} an array of {x.dtype!r}")
    return [plain, [[name, CODES[x.dtype], list(x.shape)] for name, x in arrays.items()]], arrays


def empty_arrays(head: Head) -> dict[str, np.ndarray]:
    """Return arrays for those of the tree that ``described`` has described."""
    return {name: np.empty(shape, DTYPES[code]) for name, code, shape in head[1]}


def rebuilt(head: Head, received: Mapping[str, np.ndarray]) -> Any:
    """Return the tree that ``described`` has described, with these arrays."""

    def leaf(word: str, name: str) -> Any:
        array = received[name]
        return array[()] if word == "scalar" else foreign.tensor(array) if word == "tensor" else array

    return tree.put_together(head[0], leaf)


def encode(values: Any) -> tuple[str, dict[str, np.ndarray]]:
    """Return the text of a tree, which ``json.loads`` makes a head again, and its arrays.

    Example:
        >>> encode({"lr": 0.1, 1: np.ones(2)})[0]
        '[["dict", "lr", 0.1, 1, ["array"]], [["/1", "F64", [2]]]]'
    """
    try:
        head, arrays = described(values)
    except Misfit as error:
        raise ValueError(f"{error.field}: {error.reason}") from None
    text = json.dumps(head)
    if len(text) > MAX_CHARACTERS:
        remedy = "send large data as arrays"
        raise ValueError(f"object must be at most {MAX_CHARACTERS} characters of JSON, got {len(text)}; {remedy}")
    return text, arrays
