"""One rank alone: every verb is the identity."""

from collections.abc import Sequence

import numpy as np

from distopt.comm.communicator import Communicator, checked, checked_parts, checked_root
from distopt.guard import Control


class LocalControl(Control):
    """Nobody to agree with."""

    rank, size = 0, 1

    def maximum(self, votes: np.ndarray) -> None:
        """Nothing to do."""

    def gather(self, text: str) -> list[str]:
        """This rank's text."""
        return [text]


class LocalCommunicator(Communicator):
    """A world of one, without MPI."""

    rank, size, local_rank, rank_ordered = 0, 1, 0, True

    def __init__(self, why: str = "") -> None:
        self.why, self.control = why, LocalControl()

    def all_reduce(self, x: np.ndarray) -> None:
        """The sum over one rank."""
        checked(x)

    def all_gather(self, x: np.ndarray, ragged: bool = False) -> list[np.ndarray]:
        """A copy of x."""
        return [checked(x, writable=False).copy()]

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """A copy of the one part."""
        return [x.copy() for x in checked_parts(parts, 1)]

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Nothing to do."""
        checked(x)
        checked_root(root, 1)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def _duplicate(self) -> Communicator:
        return self

    def peers(self, x: np.ndarray) -> list[np.ndarray]:
        """x itself."""
        return [x]
