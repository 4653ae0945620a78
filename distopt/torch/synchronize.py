"""Gradients of a model that are means over ranks when ``backward()`` returns, as with DistributedDataParallel.

Nothing of the script's is wrapped: hooks of autograd note which gradients came, and a callback at the end of the
backward pass exchanges them.  Gradients lie in distopt's buckets, in memory that ranks of one machine share.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from distopt.compress import Compressor
from distopt.device.tensors import is_dtensor, on_gpu
from distopt.engine.joining import Joining
from distopt.engine.torch_model import TWICE
from distopt.torch.exchange import GradientExchange, refuse_if_elastic

_synchronized = weakref.WeakSet[torch.nn.Module]()


class Home:
    """Where a model has the gradient of a parameter.

    Args:
        parameter: the model's parameter; of a ``DTensor`` it is this rank's shard.
    """

    def __init__(self, parameter: torch.Tensor):
        self._parameter = parameter
        self.sharded = is_dtensor(parameter)
        self._left: tuple[int, int] | None = None  # the memory and the version of the mean that was put last

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's gradient."""
        whole: Any = self._parameter.grad
        mine: torch.Tensor | None = whole.to_local() if self.sharded and whole is not None else whole
        return mine

    @property
    def changed(self) -> bool:
        """Whether there is a gradient which is not the mean that was put last."""
        gradient = self.gradient()
        return gradient is not None and (gradient.data_ptr(), gradient._version) != self._left

    def keep(self, view: torch.Tensor) -> None:
        """Leave the gradient of an earlier pass to the model: its place in a bucket, ``view``, is for this one."""
        gradient = self.gradient()
        if gradient is not None and gradient.data_ptr() == view.data_ptr():
            self._parameter.grad = gradient.clone()

    def put(self, view: torch.Tensor) -> None:
        """Give the model the mean that is in a bucket, in ``view``."""
        if not self.sharded:
            self._parameter.grad = view.to(self._parameter.dtype)
            return
        if self._parameter.grad is None:
            self._parameter.grad = torch.zeros_like(self._parameter)
        gradient = self.gradient()
        assert gradient is not None
        gradient.copy_(view)
        self._left = gradient.data_ptr(), gradient._version


