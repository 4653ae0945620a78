"""The tensors of a model, by its name or from a file of shapes, and the buckets that they make."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distopt.buckets.plan import plan
from distopt.checks import check_int, unknown_name
from distopt.io import strict_json
from distopt.kernels.layout import BucketLayout
from distopt.lab.models import MODELS, Shapes

MAX_MODEL_ELEMENTS = 2**40  # of a model: 4 TB of gradients
MAX_TENSOR_ELEMENTS = 2**31 - 64  # of a tensor: indices are int32


class Pairs(list[Any]):
    """The (name, value) pairs of a JSON object, which may repeat a name; the type tells them from a JSON list."""


def shapes(model: str | Path) -> Shapes:
    """Return the names and shapes of a model's parameters in forward order.

    Args:
        model: a name of ``distopt.lab.models``, or the path of a ``.json`` file, which holds
            ``{"name": [dimensions], ...}`` or ``[["name", [dimensions]], ...]``.

    Raises:
        ValueError: the model is unknown (the text names the closest one), or the file is malformed (the text names the
            field).
        OSError: the file cannot be read.

    Example:
        >>> from distopt.lab import shapes
        >>> shapes("resnet50")[0]
        ('conv1.weight', (64, 3, 7, 7))
    """
    name = str(model)
    if name.lower().endswith(".json"):
        try:
            pairs = strict_json.read(model, object_pairs_hook=Pairs)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{model} is no JSON: {error}") from None
        try:
            return _checked(pairs)
        except ValueError as error:
            raise ValueError(f"{model}: {error}") from None
    if name not in MODELS:
        raise ValueError(f"{unknown_name('model', name, MODELS)}; or give a file of shapes, which ends in .json")
    return MODELS[name]()


def buckets(shapes: Shapes, threshold: int = 2097152, dtypes: Sequence[Any] | None = None) -> list[BucketLayout]:
    """Group gradients into the buckets that ``DistOpt(threshold=...)`` makes of them.

    Args:
        shapes: names and shapes in the order in which gradients arrive: the reverse of a model's forward order.
        threshold: the number of elements that fill a bucket, at least 0.
        dtypes: the dtype of each tensor, by default float32.

    Raises:
        ValueError: ``threshold`` is below 0.
        TypeError: ``threshold`` is no integer.

    Example:
        >>> from distopt.lab import buckets
        >>> [bucket.names for bucket in buckets([("a", (300,)), ("b", (300,)), ("c", (3000,))], threshold=500)]
        [('a', 'b'), ('c',)]
    """
    names, sizes = [name for name, _ in shapes], [math.prod(shape) for _, shape in shapes]
    by_name = dict(shapes)
    dtype_names = ["float32"] * len(names) if dtypes is None else dtypes
    packing = plan(names, sizes, dtype_names, check_int("threshold", threshold, least=0))
    return [BucketLayout(b.names, [by_name[n] for n in b.names], b.offsets, b.stored) for b in packing.buckets]


def _checked(pairs: Any) -> Shapes:
    """Check the content of a file of shapes, whose JSON objects are ``Pairs``; ValueError names the wrong field."""
    if not isinstance(pairs, list) or not pairs:
        raise ValueError('must hold {"name": [dimensions], ...}, for one tensor at least')
    tensors: Shapes = []
    for k, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise ValueError(f"entry {k} must be a name and a shape, got {pair!r:.60}")
        tensors.append((pair[0], _shape(*pair)))
    name, times = Counter(name for name, _ in tensors).most_common(1)[0]
    if times > 1:
        raise ValueError(f"names must be unique, got {name} {times} times")
    elements = sum(math.prod(shape) for _, shape in tensors)
    if not 0 < elements <= MAX_MODEL_ELEMENTS:
        raise ValueError(f"a model must be of 1 to 2^40 elements, got {elements:,}")
    return tensors


def _shape(name: str, dimensions: Any) -> tuple[int, ...]:
    flaw = f"the shape of {name} must be a list of whole numbers of at least 0, got {dimensions!r:.60}"
    if not isinstance(dimensions, list) or isinstance(dimensions, Pairs) or len(dimensions) > 32:
        raise ValueError(flaw)
    if any(type(n) is not int or n < 0 for n in dimensions):
        raise ValueError(flaw)
    if math.prod(dimensions) > MAX_TENSOR_ELEMENTS:
        raise ValueError(f"{name} must be of at most {MAX_TENSOR_ELEMENTS:,} elements, got {math.prod(dimensions):,}")
    return tuple(dimensions)
