"""Mean gradients of a PyTorch model over ranks, in any mode, where the model has them."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from distopt import kernels
from distopt.buckets import Bucket, Reduced
from distopt.comm import Communicator, world
from distopt.compress import Compressor, Dense
from distopt.device.tensors import as_tensor
from distopt.engine.engine import Engine
from distopt.engine.facade import Checkpointed
from distopt.engine.spec import Options, StepSpec
from distopt.engine.torch_model import TorchModel
from distopt.optim.adapters.torch_optim import momentum_of


class ScriptsOptimizer:
    """In the place of an optimizer: the script's own, which updates the parameters when the script says so.

    Args:
        optimizer: it, if it is known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None):
        self._optimizer = optimizer

    @property
    def momentum(self) -> float:
        """Its momentum, which a compressor with a momentum of its own refuses."""
        return momentum_of(self._optimizer) if self._optimizer else 0.0

    def update(self, param: Any, grad: np.ndarray) -> None:
        """Leave the parameter as it is."""


class GradientExchange(Checkpointed):
    """Exchange of the gradients of a model, of which every rank has one.  Making it is collective.

    Rank 0's parameters, and buffers, are sent to all ranks.

    Args:
        params: a module, or an iterable of tensors or of (name, tensor) pairs; those that require a gradient take part.
        compressor: what is sent; None for ``Dense()``.
        optimizer: the script's.  A compressor that corrects momentum refuses one that has a momentum.
        exchange: as of ``DistOpt.step``.
        break_even: as of ``DistOpt.step``.
        threshold: elements that fill a bucket.
        overlap: as of ``DistOpt``, for compressors without a residual.
        comm: the ranks; by default ``world()``.

    Attributes:
        tensors: the parameters by name, the last ones first, as their gradients come.
        views: the places of their gradients in the buckets, by name; float32 for parameters of 16 bits.

    Raises:
        TypeError: a parameter is sparse, not on the CPU, or has gaps in memory; or an argument is of a wrong type.
        ValueError: on every rank alike, if ranks differ.
    """

    def __init__(
        self,
        params: Any,
        compressor: Compressor | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        exchange: str = "auto",
        break_even: bool = True,
        threshold: int = 2097152,
        overlap: str | bool = "auto",
        comm: Communicator | None = None,
    ):
        self.communicator = comm or world()
        options = Options.checked(self.communicator, overlap=overlap, nonfinite="skip", allow_missing=True)
        stand_in = ScriptsOptimizer(optimizer)
        engine = Engine(stand_in, self.communicator, options, threshold=threshold, kind=type(self).__name__)
        super().__init__(engine, {"exchange": exchange, "break_even": break_even, "threshold": threshold})
        self.compressor = Dense() if compressor is None else compressor
        self._spec = StepSpec(lambda: self.compressor, break_even=break_even, exchange=exchange)
        self._model = TorchModel(params)
        self._model.enroll(engine)
        self.tensors = {p.name: p.tensor for p in self._model.parameters}
        self.views = {name: as_tensor(engine.store.buckets.view(name), like=p) for name, p in self.tensors.items()}

    def exchange(
        self, gradients: Mapping[str, torch.Tensor], arrived: Collection[str], error: Exception | None = None
    ) -> set[str]:
        """Write mean gradients over ranks to ``views``; a rank that has none of a parameter brings zeros.  Collective.

        If a gradient of any rank is not finite, all are NaN on every rank, and residuals stay as they are.

        Args:
            gradients: of this rank, by name, in ``views`` or elsewhere.
            arrived: names of those that the last backward pass has added to.
            error: what forbids it on this rank, which all ranks raise.

        Returns:
            The names of the parameters of which no gradient arrived on any rank; their ``views`` are zeros.
        """
        nowhere = self.arrived_nowhere(arrived, error)
        brought = {name: g for name, g in gradients.items() if name not in nowhere}
        self.step(lambda: [(p.tensor, brought.get(p.name)) for p in self._model.parameters])
        return nowhere

    @property
    def may_overlap(self) -> bool:
        """Whether buckets may leave while the last gradients of a backward pass are still to come."""
        engine = self.engine
        return engine.reducers.may_overlap(self.compressor, self._spec, engine.threshold)

    def step(self, gradients: Any) -> None:
        """Write mean gradients over ranks to ``views``.  Collective.

        Args:
            gradients: (tensor, gradient) pairs, as a loss of ``DistOpt``.
        """
        if not self.engine.step(self._model.gradients(gradients), self._spec, self._write_means):
            for view in self.views.values():
                view.fill_(float("nan"))

    def arrived_nowhere(self, arrived: Collection[str], error: Exception | None) -> set[str]:
        """Vote on the parameters that no rank has a new gradient of, and return them.  Collective."""
        missing = [name for name in self.tensors if name not in arrived]
        engine, call = self.engine, f"exchange number {self.engine.progress.calls + 1}"
        reports = engine.agreement.vote_on_line(
            engine.progress.name, call, error, json.dumps(missing) if missing else "", ", which gradients came"
        )
        if not reports or "" in reports:
            return set()
        return set.intersection(*(set(json.loads(report)) for report in reports))

    def _write_means(self, sums: Iterable[Reduced], spec: StepSpec) -> None:
        """Write the means to the buckets; the shard that others read in this rank's memory when they have read it."""
        engine = self.engine
        scale, mine = 1.0 / engine.step_context.divisor, engine.comm.rank
        read_by_others: list[tuple[Bucket, Any]] = []
        for bucket, total in zip(engine.store.buckets, sums, strict=True):
            bucket.means.records["data"] = bucket.own_addresses
            for piece in total:
                if len(total) > 1 and piece.number == mine:
                    read_by_others.append((bucket, piece))
                else:
                    kernels.unpack(bucket.means.shard(piece.number, piece.of), piece.flat, scale)
        if read_by_others:
            engine.comm.barrier()
        for bucket, piece in read_by_others:
            kernels.unpack(bucket.means.shard(piece.number, piece.of), piece.flat, scale)
        engine.accumulator.reset(engine.store.buckets)
        engine.count_update()
