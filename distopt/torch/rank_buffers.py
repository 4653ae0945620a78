"""Buffers of a PyTorch model that its passes change, where several logical ranks use one model."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from distopt.comm import Communicator
from distopt.engine.hooks import StepHook
from distopt.engine.parameters import GradientCollector
from distopt.torch.tensors import as_bytes


class RankBuffers(StepHook):
    """Buffers as running means, which are rank 0's after each step, as with DistributedDataParallel.

    The passes of all ranks begin with the same ones, so that it does not matter who lives where.
    """

    def __init__(self, comm: Communicator, buffers: Mapping[str, torch.Tensor]):
        self._comm, self._buffers = comm, buffers
        # Those that rank 0's pass has changed, if it lives here, and those of all ranks after a step.
        self._left: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Return a context of a rank's forward and backward pass, whose changes end with it, but for rank 0's."""
        before = {name: x.clone() for name, x in self._buffers.items()}
        try:
            yield
        finally:
            # Not by their versions, which batch normalization does not count up.
            changed = [n for n, x in self._buffers.items() if not np.array_equal(as_bytes(x), as_bytes(before[n]))]
            if rank == 0:
                self._left = {name: self._buffers[name].clone() for name in changed}
            self._write({name: before[name] for name in changed})

    def after_vote(self, collector: GradientCollector, optimizer: Any) -> None:
        """Send rank 0's.  Collective."""
        root = self._comm.ranks.process_of(0)
        names = self._comm.broadcast_object(list(self._left), root)
        self._next = {name: self._left.get(name, torch.empty_like(self._buffers[name])) for name in names}
        for x in self._next.values():
            self._comm.broadcast(as_bytes(x), root)

    def after_call(self, step: int, applied: bool) -> None:
        """Take them: all ranks have made the step."""
        self._write(self._next)
        self._left, self._next = {}, {}

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, x in values.items():
                self._buffers[name].copy_(x)