class Synchronizer(GradientExchange):
    """Exchange of a model's gradients at the end of each backward pass.  Making one is collective.

    Args:
        model: its parameters that require a gradient take part.
        compressor: what is sent; None for ``Dense()``.
        **options: the keyword arguments of ``GradientExchange``.

    Raises:
        TypeError: as ``GradientExchange``.
        ValueError: as ``GradientExchange``.
    """

    def __init__(self, model: torch.nn.Module, compressor: Compressor | None = None, **options: Any):
        if isinstance(model, DistributedDataParallel):
            raise TypeError("model must not be a DistributedDataParallel, which exchanges gradients; see compress")
        if model in _synchronized:
            raise ValueError("model must not be synchronized twice, got one that is; close() the first Synchronizer")
        super().__init__(model, compressor, **options)
        _synchronized.add(model)
        self._module = model
        self._homes = {p.name: Home(p.original) for p in self._model.parameters}
        self._names = {id(p.original): p.name for p in self._model.parameters}
        self._sharded = any(home.sharded for home in self._homes.values())
        self._arrived: set[str] = set()
        self._syncs, self._waits = True, False
        self._early: EarlyExchange | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._report_failure),
            model.register_forward_hook(self._watch_outputs),
        ]
        for p in [] if self._sharded else self._model.parameters:  # autograd accumulates nothing into shards
            leaf: Any = p.original  # torch's method has no types
            self._hooks.append(leaf.register_post_accumulate_grad_hook(self._note))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes exchange nothing: gradients of this rank add up in ``p.grad``."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def rejoin(self, extra: Any = None) -> Any:
        """In a process that was started in the place of a lost one: wait until the others let it in, and go on as they.

        It gets the model's parameters and buffers, and the state of the script's optimizer and scaler, and begins with
        a residual of zero; for the rest as ``DistOpt.rejoin``.  A script calls it on all ranks, before its loop::

            sync = dt.synchronize(model, optimizer=optimizer)
            sync.rejoin()
            for step in range(sync.step_counter, steps):
                ...

        Args:
            extra: what else such a process needs, as the state of a schedule: dicts, lists, numbers, texts, arrays and
                tensors, or a callable that returns them, of the lowest of the others.

        Returns:
            Their ``extra``, {} if there was none; None, and nothing is changed, in a job that begins.

        Raises:
            ValueError: ``optimizer`` was not given to ``synchronize``; or the others have another model or optimizer.
            RuntimeError: the others have ended before they have let it in.

        Example:
            >>> import torch
            >>> import distopt.torch as dt
            >>> model = torch.nn.Linear(3, 2)
            >>> sync = dt.synchronize(model, optimizer=torch.optim.AdamW(model.parameters()))
            >>> sync.rejoin()
        """
        if self.opt is None:
            raise ValueError("optimizer must be the script's for rejoin, got None; give it to synchronize")
        scripts = [self.opt, *filter(None, [self._policy.scaler])]  # what has a state of its own

        def state() -> dict[str, Any]:
            more = extra() if callable(extra) else extra
            return {
                "scripts": [part.state_dict() for part in scripts],
                "others": {name: x.detach() for name, x in self._model.others.items()},
                "extra": {} if more is None else more,
            }

        sent = Joining(self._state, self._checkpointer, None, state).rejoin()
        if sent is None:
            return None
        for part, its_state in zip(scripts, sent["scripts"], strict=True):
            part.load_state_dict(its_state)
        with torch.no_grad():
            for name, x in self._model.others.items():
                x.copy_(sent["others"][name])
        return sent["extra"]

    def close(self) -> None:
        """Remove the hooks: backward passes are this rank's own again."""
        for hook in self._hooks:
            hook.remove()
        _synchronized.discard(self._module)
        super().close()

    # -- hooks, in the order in which autograd calls them

    def _report_failure(self, *_: Any) -> None:
        """Tell the other ranks, which wait, if the last backward pass has raised here; they raise it too."""
        if self._waits:
            error = RuntimeError("a backward pass has raised")
            self._waits, self._arrived = False, set()
            early, self._early = self._early, None
            with contextlib.suppress(RuntimeError):  # this rank has had its own
                if early:
                    early.abandon(error)
                else:
                    self.arrived_nowhere((), error)

    def _watch_outputs(self, model: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        for x in tree_leaves(outputs):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, _: torch.Tensor | None = None) -> None:
        """Let autograd call ``_finish`` at the end of the backward pass that has begun.

        The gradient of an output comes before those of parameters, and never in a pass inside of another one, as
        checkpointed activations have, whose end is too early.
        """
        if self._syncs and not self._waits:
            self.engine.let_in()  # here, since the thread of an exchange would run callbacks beside this pass
            self._waits = True
            at_end = torch.autograd.Variable._execution_engine.queue_callback
            if self._sharded:  # the callback that makes shards of the gradients may come behind this one
                at_end(lambda: at_end(self._finish))
                return
            at_end(self._finish)
            if self.may_overlap:
                self._early = EarlyExchange(self)

    def _note(self, p: torch.Tensor) -> None:
        """Note that a gradient came; ``_begin``, if the loss was made without the model's forward."""
        name = self._names[id(p)]
        self._begin()
        if self._early:
            self._early.put(name, again=name in self._arrived)
        self._arrived.add(name)

    def _finish(self) -> None:
        arrived, self._arrived, self._waits = self._arrived, set(), False
        early, self._early = self._early, None
        if self._sharded:
            arrived = {name for name, home in self._homes.items() if home.changed}
        for name, home in self._homes.items():
            if name not in arrived:
                home.keep(self.views[name])
        if early:
            nowhere = early.finish([name for name in self.tensors if name not in arrived], arrived, self._unknown())
        else:
            gradients = {name: g for name, home in self._homes.items() if (g := home.gradient()) is not None}
            nowhere = self.exchange(gradients, arrived, self._unknown())
        for name, home in self._homes.items():
            if name not in nowhere:
                home.put(self.views[name])

    def _unknown(self) -> Exception | None:
        """Return an error if the model has a parameter that requires a gradient and had none when this was made."""
        for name, p in self._module.named_parameters():
            if p.requires_grad and id(p) not in self._names and p.numel() and not is_dtensor(p):
                return ValueError(
                    f"{name}: a parameter that requires a gradient must have been there, and have required one, when "
                    "the model was synchronized; close() and synchronize again after a change of the model"
                )
        return None


