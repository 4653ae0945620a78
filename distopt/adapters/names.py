"""SINGA's protocol."""

from typing import Any

import numpy as np

from distopt.adapters.adapter import Adapter


class ByName(Adapter):
    """``apply(name, value, grad)`` for every parameter, then ``step()``."""

    @staticmethod
    def fits(opt: Any) -> bool:
        """Has it ``apply``?"""
        return callable(getattr(opt, "apply", None))

    def apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """Update one parameter."""
        self.opt.apply(name, value, mean)
