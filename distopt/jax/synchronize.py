"""Mean gradients over ranks of a pytree, in any mode."""

from typing import Any

import numpy as np

from distopt.comm import Communicator
from distopt.compress import Compressor, Dense
from distopt.engine.engine import Engine
from distopt.engine.facade import Checkpointed, ranks, watch_first_gradients
from distopt.engine.parameters import Parameter
from distopt.engine.spec import Options, StepSpec, shows
from distopt.engine.views import enroll
from distopt.jax.trees import Pytree
from distopt.optim.adapters import OptimizerAdapter


class Means(OptimizerAdapter):
    """The adapter of no optimizer: it keeps the means, which the script gives to its own."""

    def __init__(self) -> None:
        super().__init__(None)
        # It would look for what an update has changed.
        self._first = None
        self.found: dict[str, np.ndarray] = {}

    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        # The mean lies in a bucket, which the next exchange needs.
        self.found[name] = np.array(mean, value.dtype)

    def __repr__(self) -> str:
        return "optimizer of the script"


class PytreeSynchronizer(Checkpointed):
    """Exchange of gradients of a pytree.  Making it, and each call, is collective.

    A call returns the means over ranks, of what the compressor sends, as a pytree like the gradients.  What was not
    sent yet is kept between the calls, in ``state_dict()`` too.  Optimizer and its state are the script's own.

    Args:
        params: the parameters, a pytree of float32, float64, bfloat16 or float16, the same on all ranks; they are not
            kept.
        compressor: what is sent; None for ``Dense()``.
        communicator: the ranks; None for ``distopt.world()``.
        nonfinite: what becomes of gradients that are not finite on some rank: 'raise' FloatingPointError on all;
            'skip', which returns infinities on all, for ``optax.apply_if_finite``, and raises after 10 in a row;
            'propagate'.
        exchange: as of ``DistOpt.step``.
        break_even: as of ``DistOpt.step``.
        threshold: elements that fill a bucket.
        overlap: as of ``DistOpt``.

    Raises:
        TypeError: on every rank alike, for a leaf of another dtype; or for an argument of a wrong type.
        ValueError: on every rank alike, if ranks differ, in a bit of the parameters too; or there are no leaves.
    """

    def __init__(
        self,
        params: Any,
        compressor: Compressor | None = None,
        communicator: Communicator | None = None,
        *,
        nonfinite: str = "raise",
        exchange: str = "auto",
        break_even: bool = True,
        threshold: int = 2097152,
        overlap: str | bool = "auto",
    ):
        self.communicator, comm = ranks(communicator, False)
        self.compressor = Dense() if compressor is None else compressor
        self._means, self._tree = Means(), Pytree(params, "params")
        options = Options.checked(comm, overlap=overlap, nonfinite=nonfinite, broadcast=False)
        engine = Engine(self._means, comm, options, threshold=threshold, kind=type(self).__name__)
        watch_first_gradients(engine)
        chosen = {"compressor": compressor, "nonfinite": nonfinite, "exchange": exchange, "break_even": break_even}
        super().__init__(engine, chosen | {"threshold": threshold})
        self._spec = StepSpec(lambda: self.compressor, break_even=break_even, exchange=exchange)
        # Memory that nobody writes to, and so needs none: the parameters are the script's.
        self._parameters = {
            name: Parameter(name, np.zeros(x.shape, x.dtype)) for name, x in self._tree.arrays(params).items()
        }

        sent = self.compressor
        enroll(engine, self._parameters.values(), "jax's parameters", lambda _: engine.compressor_at_this_step(sent))
        self._tree.check_alike(params, engine.agreement)

    def __call__(self, gradients: Any) -> Any:
        """Return the means of gradients over ranks.  Collective.

        Args:
            gradients: a pytree like the parameters, with arrays of their shapes and dtypes.

        Returns:
            The same pytree; arrays of jax are on the devices of these gradients.

        Raises:
            TypeError: on every rank alike, for gradients of another dtype, or in ``jit``.
            ValueError: on every rank alike, for gradients of another structure or shape.
            FloatingPointError: on every rank alike, for what is not finite, with ``nonfinite='raise'``.

        Example:
            >>> import distopt.jax
            >>> import jax.numpy as jnp
            >>> sync = distopt.jax.synchronize({"w": jnp.ones(2)})
            >>> sync({"w": jnp.array([1.0, 2.0])})
            {'w': Array([1., 2.], dtype=float32)}
        """

        def pairs() -> list[tuple[Parameter, np.ndarray]]:
            return [(self._parameters[name], x) for name, x in self._tree.arrays(gradients).items()]

        applied, self._means.found, found = self.engine.step(pairs, self._spec), {}, self._means.found
        if not applied:
            found = {name: np.full_like(p.data, np.inf) for name, p in self._parameters.items()}
        return self._tree.like(gradients, found)


@shows(PytreeSynchronizer)
def synchronize(params: Any, compressor: Compressor | None = None, **options: Any) -> PytreeSynchronizer:
    """Make what exchanges gradients of a pytree: ``gradients = sync(gradients)`` are means over ranks.  Collective.

    It is called outside of ``jit``, between a function that computes gradients and one that updates.

    Args:
        params: the parameters, the same on all ranks (``distopt.jax.broadcast``).
        compressor: what is sent; None for all of it.
        **options: the other arguments of ``PytreeSynchronizer``.

    Raises:
        TypeError: as ``PytreeSynchronizer``.
        ValueError: as ``PytreeSynchronizer``.

    Example:
        >>> import distopt.jax
        >>> import jax.numpy as jnp
        >>> from distopt.compress import ErrorFeedback, TopK
        >>> sync = distopt.jax.synchronize(jnp.zeros(4), ErrorFeedback(TopK(0.25)))
        >>> sync(jnp.array([1.0, 2.0, 3.0, 4.0]))
        Array([0., 0., 0., 4.], dtype=float32)
        >>> sync(jnp.array([1.0, 2.0, 3.0, 4.0]))  # with what was not sent
        Array([0., 0., 6., 0.], dtype=float32)
    """
    return PytreeSynchronizer(params, compressor, **options)
