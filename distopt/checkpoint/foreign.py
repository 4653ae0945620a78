"""Arrays and named tuples of other libraries, none of which is imported here."""

import functools
import operator
import sys
from collections.abc import Iterable
from typing import Any, Self

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def is_tensor(x: Any) -> bool:
    """Tell if an object is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_jax_array(x: Any) -> bool:
    """Tell if an object is a jax array."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def array(x: Any) -> np.ndarray:
    """Return the values of an array of any library as a numpy array."""
    if not is_tensor(x):
        return np.asarray(x)
    local = x.detach().cpu()
    if str(local.dtype) == "torch.bfloat16":
        bits: np.ndarray = local.view(sys.modules["torch"].int16).numpy()
        return bits.view(BFLOAT16)
    return np.asarray(local.numpy())


def tensor(x: np.ndarray) -> Any:
    """Return a torch tensor in the memory of an array; the array itself in a process that has not imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return x
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


class LoadedTuple(tuple[Any, ...]):
    """A named tuple that was read from a file; its class has the name and the fields of the one that was written."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    def __new__(cls, *values: Any) -> Self:
        if len(values) != len(cls._fields):
            raise TypeError(f"the values of {cls.__name__} must be {len(cls._fields)}, got {len(values)}")
        return super().__new__(cls, values)

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        return cls(*values)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Self:
        return type(self)(*(self._asdict() | changes).values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={x!r}' for n, x in self._asdict().items())})"


@functools.lru_cache(maxsize=256)
def named(name: str, fields: tuple[str, ...]) -> type[LoadedTuple]:
    """Return the class of named tuples with this name and these fields."""
    if not all(word.isidentifier() for word in (name, *fields)) or any(field[0] == "_" for field in fields):
        raise ValueError(f"fields of a named tuple must be names that do not begin with _, got {fields!r:.60}")
    getters = {field: property(operator.itemgetter(k)) for k, field in enumerate(fields)}
    return type(name, (LoadedTuple,), {"__slots__": (), "_fields": fields, **getters})


def is_named(x: Any) -> bool:
    """Tell if an object is a named tuple."""
    return isinstance(x, tuple) and isinstance(getattr(type(x), "_fields", None), tuple)


def has_named(tree: Any) -> bool:
    """Tell if a tree has a named tuple in it."""
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return is_named(tree) or any(map(has_named, inside))


def typed(tree: Any, like: Any) -> Any:
    """Return a tree with the classes of named tuples that have the same fields at the same places in another tree."""
    if isinstance(tree, dict):
        return {key: typed(x, like.get(key)) if isinstance(like, dict) else x for key, x in tree.items()}
    if not isinstance(tree, list | tuple):
        return tree
    others: Any = like if isinstance(like, list | tuple) and len(like) == len(tree) else [None] * len(tree)
    values = [typed(x, other) for x, other in zip(tree, others, strict=True)]
    if not is_named(tree):
        return type(tree)(values)
    kind: Any = type(tree)
    return (type(like) if is_named(like) and type(like)._fields == kind._fields else kind)(*values)
