"""The adapter for gradient transformations, as optax has them."""

import contextlib
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from distopt.buckets import BucketSet
from distopt.checkpoint.foreign import typed
from distopt.kernels.layout import compute_dtype
from distopt.optim.adapters.base import Known, OptimizerAdapter
from distopt.optim.optimizer import Unshard


class OptaxAdapter(OptimizerAdapter):
    """An adapter that updates all parameters at once, as a dict by name, so that a chain may clip by their common norm.

    Parameters of 16 bits are float32 in it, and those without a mean have zeros, as a function's gradient in JAX has.
    """

    def __init__(self, opt: Any):
        super().__init__(opt)
        # The parameters' arrays by name, and copies of the means of the update that is being made.
        self._values: dict[str, np.ndarray] = {}
        self._means: dict[str, np.ndarray] = {}
        # A tree of arrays, None before the first update; and its shapes, None before the parameters are known.
        self._state: Any = None
        self._like: Any = None
        # This adapter itself writes into the parameters' arrays.
        self._first = None

    def check(self, buckets: BucketSet) -> None:
        views = {name: view for bucket in buckets for name, view in bucket.views(bucket.gradient).items()}
        for name, view in views.items():
            if not isinstance(view, np.ndarray):
                raise TypeError(f"{name}: a parameter must be in the host's memory for optax, got one on a GPU")
        self._begin(views)

    def follow(self, order: Mapping[str, Known]) -> None:
        self._values |= {name: known.value for name, known in order.items()}

    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        # The bucket's memory is that of the next gradients before `step`.
        self._means[name] = np.array(mean, compute_dtype(mean.dtype))

    def step(self) -> None:
        # What JAX is given is never written to again: its own arrays may be the same memory.
        values = {name: np.array(x, compute_dtype(x.dtype)) for name, x in self._values.items()}
        if self._like is None:
            self._begin(values)
        means, self._means = {name: np.zeros_like(x) for name, x in values.items()} | self._means, {}
        with _as_wide_as(values):
            state = self.opt.init(values) if self._state is None else self._state
            changed, self._state = _updated(self.opt, means, state, values)
        for name, x in self._values.items():
            x[...] = np.asarray(changed[name])

    def _begin(self, values: Mapping[str, np.ndarray]) -> None:
        """Learn the shapes of the states of these parameters; ValueError if those that there are have others."""
        with _as_wide_as(values):
            self._like = jax.eval_shape(self.opt.init, dict(values))
            # It raises for a transformation that asks for more, as the loss.
            jax.eval_shape(self.opt.update, dict(values), self._like, dict(values))
        if self._state is not None:
            self._state = _fitted(self._state, self._like)

    @property
    def has_state(self) -> bool:
        return True

    def state_dict(self, unshard: Unshard | None = None) -> Any:
        return {} if self._state is None else {"state": self._state}

    def load_state_dict(self, state: Any) -> None:
        loaded, self._means = (state or {}).get("state"), {}
        self._state = loaded if self._like is None or loaded is None else _fitted(loaded, self._like)


@functools.partial(jax.jit, static_argnums=0)
def _updated(opt: Any, means: Any, state: Any, values: Any) -> tuple[Any, Any]:
    """Return new values of the parameters, and the new state."""
    changes, state = opt.update(means, state, values)
    return jax.tree.map(lambda x, change: (x + change).astype(x.dtype), values, changes), state


def _as_wide_as(values: Mapping[str, np.ndarray]) -> AbstractContextManager[None]:
    """Return a context in which JAX does not make float32 of float64."""
    wide = any(x.dtype == np.float64 for x in values.values())
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _fitted(state: Any, like: Any) -> Any:
    """Return a state, maybe of a file, as a tree of the classes of ``like``; ValueError if arrays have other shapes."""
    state = typed(state, like)
    wanted, got = (
        {jax.tree_util.keystr(path): np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (like, state)
    )
    if wanted != got:
        name = next(n for n in wanted | got if wanted.get(n) != got.get(n))
        raise ValueError(
            f"the optimizer's state must be one of this transformation and these parameters, with {name} of shape "
            f"{wanted.get(name, 'none')}, got {got.get(name, 'none')}"
        )
    return state
