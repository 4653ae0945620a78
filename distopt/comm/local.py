"""Communicator of one rank alone, for which every collective is the identity."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm.communicator import Communicator, Groups, Ragged, as_flat, check_root, flat_parts
from distopt.comm.control import ControlChannel


class LocalControl(ControlChannel):
    """Votes of one rank alone."""

    size = 1

    def __init__(self, rank: int = 0):
        self.rank = rank  # the number that errors give it

    def maximum(self, votes: np.ndarray) -> None: ...
    def gather_strings(self, text: str) -> list[str]:
        """This rank's text, after empty ones for the ranks before it."""
        return [""] * self.rank + [text]

    def subgroup(self, members: tuple[int, ...]) -> "LocalControl":
        return self


class LocalCommunicator(Communicator):
    """Communicator of one rank alone, without MPI, for numpy and cupy arrays.

    Args:
        reason: why this transport was chosen, for ``repr``.
        gpu: number of the GPU on which ``alloc`` allocates, which becomes this thread's current one; default: the host.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import LocalCommunicator
        >>> comm = LocalCommunicator()
        >>> comm.rank, comm.size
        (0, 1)
        >>> [part.tolist() for part in comm.all_gather(np.array([1, 2]))]
        [[1, 2]]
    """

    rank, size, local_rank, rank_ordered = 0, 1, 0, True

    def __init__(self, reason: str = "", gpu: int | None = None) -> None:
        self.reason, self.control, self.gpu = reason, LocalControl(), gpu
        if gpu is not None:
            device.use_gpu(gpu)
            self.xp = device.array_module()

    def all_reduce(self, x: np.ndarray, op: str = "sum") -> None:
        """Check x, and leave it as it is: it is the sum over one rank."""
        as_flat(x, gpu=device.gpu_of(x), op=op)

    def all_gather(self, x: np.ndarray, ragged: Ragged = False, into: np.ndarray | None = None) -> list[np.ndarray]:
        """Return a flat copy of x."""
        flat = as_flat(x, writable=False, gpu=device.gpu_of(x))
        if into is None:
            return [device.copied(flat)]
        device.copy(into, flat)
        return [into]

    def all_to_all(self, parts: Sequence[np.ndarray], ragged: Ragged = False) -> list[np.ndarray]:
        """Return a flat copy of the only part."""
        return [device.copied(x) for x in flat_parts(parts, 1, device.gpu_of(parts[0]) if parts else None)]

    def broadcast(self, x: np.ndarray, root: int = 0) -> None:
        """Check x and ``root``, and leave x as it is."""
        as_flat(x, gpu=device.gpu_of(x))
        check_root(root, 1)

    def alloc(self, n: int, dtype: Any) -> np.ndarray:
        """Allocate zeros, ``(n,)``, on the communicator's GPU if it has one.

        Raises:
            ValueError: this thread's current GPU is another one.
        """
        if self.gpu is None:
            return super().alloc(n, dtype)
        if device.current_gpu() != self.gpu:
            raise ValueError(
                f"this thread's current GPU must be {self.gpu}, the communicator's, got {device.current_gpu()}; "
                f"call cupy.cuda.Device({self.gpu}).use() first"
            )
        array: np.ndarray = device.gpu_zeros(n, dtype)
        return array

    def barrier(self) -> None:
        """Return at once: there are no other ranks."""

    def make_duplicate(self) -> Communicator:
        """Return this communicator: it sends nothing."""
        return self

    def make_subgroup(self, groups: Groups) -> Communicator:
        """Return this communicator: there are no other ranks."""
        return self

    def peers(self, x: np.ndarray) -> list[np.ndarray]:
        """Return x itself, in a list."""
        return [x]
