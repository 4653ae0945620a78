"""The plainest protocol."""

from typing import Any

import numpy as np

from distopt.adapters.adapter import Adapter


class ByParam(Adapter):
    """``update(param, grad)`` for every parameter, then ``step()`` if there is one."""

    @staticmethod
    def fits(opt: Any) -> bool:
        """Has it ``update``?"""
        return callable(getattr(opt, "update", None))

    def apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """Update one parameter, handed over as the caller gave it."""
        self.opt.update(param, mean)
