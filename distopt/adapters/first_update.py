"""An optimizer that changes copies, as functional ones do, would train nothing, in silence."""

import warnings
from typing import Any

import numpy as np

from distopt.device import is_array


class FirstUpdate:
    """What the first update of a stranger does, seen at one entry of each parameter: that of the largest gradient."""

    def __init__(self, opt: Any):
        self._opt = opt
        self._seen: list[tuple[Any, int, Any]] = []  # parameters, and an entry of each as it was before

    def look(self, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """A parameter is about to be updated; one without a gradient, or on a GPU, is not looked at."""
        if isinstance(value, np.ndarray) and value.size and np.any(mean):
            entry = int(np.argmax(np.abs(mean)))
            self._seen.append((param, entry, value.flat[entry]))

    def check_returned(self, name: str, value: np.ndarray, returned: Any) -> None:
        """TypeError if what the optimizer has returned for the last parameter is its new value, which it left alone."""
        if not self._seen or getattr(returned, "shape", None) != value.shape or returned is value:
            return
        param, entry, before = self._seen[-1]
        if _array(param).flat[entry] == before != np.asarray(returned).flat[entry]:
            raise TypeError(
                f"{name}: {type(self._opt).__name__} must change the parameter's array in place, got another array "
                "back and that one as it was: write value[...] = new"
            )

    def finish(self) -> bool:
        """Was anything looked at?  RuntimeWarning if nothing of that has changed."""
        if self._seen and all(_array(param).flat[entry] == before for param, entry, before in self._seen):
            warnings.warn(
                f"{type(self._opt).__name__} has changed no parameter in its first update, although gradients are not "
                "zero: it must change arrays in place.  If its learning rate is 0 now, or it gathers gradients, all is "
                "well",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(self._seen)


def _array(param: Any) -> np.ndarray:
    found: np.ndarray = param if is_array(param) else param.data
    return found
