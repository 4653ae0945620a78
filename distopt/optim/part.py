"""What the laws, benchmarks, ``distopt prove`` and documentation need to know of an optimizer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})


class TimedOptimizer(NamedTuple):
    """An optimizer whose update benchmarks time."""

    make: Callable[[], Any]
    # of the parameters' size, that an update reads or writes
    arrays: int


class Equations(NamedTuple):
    """An optimizer, and its equations in float64 numpy with the same numbers."""

    make: Callable[[], Any]
    # It takes the number of the call, from 1, w, the slots and the gradient; it returns w and the slots.
    rule: Callable[..., tuple[Any, ...]]
    # arrays that the rule keeps, zeros at first
    slots: int


class OptimizerPart(NamedTuple):
    """All that the rest of the library is to know of an optimizer; an entry of ``distopt.optim.ALL``."""

    # optimizers that all laws are tried with: functions that make them
    laws: Mapping[str, Callable[[], Any]] = NOTHING
    # what benchmarks time, by the name of the row
    timed: Mapping[str, TimedOptimizer] = NOTHING
    # what an update is held against; those of distopt are in `distopt.lab.laws.references`
    equations: Mapping[str, Equations] = NOTHING
    # its bits are those of the BLAS that numpy or cupy calls: other machines may have others
    of_blas: bool = False
