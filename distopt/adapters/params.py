"""The plainest protocol."""

from typing import Any

import numpy as np

from distopt.adapters.adapter import Adapter


class ByParam(Adapter):
    """``update(param, grad)`` for every parameter, then ``step()`` if there is one."""

    def _apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        """Update one parameter, handed over as the caller gave it."""
        return self.opt.update(param, mean)
