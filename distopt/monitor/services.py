"""Callbacks that pass numbers on to others' objects, which whoever made them closes."""

from collections.abc import Mapping
from typing import Any

from distopt.monitor.callback import checked


class TensorBoard:
    """A callback for a ``SummaryWriter``, or any object with ``add_scalar(name, number, step)``; else a TypeError."""

    def __init__(self, writer: Any):
        self._add_scalar = _method("writer", writer, "add_scalar")

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Add one scalar per number."""
        found = checked(step, numbers)
        at = found.pop("step")
        for name, number in found.items():
            self._add_scalar(name, number, at)


class WeightsAndBiases:
    """A callback for a run of ``wandb.init()``, or any object with ``log(numbers, step=step)``; else a TypeError."""

    def __init__(self, run: Any):
        self._log = _method("run", run, "log")

    def __call__(self, step: int, numbers: Mapping[str, float], /) -> None:
        """Log all numbers at once."""
        found = checked(step, numbers)
        at = found.pop("step")
        self._log(found, step=at)


def _method(name: str, owner: Any, method: str) -> Any:
    found = getattr(owner, method, None)
    if not callable(found):
        raise TypeError(f"{name} must be an object with the method {method}, got {owner!r:.60}")
    return found
