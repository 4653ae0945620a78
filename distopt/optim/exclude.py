"""Parameters that a layer-wise rule leaves out."""

from collections.abc import Callable, Iterable, Sequence

Exclude = Callable[[str], bool] | Sequence[str]  # a predicate on the name, or suffixes of names

SUFFIXES = ("gamma", "beta", "bias")  # of MXNet's normalization layers, and biases


def predicate(exclude: Exclude) -> Callable[[str], bool]:
    """Is a parameter of this name left out?  ``exclude`` says it itself, or has the suffixes of such names.

    Raises TypeError for anything but a callable or a list or tuple of texts, and ValueError for an empty suffix, which
    every name has.
    """
    if callable(exclude):
        return exclude
    if not isinstance(exclude, list | tuple) or not all(isinstance(suffix, str) for suffix in exclude):
        raise TypeError(f"exclude must be a predicate on the name, or a list of suffixes, got {exclude!r}")
    if "" in exclude:
        raise ValueError(f"exclude must not have an empty suffix, got {exclude!r}")
    return Suffixes(tuple(exclude))


def described(excludes: Callable[[str], bool]) -> str:
    """What a predicate is, in a text that is the same on every rank."""
    if isinstance(excludes, Suffixes):
        return repr(excludes.suffixes)
    return getattr(excludes, "__qualname__", type(excludes).__name__)


def left_out(before: Iterable[str], names: Iterable[str], excludes: Callable[[str], bool]) -> tuple[str, ...]:
    """The names that are left out: those of ``names`` that a predicate excludes now, and ``before``'s others."""
    found = {name: excludes(name) for name in names}
    return tuple(sorted({n for n in before if n not in found} | {n for n, excluded in found.items() if excluded}))


class Suffixes:
    """Has a name one of these suffixes?"""

    def __init__(self, suffixes: tuple[str, ...]):
        self.suffixes = suffixes

    def __call__(self, name: str) -> bool:
        """Of this name?"""
        return name.endswith(self.suffixes)
