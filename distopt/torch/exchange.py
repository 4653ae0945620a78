"""Mean gradients of a PyTorch model over ranks, in any mode, where the model has them."""

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distopt import device, kernels
from distopt.buckets import Bucket, BucketSet, Reduced, Shard
from distopt.comm import Communicator, NcclCommunicator, world
from distopt.comm.process_group import ProcessGroupCommunicator
from distopt.compress import Compressor, Dense
from distopt.compress.base import check_compressor
from distopt.engine.engine import Engine
from distopt.engine.facade import Checkpointed, watch_first_gradients
from distopt.engine.nonfinite import Policy
from distopt.engine.parameters import Loss
from distopt.engine.spec import Options, StepSpec
from distopt.resilience import membership
from distopt.torch.adapter import TorchAdapter
from distopt.torch.model import TorchModel
from distopt.torch.state import as_tensors, for_rank, mean_over_ranks, of_rank, on_rank_0
from distopt.torch.tensors import as_tensor, gpu_number, on_gpu

Arrival = Callable[[], tuple[Collection[str], Exception | None]]


class ScriptsOptimizer(TorchAdapter):
    """The adapter of the script's own optimizer, which updates the parameters when the script says so."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)
        # It would look at updates, which are the script's.
        self._first = None

    @property
    def opt(self) -> Any:
        """The script's optimizer; None if it is not known, or gone."""
        return self._optimizer() if self._optimizer else None

    @opt.setter
    def opt(self, optimizer: Any) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def check_fits(self, parameters: Iterable[torch.Tensor], compressor: Compressor) -> None:
        """Raise ValueError if it updates none of these parameters, or is needed and not known."""
        if self.opt is None:
            if compressor.traits.corrects_momentum:
                raise ValueError(
                    f"optimizer must be the script's with {type(compressor).__name__}, which has its momentum, got "
                    "None; it must have none itself, as torch.optim.SGD(parameters, lr)"
                )
            return
        updated = {id(p) for group in self.opt.param_groups for p in group["params"]}
        ids = set(map(id, parameters))
        if ids and updated.isdisjoint(ids):
            raise ValueError(
                f"optimizer must update parameters of the model, got a {type(self.opt).__name__} of {len(updated)} "
                "others; make it of the model's parameters as they are now"
            )

    def momentum(self) -> str:
        return super().momentum() if self.opt else ""

    def numbers(self) -> list[str]:
        return super().numbers() if self.opt else []

    def step(self) -> None:
        """Leave the update to the script."""

    def state_dict(self, unshard: Any = None) -> None:
        """Return None, as the script saves its optimizer."""

    def skips(self, only: Collection[str] | None) -> bool:
        # The means become infinities, which are the script's to look for.
        return True

    @property
    def has_state(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"optimizer {type(self.opt).__name__ if self.opt else 'unknown'} of the script"


class InTheGradients(Policy):
    """Gradients that are not finite are left to the script: each rank has infinities instead of their means."""

    def __init__(self, scaler: torch.amp.GradScaler | None):
        super().__init__()
        # Gradients are divided by the scale of the script's loss while they are exchanged, so that residuals are in the
        # units of the loss itself; and by `parts`, where the sum of so many is then their mean already.
        self.scaler, self.parts = scaler, 1
        # and the tensor that it was read from, at which version
        self._scale, self._read = 1.0, (0, 0)

    @property
    def divisor(self) -> float:  # type: ignore[override]
        return self.parts * self.scale

    @property
    def scale(self) -> float:
        """The scaler's scale, for which the host waits for a GPU if it has changed since it was read."""
        # None until a loss was scaled
        there = getattr(self.scaler, "_scale", None)
        read = (0, 0) if there is None else (id(there), there._version)
        if self.scaler and (there is None or read != self._read):
            self._scale, self._read = self.scaler.get_scale(), read
        return self._scale

    def enforce(self, name: str, nonfinite: str) -> None:
        """Leave what is not finite to the script."""

    def refused(self) -> None:
        """Count an exchange whose gradients were not finite."""
        self.skipped += 1

    def __repr__(self) -> str:
        return f"infinities in the gradients, {'with' if self.scaler else 'without'} a scaler"


class GradientExchange(Checkpointed):
    """Exchange of the gradients of a model, of which every rank has one.  Making it is collective.

    Rank 0's parameters, and buffers, are sent to all ranks.

    Args:
        params: a module, or an iterable of tensors or of (name, tensor) pairs; those that require a gradient take part.
            Of a ``DTensor``, as ``fully_shard`` makes them, it is this rank's shard.
        compressor: what is sent; None for ``Dense()``.
        optimizer: the script's.  A compressor that corrects momentum refuses one that has a momentum.
        scaler: the script's, if the loss is multiplied by its scale.
        group: the ranks: a process group of ``torch.distributed``, or a communicator; by default ``world()``.
        exchange: as of ``DistOpt.step``.
        break_even: as of ``DistOpt.step``.
        threshold: elements that fill a bucket.
        overlap: as of ``DistOpt``.
        ignored: names of a module's parameters and buffers that are left to it.
        sparse: names of parameters whose gradients are exchanged by others.

    Raises:
        TypeError: a parameter is sparse, not on the CPU, or has gaps in memory; or an argument is of a wrong type.
        ValueError: on every rank alike, if ranks differ; or the optimizer is of another model, or the replicas of a
            ``DTensor`` are of its own mesh, which adds them up first.
    """

    def __init__(
        self,
        params: Any,
        compressor: Compressor | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        group: "dist.ProcessGroup | Communicator | None" = None,
        exchange: str = "auto",
        break_even: bool = True,
        threshold: int = 2097152,
        overlap: str | bool = "auto",
        ignored: Collection[str] = (),
        sparse: Collection[str] = (),
    ):
        model = self._model = TorchModel(params, ignored=ignored, sparse=sparse)
        comm = self.communicator = communicator(group, model._there())
        self.compressor = Dense() if compressor is None else compressor
        check_compressor(self.compressor)
        self._policy, adapter = InTheGradients(scaler), ScriptsOptimizer(optimizer)
        options = Options.checked(comm, overlap=overlap, nonfinite=self._policy, allow_missing=True)
        engine = Engine(adapter, comm, options, threshold=threshold, kind=type(self).__name__)
        watch_first_gradients(engine)
        chosen = {"exchange": exchange, "break_even": break_even, "threshold": threshold}
        super().__init__(engine, {"compressor": compressor} | chosen)
        self._spec = StepSpec(self._chosen, break_even=break_even, exchange=exchange)
        originals = [p.original for p in self._model.parameters]

        def check() -> None:
            adapter.check_fits(originals, self.compressor)
            engine.compressor_at_this_step(self.compressor)

        self._model.enroll(engine, check)
        self._model.let_go()
        # Of each rank that lives here, in which buckets.
        self._views: dict[int, tuple[BucketSet, dict[str, torch.Tensor]]] = {}

    def _chosen(self) -> Compressor:
        """Return what is sent, and say by what gradients are divided, for the ranks that there are at each try."""
        # Powers of two round nothing, so that gradients may be divided by the number of ranks before they are added up:
        # a pass over the sums is saved.  Residuals stay in the units of the gradients.
        size, sent = self.engine.comm.ranks.size, self.compressor
        exact = (
            sent.traits.summable and not (sent.traits.stateful or sent.traits.may_overflow) and size & (size - 1) == 0
        )
        self._policy.parts = size if exact else 1
        return sent

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by name, the last ones first, as their gradients come."""
        return {p.name: p.tensor for p in self._model.parameters}

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """The places of gradients in the buckets, by name; float32 for parameters of 16 bits.

        If a rank is lost, the next exchange makes other buckets.
        """
        # Of the plan's last rank, which may have another number by now.
        return self.views_of(list(self.engine.store.of_ranks)[-1])

    def views_of(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the places of gradients in the buckets of a rank that lives here, by name."""
        of_ranks = self.engine.store.of_ranks
        known = self._views.get(rank)
        if known is None or known[0] is not of_ranks[rank]:
            views = {p.name: as_tensor(of_ranks[rank].view(p.name), like=p.like) for p in self._model.parameters}
            self._views = {r: k for r, k in self._views.items() if of_ranks.get(r) is k[0]}
            known = self._views[rank] = of_ranks[rank], views
        return known[1]

    def buffers_of(self, rank: int) -> AbstractContextManager[None]:
        """Return a context of a logical rank's pass, with the model's buffers as every rank's pass begins with them."""
        buffers = self._model.rank_buffers
        return buffers.of(rank) if buffers else contextlib.nullcontext()

    def exchange_gradients(
        self,
        gradients: Mapping[str, torch.Tensor],
        arrived: Collection[str],
        error: Exception | None = None,
        divisor: float | None = None,
    ) -> set[str]:
        """Write mean gradients over ranks to ``views``; a rank that has none of a parameter brings zeros.  Collective.

        If a gradient of any rank is not finite, all are infinite on every rank, and residuals stay as they are.

        Args:
            gradients: of this rank, by name, in ``views`` or elsewhere.
            arrived: names of those that the last backward pass has added to.
            error: what forbids it on this rank, which all ranks raise.
            divisor: divides the sums; None for the number of ranks that have not joined.

        Returns:
            The names of the parameters of which no gradient arrived on any rank.  Nothing of them is sent: what waits
            in their residuals stays, and their ``views`` have no means.
        """
        spec = self._spec if divisor is None else self._spec._replace(divisor=divisor)
        found = [(p, gradients.get(p.name)) for p in self._model.parameters]
        return self._exchange_found(found, lambda: (arrived, error), spec)

    def exchange_early(self, gradients: Iterable[tuple[str, torch.Tensor | None]], arrival: Arrival) -> set[str]:
        """Do what ``exchange_gradients`` does while the gradients are still to come.  Collective.

        Args:
            gradients: of parameters, by name, as they come.
            arrival: is called after the last one; returns the ``arrived`` and the ``error`` of
                ``exchange_gradients``.
        """
        by_name = {p.name: p for p in self._model.parameters}
        return self._exchange_found(((by_name[name], g) for name, g in gradients), arrival, self._spec)

    def current_stream(self) -> Any:
        """Return torch's current stream on this rank's GPU; None on the CPU."""
        return self._model.current_stream()

    def _exchange_found(self, found: Iterable[Any], arrival: Arrival, spec: StepSpec) -> set[str]:
        """Write mean gradients to ``views``; return the parameters of which none arrived on any rank.  Collective."""
        # All ranks hear of these by the vote on the exchange, and bring zeros.
        arrived: Collection[str] = ()

        def pairs() -> Iterator[Any]:
            nonlocal arrived
            yield from self._model.gradients(found)
            arrived, error = arrival()
            if error:
                raise error

        self._step(pairs, spec._replace(arrived=lambda _: arrived, clock=self._clock()))
        return set(self.engine.missing_everywhere)

    def exchange_ranks(self, gradients: Mapping[int, Mapping[str, torch.Tensor]]) -> set[str] | None:
        """Write mean gradients over logical ranks to ``views``.  Collective.

        Args:
            gradients: of each rank that lives here, by name, in its ``views_of`` or elsewhere.

        Returns:
            As ``exchange_gradients``; None if processes were lost, so that others have ranks without gradients yet.
        """
        epoch = self.engine.comm.epoch

        def pairs(rank: int) -> Iterable[Any]:
            found = ((p, gradients[rank].get(p.name)) for p in self._model.parameters)
            return self._model.gradients(found)  # type: ignore[no-any-return]

        self._step(pairs, self._spec._replace(arrived=gradients.__getitem__, clock=self._clock(), epoch=epoch))
        return set(self.engine.missing_everywhere) if self.engine.comm.epoch == epoch else None

    def _step(self, pairs: Loss, spec: StepSpec) -> None:
        """Exchange gradients, whose means are infinite if they are not finite on some rank.  Collective."""
        with self._model.stream():
            applied = self.engine.step(pairs, spec, self._write_means)
        if not applied and spec.epoch in (None, self.engine.comm.epoch):
            for view in self.views.values():
                view.fill_(math.inf)

    @property
    def may_overlap(self) -> bool:
        """Whether buckets may leave while the last gradients of a backward pass are still to come."""
        engine, reducers = self.engine, self.engine.reducers
        return reducers.may_overlap(self.compressor, reducers.settled(self.compressor, self._spec), engine.threshold)

    def fail(self, error: Exception) -> None:
        """Raise an error of this rank on all ranks, instead of an exchange.  Collective."""
        progress = self.engine.progress
        self.engine.transaction(lambda: self.engine.agree(progress.name, progress.calls, error))

    def _clock(self) -> str:
        """Return how far this rank is, which ranks compare."""
        return f"exchange number {self.engine.progress.calls + 1}"

    # -- what outlives the process

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals and counters: numbers and tensors, for ``torch.save``.

        Each rank has residuals of its own, and continues to the same bits only from its own state.  For one file for
        all ranks, or another number of them, there is ``full_state_dict``; ``save`` writes both.

        Example:
            >>> import torch
            >>> import distopt.torch as dt
            >>> sync = dt.synchronize(torch.nn.Linear(3, 2))
            >>> sync.state_dict()["rank"]
            0
        """
        self.engine.check_own_rank("state_dict")
        return of_rank(self.engine.comm, super().state_dict())

    def full_state_dict(self) -> dict[str, Any]:
        """Return one state for all ranks, the mean of theirs, which any number of ranks can load.  Collective.

        What waits to be sent is, over all ranks, what it was; which rank it waits on is not.
        """
        self.engine.check_own_rank("full_state_dict")
        comm = self.engine.comm
        state = comm.transaction(lambda: mean_over_ranks(super(GradientExchange, self).state_dict(), self.engine))
        return {"rank": None, "ranks": comm.size, "state": as_tensors(state)}

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, for a file that it alone writes.  Collective.

        From this file, which all ranks read, as many ranks go on to the same bits, and others as from
        ``full_state_dict``.  It is as large as the residuals of all ranks and their mean.
        """
        self.engine.check_own_rank("gathered_state_dict")
        device, state = self._model.parameters[0].tensor.device, super().state_dict
        return self.engine.comm.transaction(
            lambda: {
                "states": as_tensors(on_rank_0(state(), self.engine, device)),
                "mean": as_tensors(mean_over_ranks(state(), self.engine)),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` has returned on this rank, or one of all ranks on rank 0.

        Args:
            state: the dict.

        Raises:
            ValueError: it is of another rank, or of another number of ranks, or belongs to another model.
        """
        self.engine.check_own_rank("load_state_dict")
        super().load_state_dict(for_rank(self.engine.comm, state))

    def load(self, path: str | Path, params: Iterable[Any] | None = None) -> Any:
        """Continue from the newest good checkpoint in a folder, as ``DistOpt.load``.  Collective.

        Args:
            path: the folder, to which ``save`` was given it.
            params: None: the model's parameters are saved by the script.
        """
        return self._checkpointer.load(path, params, super().load_state_dict)

    # -- details

    def _write_means(self, sums: Iterable[Reduced], scale: float, spec: StepSpec) -> None:
        """Write the means to the buckets; the shard that others read in this rank's memory when they have read it."""
        engine = self.engine
        scale *= engine.nonfinite.policy.divisor
        read_by_others: list[tuple[Bucket, Shard]] = []
        for bucket, total in zip(engine.store.buckets, sums, strict=True):
            bucket.means.records["data"] = bucket.own_addresses
            for piece in total:
                own = device.address(piece.flat) == device.address(bucket.gradient)
                if own and len(total) > 1:
                    read_by_others.append((bucket, piece))
                elif not own or scale != 1:
                    kernels.unpack(bucket.means.shard(piece.number, piece.of), piece.flat, scale)
        if read_by_others:
            engine.comm.barrier()
        for bucket, piece in read_by_others if scale != 1 else ():
            kernels.unpack(bucket.means.shard(piece.number, piece.of), piece.flat, scale)
        # It is on a GPU, which knows what its host does not.
        if engine.store.skip_flag is not None:
            for bucket in engine.store.buckets.groups:
                kernels.overwrite(bucket.means, bucket.gradient, math.inf, engine.store.skip_flag)
        engine.accumulator.reset(engine.store)
        engine.count_update()


def communicator(group: "dist.ProcessGroup | Communicator | None", like: torch.Tensor) -> Communicator:
    """Return the communicator of the ranks of a process group; ``world()`` for None.  Collective of them."""
    if group is None:
        comm = world()
        return comm if on_gpu(like) == (comm.gpu is not None) else world("cuda" if on_gpu(like) else "cpu")
    if isinstance(group, Communicator):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group or a Communicator, got a {type(group).__name__}")
    refuse_if_elastic("group must be None", "got a process group of torch")
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise ValueError(f"group must have this rank, {dist.get_rank()}, got a group of {ranks}")
    if on_gpu(like):
        return NcclCommunicator.from_process_group(ranks, gpu_number(like), "a group of the script's")
    return ProcessGroupCommunicator.of_ranks(ranks, "a group of the script's")


def not_logical(comm: Communicator) -> ValueError:
    """Return the error of a process that is asked for its logical ranks and has none."""
    return ValueError(
        f"ranks must be logical, as with distopt run --logical V or distopt.world(logical=V), got {comm!r}"
    )


def refuse_if_elastic(must: str, got: str) -> None:
    """Raise RuntimeError under ``distopt run --elastic``, where torch's process groups die with the first lost rank."""
    if membership.wanted():
        raise RuntimeError(
            f"{must} under distopt run --elastic, {got}, which ends with the first rank that is lost; use "
            "distopt.torch.synchronize(model) with the plain module on every rank, or start without --elastic"
        )
