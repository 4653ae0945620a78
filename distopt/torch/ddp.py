"""Gradients of a model in DistributedDataParallel, or of ``fully_shard``, exchanged as distopt does."""

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distopt.compress import Compressor
from distopt.engine.spec import shows
from distopt.torch.exchange import GradientExchange, refuse_if_elastic
from distopt.torch.synchronize import EarlyExchange, Synchronizer, is_synchronized
from distopt.torch.tensors import is_dtensor, on_gpu


@shows(GradientExchange)
def compress(model: torch.nn.Module, compressor: Compressor | None = None, **options: Any) -> GradientExchange:
    """Exchange gradients of a model in DistributedDataParallel, or of ``fully_shard``, as distopt does.  Collective.

    Of DistributedDataParallel the gradients are exchanged as its buckets come, if ranks sit on several machines, else
    together with those of the last one; what it calls a hook is registered, once.  A model of ``fully_shard`` adds up
    gradients inside of its mesh; then each rank exchanges those of its shards with the ranks of ``group``, which have
    the same shards.

    Args:
        model: the model.
        compressor: what is sent; None for all of it.
        **options: the keyword arguments of ``GradientExchange``: optimizer, scaler, group, exchange, break_even,
            threshold, overlap.

    Raises:
        RuntimeError: the model has a hook already; or in a job of ``distopt run --elastic``, where torch's own process
            groups end with the first rank that is lost: there, ``synchronize`` does without them.
        TypeError: the model is neither; or as ``GradientExchange``.
        ValueError: ``group`` is missing for a model of ``fully_shard``; or as ``GradientExchange``.
    """
    got = f"got a {type(model).__name__} with a process group of torch"
    if isinstance(model, DistributedDataParallel):
        refuse_if_elastic("model must be a plain module", got)
        if any(map(is_synchronized, model.module.modules())):
            raise ValueError(
                "the module in a DistributedDataParallel must not be synchronized, which exchanges its gradients "
                "already, got one that is; close() its Synchronizer first"
            )
        exchange = GradientExchange(model.module, compressor, ignored=model.parameters_to_ignore, **options)
        model.register_comm_hook(BucketHook(model, exchange), exchange_together)
        return exchange
    shards = [p for p in model.parameters() if is_dtensor(p)] if isinstance(model, torch.nn.Module) else []
    if not shards:
        raise TypeError(
            f"model must be a DistributedDataParallel, or have gone through fully_shard, got a {type(model).__name__}; "
            "see synchronize"
        )
    refuse_if_elastic("model must not be sharded", got)
    if options.get("group") is None:
        raise ValueError("group must be the ranks that have the same shards, as mesh.get_group('replicate'), got None")
    _check_replicas(shards, options["group"])
    return Synchronizer(model, compressor, **options)


def _check_replicas(shards: list[Any], group: Any) -> None:
    """Raise ValueError unless the ranks of a group have the same shards of all these parameters."""
    meshes = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in shards}
    if len(meshes) > 1:
        raise ValueError(
            f"all parameters must be sharded over one mesh, got meshes of the ranks {sorted(meshes)}, whose replicas "
            "are other ranks each"
        )
    if isinstance(group, dist.ProcessGroup) and all(placement.is_shard() for placement in shards[0].placements):
        (mesh,), ranks = meshes, set(dist.get_process_group_ranks(group))
        if others := sorted(ranks.intersection(mesh) - {dist.get_rank()}):
            raise ValueError(
                f"group must be the ranks that have the same shards, got ranks {sorted(ranks)}, of which {others} have "
                "others of the mesh"
            )


class BucketHook:
    """The state of the hook of a DistributedDataParallel, whose buckets have means with the last one of a pass."""

    # A copy of the DistributedDataParallel is one without a hook.

    def __init__(self, ddp: DistributedDataParallel, exchange: GradientExchange):
        self._ddp, self.exchange = weakref.ref(ddp), exchange
        self.names = {id(p): name for name, p in exchange.tensors.items()}
        # Of the present pass, and what takes them if they leave before the last one has come.
        self.buckets: list[tuple[Any, torch.futures.Future[torch.Tensor]]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self._early: EarlyExchange | None = None
        # gradients that were added to since the last exchange
        self.arrived: set[str] = set()
        for name, p in exchange.tensors.items():
            # torch's method has no types
            leaf: Any = p
            leaf.register_post_accumulate_grad_hook(functools.partial(self._note, name))

    def _note(self, name: str, p: torch.Tensor) -> None:
        if p.grad is not None:
            self.arrived.add(name)

    def begin(self) -> None:
        """Begin a pass."""
        # The one before it was whole: otherwise DistributedDataParallel refuses another one.
        ddp: Any = self._ddp()
        if self.exchange.may_overlap and not ddp._join_config.enable:
            self._early = EarlyExchange(self.exchange)

    def take(self, bucket: Any, future: torch.futures.Future[torch.Tensor]) -> None:
        """Take a bucket, and what is complete when it has means."""
        self.buckets.append((bucket, future))
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self.gradients[self.names[id(p)]] = gradient
            if self._early:
                self._early.put(self.names[id(p)], gradient)

    def finish(self) -> None:
        """Replace gradients by their means over ranks, zeros for those that have arrived on none.  Collective."""
        # In a `Join` context a rank without batches counts as DistributedDataParallel counts it.
        ddp: Any = self._ddp()
        early, self._early = self._early, None
        arrived, self.arrived = self.arrived, set()
        agreement, uneven = self.exchange.engine.agreement, ddp._join_config.enable
        over_all = self.exchange.communicator.size if uneven and ddp._divide_by_initial_world_size else None
        agreement.joined = uneven and not arrived
        try:
            if early:
                nowhere = early.finish({}, arrived, None)
            else:
                nowhere = self.exchange.exchange_gradients(self.gradients, arrived, divisor=over_all)
        finally:
            agreement.joined = False
        for name, gradient in self.gradients.items():
            if name in nowhere:
                gradient.zero_()
            else:
                gradient.copy_(self.exchange.views[name])
        buckets, self.buckets, self.gradients = self.buckets, [], {}
        for bucket, future in buckets:
            future.set_result(bucket.buffer())

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def exchange_together(
    state: BucketHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # which torch builds
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket, as a future that is complete when the last one has come: a hook for torch's DDP."""
    place = bucket.buffer()
    devices = [place.device] if on_gpu(place) else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    if bucket.index() == 0:
        state.begin()
    state.take(bucket, future)
    if bucket.is_last():
        state.finish()
    return future
