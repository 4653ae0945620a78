"""A check that an optimizer changes parameters in place: functional ones return copies, and would train nothing."""

import warnings
from typing import Any

import numpy as np

from distopt.device import array_of, is_array, is_tensor


class FirstUpdate:
    """A check of the first update by another library's optimizer, at the entry of each parameter's largest gradient."""

    def __init__(self, opt: Any):
        self._opt = opt
        # parameters, and an entry's index and previous value
        self._seen: list[tuple[Any, int, Any]] = []

    def look(self, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """Remember an entry of a parameter before its update, unless its gradient is zero or it is on a GPU."""
        if isinstance(value, np.ndarray) and value.size and np.any(mean):
            entry = int(np.argmax(np.abs(mean)))
            self._seen.append((param, entry, value.flat[entry]))

    def check_returned(self, name: str, value: np.ndarray, returned: Any) -> None:
        """Raise TypeError if the optimizer returned the last parameter's new value and left the array as it was."""
        if not self._seen or getattr(returned, "shape", None) != value.shape or returned is value:
            return
        param, entry, previous = self._seen[-1]
        if _array(param).flat[entry] == previous != np.asarray(returned).flat[entry]:
            raise TypeError(
                f"{name}: {type(self._opt).__name__} must change the parameter's array in place, got another array "
                "back and that one as it was; write value[...] = new"
            )

    def finish(self) -> bool:
        """End the check, with a warning if nothing has changed; False if no parameter was looked at."""
        if self._seen and all(_array(param).flat[entry] == previous for param, entry, previous in self._seen):
            warnings.warn(
                f"{type(self._opt).__name__} has changed no parameter in its first update, although gradients are not "
                "zero: it must change arrays in place.  If its learning rate is 0 now, or it gathers gradients, all is "
                "well",
                RuntimeWarning,
                stacklevel=2,
            )
        return bool(self._seen)


def _array(param: Any) -> np.ndarray:
    array: np.ndarray = array_of(param if is_array(param) or is_tensor(param) else param.data)
    return array