class EarlyExchange:
    """An exchange in a thread, which takes gradients as the backward pass brings them.

    Args:
        exchange: the exchange.
    """

    END = object()

    def __init__(self, exchange: GradientExchange):
        self._exchange, self._queue = exchange, queue.SimpleQueue[Any]()
        self._arrived: Collection[str] = ()
        self._unknown: Exception | None = None
        self._nowhere: set[str] = set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, name: str, again: bool) -> None:
        """Hand over a gradient; ``again``, if it was handed over before, which is an error."""
        self._queue.put(ValueError(f"{name}: {TWICE}") if again else name)

    def finish(self, missing: Iterable[str], arrived: Collection[str], error: Exception | None) -> set[str]:
        """Return when all means are there; return and raise what ``GradientExchange.exchange`` does.

        Args:
            missing: names of the parameters whose gradients have not come.
            arrived: as of ``exchange``.
            error: as of ``exchange``.
        """
        self._arrived, self._unknown = arrived, error
        for name in missing:
            self._queue.put(name)
        self._end(self.END)
        return self._nowhere

    def abandon(self, error: Exception) -> None:
        """Let all ranks raise an error."""
        self._end(error)

    def _end(self, item: object) -> None:
        """Hand over the last item, and wait for the thread.  Raise what was raised there."""
        self._queue.put(item)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._nowhere = self._exchange.exchange_early(self._pairs(), lambda: (self._arrived, self._unknown))
        except BaseException as error:
            self._error = error

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        for name in iter(self._queue.get, self.END):
            if isinstance(name, Exception):
                raise name
            p = self._exchange.tensors[name]
            yield p, p.grad


def synchronize(model: torch.nn.Module, compressor: Compressor | None = None, **options: Any) -> Synchronizer:
    """Let every backward pass of a model end with gradients that are means over ranks.  Collective.

    The script's optimizer, its schedules, scalers and clipping see gradients of the global batch.

    Args:
        model: the model; rank 0's parameters and buffers are sent to all ranks.
        compressor: what is sent; None for all of it.
        **options: the keyword arguments of ``GradientExchange``: ``optimizer``, the script's, which a compressor with a
            momentum needs; ``scaler``, if there is one; ``group``, a process group of torch or a communicator, as
            ``distopt.comm.Metered(distopt.world())``, which counts bytes; exchange, break_even, threshold, overlap.

    Raises:
        TypeError: as ``GradientExchange``.
        ValueError: as ``GradientExchange``.

    Example:
        >>> import torch
        >>> import distopt.torch as dt
        >>> from distopt.compress import ErrorFeedback, TopK
        >>> model = torch.nn.Linear(3, 2)
        >>> sync = dt.synchronize(model, ErrorFeedback(TopK(0.5)))
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> sum(int(p.grad.count_nonzero()) for p in model.parameters())  # of 8
        4
    """
    return Synchronizer(model, compressor, **options)


def compress(model: torch.nn.Module, compressor: Compressor | None = None, **options: Any) -> GradientExchange:
    """Let a model in DistributedDataParallel, or of ``fully_shard``, exchange gradients as distopt does.  Collective.

    Of DistributedDataParallel the buckets are exchanged together when the last one is ready; what it calls a hook is
    registered, once.  A model of ``fully_shard`` adds up gradients inside of its mesh; then each rank exchanges those
    of its shards with the ranks of ``group``, which have the same shards.

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
        exchange = GradientExchange(model.module, compressor, **options)
        model.register_comm_hook(Waiting(exchange), exchange_together)
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


class Waiting:
    """Buckets of DistributedDataParallel that wait for the last one of a backward pass.

    Args:
        exchange: what is done with their gradients then.
    """

    def __init__(self, exchange: GradientExchange):
        self.exchange = exchange
        self.names = {id(p): name for name, p in exchange.tensors.items()}
        self.buckets: list[tuple[Any, torch.futures.Future[torch.Tensor]]] = []


def exchange_together(
    waiting: Waiting,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # which torch builds
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of a bucket, as a future that is complete when the last bucket has come.

    It is a hook for ``DistributedDataParallel.register_comm_hook``.
    """
    place = bucket.buffer()
    devices = [place.device] if on_gpu(place) else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    waiting.buckets.append((bucket, future))
    if bucket.is_last():
        buckets, waiting.buckets = waiting.buckets, []
        homes = {
            waiting.names[id(p)]: gradient
            for b, _ in buckets
            for p, gradient in zip(b.parameters(), b.gradients(), strict=True)
        }
        waiting.exchange.exchange(homes, homes)
        for name, gradient in homes.items():
            gradient.copy_(waiting.exchange.views[name])
        for b, done in buckets:
            done.set_result(b.buffer())
    return future
