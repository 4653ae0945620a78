"""What a callback is."""

from collections.abc import Mapping
from typing import Protocol

from distopt.numbers import figure, whole


class Callback(Protocol):
    """Takes the numbers of a step; it may have a ``close()`` as well, to be called at the end."""

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """``step`` is the number of updates done so far, ``numbers`` has losses, accuracies, bytes by name."""


def checked(step: int, numbers: Mapping[str, float]) -> dict[str, int | float]:
    """A call's arguments in one dict, the step first.  Raises TypeError or ValueError that names what is wrong."""
    if not isinstance(numbers, Mapping) or not all(isinstance(name, str) for name in numbers):
        raise TypeError(f"numbers must have texts as names, got {numbers!r:.60}")
    if "step" in numbers:
        raise ValueError("numbers must not have one named 'step', which is the call's first argument")
    return {"step": whole("step", step, 0)} | {name: figure(name, x) for name, x in numbers.items()}
