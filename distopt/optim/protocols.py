"""The protocols of objects that can be wrapped as optimizers, for type checkers."""

from typing import Any, Protocol

import numpy as np


class SupportsApply(Protocol):
    """A protocol of optimizers with ``apply(name, value, grad)``, as SINGA's have.

    ``step()``, if the object has it, is called after the last parameter of an update.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import BatchGradients
        >>> class Plain:
        ...     def apply(self, name, value, grad):
        ...         value -= 0.1 * grad
        >>> opt, w = BatchGradients(Plain(), num_batches=1), np.zeros(2)
        >>> opt.apply("w", w, np.array([1.0, 2.0]))
        >>> opt.step()
        True
        >>> w.round(4).tolist()
        [-0.1, -0.2]
    """

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray, /) -> object:
        """Change ``value`` in place by the gradient of the parameter ``name``."""


class SupportsUpdate(Protocol):
    """A protocol of optimizers with ``update(param, grad)``.

    ``step()``, if the object has it, is called after the last parameter of an update.

    Example:
        >>> import numpy as np
        >>> from distopt.optim import BatchGradients
        >>> class Plain:
        ...     def update(self, param, grad):
        ...         param.data -= 0.1 * grad
        >>> opt, w = BatchGradients(Plain(), num_batches=1), np.zeros(2)
        >>> opt.apply("w", w, np.array([1.0, 2.0]))
        >>> opt.step()
        True
        >>> w.round(4).tolist()
        [-0.1, -0.2]
    """

    def update(self, param: Any, grad: np.ndarray, /) -> object:
        """Change ``param.data`` in place, or ``param`` itself if it is an array, by its gradient."""


AnyOptimizer = SupportsApply | SupportsUpdate
