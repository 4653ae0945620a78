"""What makes an object an optimizer, for type checkers."""

from typing import Any, Protocol

import numpy as np


class SupportsApply(Protocol):
    """SINGA's protocol; ``step()``, if there is one, follows the last parameter of an update."""

    def apply(self, name: str, value: np.ndarray, grad: np.ndarray, /) -> object:
        """Change ``value`` in place by its gradient."""


class SupportsUpdate(Protocol):
    """The plainest protocol; ``step()``, if there is one, follows the last parameter of an update."""

    def update(self, param: Any, grad: np.ndarray, /) -> object:
        """Change ``param.data`` in place, or ``param`` itself if it is an array, by its gradient."""


AnyOptimizer = SupportsApply | SupportsUpdate
