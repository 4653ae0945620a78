"""The tensors of a model, by its name or from a file of shapes; and the buckets that they make."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distopt import plain
from distopt.buckets.plan import plan
from distopt.models import MODELS, Shapes
from distopt.names import unknown
from distopt.numbers import whole
from distopt.tables import Members

MOST = 2**40  # elements of a model: four terabytes of gradients
LARGEST = 2**31 - 64  # of a tensor: indices are int32


class Pairs(list[Any]):
    """A JSON object as its pairs, of which two may have the same name; a list is none."""


def shapes(model: str | Path) -> Shapes:
    """Names and shapes in forward order, of one of ``distopt.models``, or of a file that ends in .json.

    A file has ``{"name": [dimensions], ...}``, or ``[["name", [dimensions]], ...]``.  Raises ValueError, with the file
    and the field, for what is none; with the closest name for a model that there is not; OSError.
    """
    name = str(model)
    if name.lower().endswith(".json"):
        try:
            given = plain.read(model, object_pairs_hook=Pairs)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{model} is no JSON: {error}") from None
        try:
            return _checked(given)
        except ValueError as error:
            raise ValueError(f"{model}: {error}") from None
    if name not in MODELS:
        raise ValueError(f"{unknown('model', name, MODELS)}; or give a file of shapes, which ends in .json")
    return MODELS[name]()


def buckets(shapes: Shapes, threshold: int = 2097152, dtypes: Sequence[Any] | None = None) -> list[Members]:
    """Those that ``DistOpt(threshold=...)`` makes of gradients which come in this order: a model's come last to first.

    ``dtypes`` are those of the tensors, by default float32.  Raises ValueError for a threshold below 0, TypeError for
    one that is no integer.
    """
    names, sizes = [name for name, _ in shapes], [math.prod(shape) for _, shape in shapes]
    by_name = dict(shapes)
    kinds = ["float32"] * len(names) if dtypes is None else dtypes
    found = plan(names, sizes, kinds, whole("threshold", threshold, least=0))
    return [Members(b.names, [by_name[n] for n in b.names], b.offsets, b.stored) for b in found.buckets]


def _checked(given: Any) -> Shapes:
    """What a file holds, in which a JSON object is a list of its pairs; ValueError that names the field."""
    if not isinstance(given, list) or not given:
        raise ValueError('must hold {"name": [dimensions], ...}, for one tensor at least')
    found: Shapes = []
    for k, pair in enumerate(given):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise ValueError(f"entry {k} must be a name and a shape, got {pair!r:.60}")
        found.append((pair[0], _shape(*pair)))
    name, times = Counter(name for name, _ in found).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{name} is there {times} times")
    elements = sum(math.prod(shape) for _, shape in found)
    if not 0 < elements <= MOST:
        raise ValueError(f"a model has from 1 to 2^40 elements, got {elements:,}")
    return found


def _shape(name: str, given: Any) -> tuple[int, ...]:
    flaw = f"{name} must have a list of whole numbers of at least 0 as its shape, got {given!r:.60}"
    if not isinstance(given, list) or isinstance(given, Pairs) or len(given) > 32:
        raise ValueError(flaw)
    if any(type(n) is not int or n < 0 for n in given):
        raise ValueError(flaw)
    if math.prod(given) > LARGEST:
        raise ValueError(f"{name} has {math.prod(given):,} elements: a tensor has at most {LARGEST:,}")
    return tuple(given)
