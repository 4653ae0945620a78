"""Local steps of a pytree, after steps of the script's own optimizer."""

from collections.abc import Callable
from typing import Any

import numpy as np

from distopt.comm import Communicator
from distopt.engine.facade import Checkpointed, ranks
from distopt.engine.local_state import InnerState, LocalState
from distopt.engine.outer_loop import LocalOptions, outer_loop
from distopt.engine.spec import shows
from distopt.jax.trees import Pytree


class PytreeSteps(Checkpointed):
    """Exchanges of how far parameters have come, after every so many steps.  Making it is collective.

    The script trains as one process does, and calls this with its parameters after each step; a call that exchanges is
    collective.  The state has the global parameters, the outer optimizer and residuals.

    Args:
        params: the parameters, as of ``PytreeSynchronizer``.
        communicator: the ranks; None for ``distopt.world()``.
        check_every: steps between two comparisons of the global parameters.
        **options: every, outer, compressor, fragments, delay, alpha, threshold, break_even, exchange and over, as of
            ``distopt.LocalSteps``; ``every`` must be given.

    Raises:
        TypeError: an argument has the wrong type, or a leaf another dtype than those of ``PytreeSynchronizer``.
        ValueError: one is out of range, or ranks differ, in a bit of the parameters too.
    """

    @shows(LocalOptions)
    def __init__(self, params: Any, communicator: Communicator | None = None, *, check_every: int = 0, **options: Any):
        self.communicator, comm = ranks(communicator, False)
        # Copies of the parameters, while they are written to.
        self._arrays: dict[str, np.ndarray] = {}
        self._tree, local = Pytree(params, "params"), LocalOptions(**options)
        outer = self._outer = outer_loop(
            comm, lambda: ({}, self._arrays), local, check_every=check_every, broadcast=False, line="jax"
        )
        outer.engine.check_own_rank("parameters of jax")
        super().__init__(outer.engine, options, LocalState(outer, InnerState(), ()))
        self._tree.check_alike(params, outer.engine.agreement)
        self._changed(params, lambda: outer.begin(self._arrays))

    @property
    def step_counter(self) -> int:
        """Steps so far, as all ranks count them."""
        return self._outer.step

    def __call__(self, params: Any) -> Any:
        """Count a step, and do what is due after it.  Collective then.

        Args:
            params: this rank's parameters after the step.

        Returns:
            The parameters to go on from: a new pytree where global values were taken, and the same object elsewhere.

        Raises:
            ValueError: the pytree is not like that with which the local steps began.
        """
        outer, step = self._outer, self._outer.step + 1
        if outer.windows.sent_after(step) is None and all(fragment.due != step for fragment in outer.fragments):
            outer.advance()
            return params
        return self._changed(params, outer.advance)

    def join(self, params: Any) -> Any:
        """Take part in the others' exchanges, without steps, until no rank makes any (``LocalSteps.join``).

        Args:
            params: this rank's parameters.

        Returns:
            The global parameters.
        """
        return self._changed(params, self._outer.join)

    def global_parameters(self, params: Any) -> Any:
        """Return the global parameters, which all ranks have alike, as a pytree like this one."""
        self._outer.land()
        values, mine = self._outer.values, self._tree.arrays(params)
        return self._tree.like(params, {name: values[name].astype(x.dtype) for name, x in mine.items()})

    def close(self) -> None:
        """Refuse everything from now on, when what is in flight has landed."""
        super().close()
        self._outer.close()

    def _changed(self, params: Any, change: Callable[[], object]) -> Any:
        """Return the parameters after something has changed them in place."""
        # jax's arrays are for reading alone; and those of these copies, which become jax's, are from then on.
        self._arrays = {name: np.array(x, order="C") for name, x in self._tree.arrays(params).items()}
        change()
        arrays, self._arrays = self._arrays, {}
        return self._tree.like(params, arrays)


@shows(PytreeSteps)
def local_steps(params: Any, every: int, **options: Any) -> PytreeSteps:
    """Make what averages over ranks how far they have come, after every ``every`` steps (DiLoCo).  Collective.

    Args:
        params: the parameters, the same on all ranks (``distopt.jax.broadcast``).
        every: steps of a window.
        **options: the other arguments of ``PytreeSteps``.

    Raises:
        TypeError: as ``PytreeSteps``.
        ValueError: as ``PytreeSteps``.

    Example:
        >>> import distopt.jax
        >>> import jax.numpy as jnp
        >>> from distopt.optim import SGD
        >>> params = {"w": jnp.zeros(2)}
        >>> windows = distopt.jax.local_steps(params, every=2, outer=SGD(0.5))
        >>> for step in range(2):
        ...     params = windows({"w": params["w"] - 1.0})  # the mean over ranks moves the global ones by a half of it
        >>> params
        {'w': Array([-1., -1.], dtype=float32)}
    """
    return PytreeSteps(params, every=every, **options)
