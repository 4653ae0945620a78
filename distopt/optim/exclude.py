"""Parameters that a layer-wise rule excludes, by a predicate on the name or by suffixes."""

from collections.abc import Callable, Iterable, Sequence

# a predicate on the name, or suffixes of names
Exclude = Callable[[str], bool] | Sequence[str]

# the parameters of MXNet's normalization layers, and biases
SUFFIXES = ("gamma", "beta", "bias")


def predicate(exclude: Exclude) -> Callable[[str], bool]:
    """Return the predicate on parameter names that ``exclude`` stands for."""
    if callable(exclude):
        return exclude
    if not isinstance(exclude, list | tuple) or not all(isinstance(suffix, str) for suffix in exclude):
        raise TypeError(f"exclude must be a predicate on the name, or a list of suffixes, got {exclude!r}")
    if "" in exclude:
        raise ValueError(f"exclude must be suffixes that are not empty, got {exclude!r}")
    return Suffixes(tuple(exclude))


def described(excludes: Callable[[str], bool]) -> str:
    """Return a text for a predicate that is the same on every rank: its suffixes, or the function's qualified name."""
    if isinstance(excludes, Suffixes):
        return repr(excludes.suffixes)
    return getattr(excludes, "__qualname__", type(excludes).__name__)


def left_out(previous: Iterable[str], names: Iterable[str], excludes: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the sorted names of all excluded parameters, after a predicate is asked about some."""
    answers = {name: excludes(name) for name in names}
    return tuple(sorted({n for n in previous if n not in answers} | {n for n, excluded in answers.items() if excluded}))


class Suffixes:
    """A predicate that is true for names with one of some suffixes."""

    def __init__(self, suffixes: tuple[str, ...]):
        self.suffixes = suffixes

    def __call__(self, name: str) -> bool:
        return name.endswith(self.suffixes)
