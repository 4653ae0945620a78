"""Which parameters take no part in layer-wise learning rates."""

from collections.abc import Callable, Sequence

Exclude = Callable[[str], bool] | Sequence[str]

SUFFIXES = ("gamma", "beta", "bias")  # of what normalizes or shifts


def predicate(exclude: Exclude) -> Callable[[str], bool]:
    """A predicate on parameter names, given as such or as a list of suffixes; TypeError for anything else."""
    if callable(exclude):
        return exclude
    if isinstance(exclude, str) or not all(isinstance(s, str) for s in exclude):
        raise TypeError(f"exclude must be a predicate on the name or a list of suffixes, got {exclude!r}")
    suffixes = tuple(exclude)
    return lambda name: name.endswith(suffixes)
