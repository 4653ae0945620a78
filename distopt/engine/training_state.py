"""The interface of what a checkpoint holds of a training."""

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from distopt.comm import Communicator
from distopt.engine.agreement import Agreement
from distopt.engine.hooks import StepHook
from distopt.engine.parameters import GradientCollector
from distopt.engine.resharding import SavedRanks

# Dicts, lists, numbers, texts and arrays.
Tree = dict[str, Any]
# Arrays by parameter name.
Arrays = dict[str, np.ndarray]
# Characters of an optimizer's text.
LONGEST = 2000


class TrainingState(abc.ABC):
    """All that changes between steps, as a ``Checkpointer`` sees it."""

    comm: Communicator
    agreement: Agreement
    hooks: list[StepHook]
    collector: GradientCollector
    # Lines for a reader of checkpoints.
    options: Sequence[str]

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """The steps so far, the same on all ranks."""

    @property
    def collective(self) -> bool:
        """Whether ``state`` is collective, as each rank has a share of it."""
        return False

    @abc.abstractmethod
    def check_open(self) -> None:
        """Raise RuntimeError if the training is closed."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if a step failed halfway, and nothing was loaded since."""

    def land(self) -> None:  # noqa: B027
        """Wait for what another thread exchanges over ``comm``, which has one transaction at a time."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait for what is under way, and raise what it owes.  Collective."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Wait for what is under way, whose outcome does not count any more."""

    @abc.abstractmethod
    def facts(self) -> Tree:
        """Return the facts that a reader of a checkpoint needs first: the fields of its manifest."""

    @abc.abstractmethod
    def state(self) -> Tree:
        """Return copies of all that changes between steps, but for the parameters."""

    @abc.abstractmethod
    def for_joiner(self, state: Tree) -> Tree:
        """Return a state with only ``shared`` of the buckets' states: what a process that joins goes on from."""

    @abc.abstractmethod
    def check_state(self, state: Tree) -> None:
        """Raise ValueError for a state that training cannot go on from."""

    @abc.abstractmethod
    def load(self, state: Tree) -> None:
        """Go on from a state; parameters are written before or after."""

    def begin_as_newcomer(self) -> None:  # noqa: B027
        """Make this rank ready for its first step, with a state that it has from others."""

    def share_with_newcomers(self) -> None:  # noqa: B027
        """Give ranks that have come shares too, where all ranks have all of the state now.  Collective."""

    @abc.abstractmethod
    def writing_parameters(self) -> AbstractContextManager[None]:
        """Return a context that writes parameters; if that is interrupted, training cannot go on."""

    @abc.abstractmethod
    def divide(self, state: Tree, parameters: Arrays | None) -> tuple[Tree, dict[int, Tree]]:
        """Divide a state and parameters into what is the same on all ranks, and what each that lives here has alone."""

    @abc.abstractmethod
    def unite(
        self, place: Path, facts: Tree, of_all: Tree, ranks: Mapping[int, SavedRanks]
    ) -> tuple[Tree, Arrays | None]:
        """Return the state and the parameters of which ``divide``, on other ranks maybe, has made parts."""
        # place: the checkpoint, for errors; ranks: what each rank that lives here goes on from.


def optimizer_text(opt: Any) -> str:
    """Return the beginning of an optimizer's ``repr``, for a reader of checkpoints."""
    return repr(opt)[:LONGEST]
