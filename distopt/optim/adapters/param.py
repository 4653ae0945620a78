"""The adapter for optimizers with ``update(param, grad)``."""

from typing import Any

import numpy as np

from distopt.device import as_kind
from distopt.optim.adapters.base import OptimizerAdapter


class ParamAdapter(OptimizerAdapter):
    """An adapter that calls ``update(param, grad)`` for every parameter, then ``step()`` if there is one."""

    def update_one(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        return self.opt.update(param, as_kind(mean, param))
