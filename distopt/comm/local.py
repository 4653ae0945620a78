"""One rank alone: every verb is the identity."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm.communicator import Communicator, checked, checked_parts, checked_root
from distopt.guard import Control


class LocalControl(Control):
    """Nobody to agree with."""

    rank, size = 0, 1

    def maximum(self, votes: np.ndarray) -> None:
        """Nothing to do."""

    def _gather(self, text: str) -> list[str]:
        """This rank's text."""
        return [text]


class LocalCommunicator(Communicator):
    """A world of one, without MPI.  It carries numpy's arrays and cupy's; ``gpu``: where ``alloc`` has its memory."""

    rank, size, local_rank, rank_ordered = 0, 1, 0, True

    def __init__(self, why: str = "", gpu: int | None = None) -> None:
        self.why, self.control, self.gpu = why, LocalControl(), gpu
        if gpu is not None:
            device.use_gpu(gpu)
            self.xp = device.array_module()

    def all_reduce(self, x: np.ndarray) -> None:
        """The sum over one rank."""
        checked(x, gpu=device.place(x))

    def all_gather(self, x: np.ndarray, ragged: bool = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """A copy of x."""
        flat = checked(x, writable=False, gpu=device.place(x))
        if into is None:
            return [device.copied(flat)]
        device.copy(into, flat)
        return [into]

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: bool = False) -> list[np.ndarray]:
        """A copy of the one part."""
        return [device.copied(x) for x in checked_parts(parts, 1, device.place(parts[0]) if parts else None)]

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Nothing to do."""
        checked(x, gpu=device.place(x))
        checked_root(root, 1)

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Zeroed flat memory, on the GPU if there is one."""
        if self.gpu is None:
            return super().alloc(n, dtype)
        if device.current_gpu() != self.gpu:
            raise ValueError(
                f"this communicator works on GPU {self.gpu}, but this thread on GPU {device.current_gpu()}"
            )
        found: np.ndarray = device.gpu_zeros(n, dtype)
        return found

    def barrier(self) -> None:
        """Nobody to wait for."""

    def _duplicate(self) -> Communicator:
        return self

    def peers(self, x: np.ndarray) -> list[np.ndarray]:
        """x itself."""
        return [x]
