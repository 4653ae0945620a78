"""What the laws, benchmarks, ``distopt prove`` and documentation need to know of an optimizer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Timed(NamedTuple):
    """An optimizer whose update benchmarks time.

    Args:
        make: returns the optimizer.
        arrays: of the size of the parameters, how many an update reads or writes.
    """

    make: Callable[[], Any]
    arrays: int


class Equations(NamedTuple):
    """An optimizer, and its equations in float64 numpy with the same numbers.

    Args:
        make: returns the optimizer.
        rule: takes the number of the call, from 1, w, the slots and the gradient; returns w and the slots.
        slots: number of arrays that the rule keeps, zeros at first.
    """

    make: Callable[[], Any]
    rule: Callable[..., tuple[Any, ...]]
    slots: int


class Part(NamedTuple):
    """All that the rest of the library is to know of an optimizer; an entry of ``distopt.optim.ALL``.

    Args:
        laws: optimizers that all laws are tried with, by name: functions that make them.
        timed: what benchmarks time, by the name of the row.
        equations: what an update is held against, by name; those of distopt are in ``distopt.lab.laws.references``.
        of_blas: its bits are those of the BLAS that numpy or cupy calls: other machines may have others.
    """

    laws: Mapping[str, Callable[[], Any]] = NOTHING
    timed: Mapping[str, Timed] = NOTHING
    equations: Mapping[str, Equations] = NOTHING
    of_blas: bool = False
