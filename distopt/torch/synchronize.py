"""Gradients of a model that are means over ranks when ``backward()`` returns, as with DistributedDataParallel.

Nothing of the script's is wrapped: hooks of the parameters note which gradients came, and a callback at the end of the
backward pass exchanges them.  Gradients lie in distopt's buckets, in memory that ranks of one machine share.

The parameters hold their hooks, which hold the ``Synchronizer``, which holds neither parameters nor model: it is gone
when they are.
"""

import atexit
import contextlib
import functools
import logging
import queue
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from distopt import device
from distopt.checks import check_bool
from distopt.compress import Compressor
from distopt.engine.joining import Joining
from distopt.engine.spec import shows
from distopt.torch.exchange import GradientExchange, not_logical
from distopt.torch.model import TWICE, TensorParameter
from distopt.torch.rank_passes import RankPasses
from distopt.torch.sparse import SparseGradients, sparse_parameters
from distopt.torch.tensors import hand_over, is_dtensor

LOG = logging.getLogger("distopt")
_synchronized = weakref.WeakSet[torch.nn.Module]()
_stepped_for = weakref.WeakSet["Synchronizer"]()


def is_synchronized(model: torch.nn.Module) -> bool:
    """Tell if a module was given to ``synchronize``, and was not closed."""
    return model in _synchronized


class GradientSlot:
    """The place where a model has the gradient of a parameter, of a ``DTensor`` this rank's shard of it."""

    def __init__(self, parameter: TensorParameter):
        self.find, self.sharded = parameter.find, is_dtensor(parameter.original)
        # the memory and the version of the mean that was stored last
        self._left: tuple[int, int] | None = None

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's gradient; None if there is none, or no parameter any more."""
        parameter: Any = self.find()
        whole = None if parameter is None else parameter.grad
        mine: torch.Tensor | None = whole.to_local() if self.sharded and whole is not None else whole
        return mine

    @property
    def changed(self) -> bool:
        """Whether there is a gradient which is not the mean that was stored last."""
        gradient = self.gradient()
        return gradient is not None and (gradient.data_ptr(), gradient._version) != self._left

    @property
    def foreign(self) -> bool:
        """Whether there is a gradient in other memory than that of the mean that was stored last."""
        gradient = self.gradient()
        return gradient is not None and (self._left is None or gradient.data_ptr() != self._left[0])

    def clear(self) -> None:
        """Take the gradient away."""
        if (parameter := self.find()) is not None:
            parameter.grad = None

    def store(self, view: torch.Tensor) -> None:
        """Give the model the mean that is in a bucket, in ``view``."""
        parameter: Any = self.find()
        if parameter is None:
            return
        if not self.sharded:
            mean = parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        else:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mean = parameter.grad.to_local().copy_(view)
        self._left = mean.data_ptr(), mean._version


class Synchronizer(GradientExchange):
    """Exchange of a model's gradients at the end of each backward pass that adds to them.  Making one is collective.

    Args:
        model: its parameters that require a gradient take part.
        compressor: what is sent; None for ``Dense()``.
        sparse_as_dense: send sparse gradients as dense ones, and leave dense means in ``p.grad``.
        **options: the keyword arguments of ``GradientExchange``.

    Raises:
        TypeError: the model is no plain module, or has a DistributedDataParallel inside; or as ``GradientExchange``.
        ValueError: as ``GradientExchange``.
    """

    @shows(GradientExchange)
    def __init__(
        self,
        model: torch.nn.Module,
        compressor: Compressor | None = None,
        *,
        sparse_as_dense: bool = False,
        **options: Any,
    ):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise TypeError("model must not be a DistributedDataParallel, which exchanges gradients; see compress")
        if is_synchronized(model):
            raise ValueError("model must not be synchronized twice, got one that is; close() the first Synchronizer")
        found = () if check_bool("sparse_as_dense", sparse_as_dense) else sparse_parameters(model)
        sparse: dict[str, Any] = dict(found)
        super().__init__(model, compressor, **options, sparse=sparse)
        self._module, self._as_dense = weakref.ref(model), sparse_as_dense
        self._homes = {p.name: GradientSlot(p) for p in self._model.parameters}
        self._names = {id(p.original): p.name for p in self._model.parameters}
        self._sharded = any(home.sharded for home in self._homes.values())
        # Of logical ranks; None where a process is one.
        self._passes = RankPasses(self, self._homes, self._error) if self.communicator.ranks.logical else None
        if self._sharded:
            self.engine.check_own_rank("a model of shards")
        # gradients that were added to since the last exchange
        self._arrived: set[str] = set()
        # and in this backward pass
        self._came: set[str] = set()
        self._syncs, self._waits = self._passes is None, False
        # of the parameters, when this backward pass began
        self._versions: dict[str, int] = {}
        self._early: EarlyExchange | None = None
        # by this object, and of the optimizers that update the model
        self._exchanges = self._steps = 0
        # each optimizer's last step
        self._exchanges_before = weakref.WeakKeyDictionary[Any, int]()
        self._told = False
        self._hooks = [
            model.register_forward_pre_hook(ModelHook(self._before_forward, _forward_of_copy)),
            model.register_forward_hook(ModelHook(self._after_forward, _forward_of_copy)),
        ]
        # autograd accumulates nothing into shards
        for p in [] if self._sharded else self._model.parameters:
            # torch's method has no types
            leaf: Any = p.original
            self._hooks.append(leaf.register_post_accumulate_grad_hook(functools.partial(self._note, p.name)))
        # Of these nothing is in a bucket.
        self._sparse_names, self._sparse_came = {id(p): name for name, p in sparse.items()}, set[str]()
        self._sparse = SparseGradients(self.engine.comm, sparse) if sparse else None
        if sparse:
            self.engine.check_own_rank("a sparse gradient")
        for name, leaf in sparse.items():
            self._hooks.append(leaf.register_post_accumulate_grad_hook(functools.partial(self._note_sparse, name)))
        _synchronized.add(model)
        _stepped_for.add(self)
        _watch_optimizers()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes exchange nothing: gradients of this rank add up in ``p.grad``."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @property
    def logical(self) -> Iterator[int]:
        """The logical ranks that live in this process, one after the other, for the passes of a step.  Collective.

        When the last one's are done the gradients are exchanged, and ``p.grad`` are means over all ranks.  If a process
        is lost before, the ranks of which others have taken over come after those.

        Raises:
            ValueError: the communicator has no logical ranks.

        Example:
            >>> import torch
            >>> import distopt.torch as dt
            >>> from distopt.comm import Logical, LocalCommunicator
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> sync = dt.synchronize(model, group=Logical(LocalCommunicator(), 3))
            >>> for rank in sync.logical:
            ...     with sync.of(rank):
            ...         (rank * model(torch.ones(1, 1))).sum().backward()
            >>> model.weight.grad
            tensor([[1.]])
        """
        return self._turns(self._rank_passes())

    def _turns(self, passes: RankPasses) -> Iterator[int]:
        yield from passes.turns()
        self._exchanges += 1

    def of(self, rank: int) -> AbstractContextManager[None]:
        """Return a context of the forward and backward passes of a logical rank, whose gradients add up.

        It begins without gradients, with the rank's random numbers, and with the buffers that all ranks' passes begin
        with: after the step these are rank 0's, as with DistributedDataParallel.

        Args:
            rank: that which ``logical`` has yielded last.

        Raises:
            ValueError: it is another one, or the communicator has no logical ranks.
        """
        return self._rank_passes().of(rank)

    def _rank_passes(self) -> RankPasses:
        if self._passes is None:
            raise not_logical(self.communicator)
        return self._passes

    def exchange(self) -> None:
        """Exchange what is in ``p.grad`` on each rank, and leave the means over ranks there.  Collective.

        A backward pass that adds to gradients of the model does so by itself.  This is for gradients that none has
        made, as those of ``torch.autograd.grad`` that the script writes to ``p.grad``; and for a rank whose backward
        pass has reached no parameter of the model while others' did, as an expert without tokens, or an empty batch.

        Raises:
            RuntimeError: in a backward pass.
            ValueError: on every rank alike, as a backward pass.

        Example:
            >>> import torch
            >>> import distopt.torch as dt
            >>> model = torch.nn.Linear(3, 2)
            >>> sync = dt.synchronize(model)
            >>> loss = model(torch.ones(1, 3)).sum()
            >>> for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
            ...     p.grad = gradient.clamp(max=0.5)
            >>> sync.exchange()  # p.grad are means over ranks
        """
        self.engine.check_own_rank("exchange")
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("exchange must be called outside of a backward pass, which exchanges when it ends")
        self._report_failure()
        self.engine.let_in()
        self._arrived |= {name for name, home in self._homes.items() if home.changed}
        self._sparse_came |= set(self._sparse_names.values())
        self._exchange(EarlyExchange(self) if self.may_overlap else None)

    def rejoin(self, extra: Any = None) -> Any:
        """In a process that was started in the place of a lost one: wait until the others admit it, and do as they do.

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
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> sync = dt.synchronize(model, optimizer=optimizer)
            >>> sync.rejoin()
        """
        if self.opt is None:
            raise ValueError("optimizer must be the script's for rejoin, got None; give it to synchronize")
        # What has a state of its own.
        scripts = [self.opt, *filter(None, [self._policy.scaler])]

        def state() -> dict[str, Any]:
            more = extra() if callable(extra) else extra
            return {
                "scripts": [part.state_dict() for part in scripts],
                "others": self._model.others,
                "steps": self._steps,
                "extra": {} if more is None else more,
            }

        sent = Joining(self._state, self._checkpointer, None, state).rejoin()
        if sent is None:
            return None
        for part, its_state in zip(scripts, sent["scripts"], strict=True):
            part.load_state_dict(its_state)
        self._model.take_others(sent["others"])
        self._steps = sent["steps"]
        return sent["extra"]

    def close(self) -> None:
        """Remove the hooks: backward passes are this rank's own again."""
        for hook in self._hooks:
            hook.remove()
        _stepped_for.discard(self)
        if (module := self._module()) is not None:
            _synchronized.discard(module)
        super().close()

    # -- a backward pass, in the order of the calls

    def _before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        """Tell the others of a backward pass that has raised here; refuse a DistributedDataParallel around all."""
        self._report_failure()
        # Read here: a GPU is behind the host when the backward pass is enqueued.
        _ = self._policy.scale
        ddp: Any = DistributedDataParallel._active_ddp_module
        if ddp is None:
            return
        ignored = getattr(ddp, "parameters_to_ignore", ())
        if any(self._name(p) and n not in ignored for n, p in ddp.module.named_parameters()):
            raise RuntimeError(
                "a synchronized model must not be in a DistributedDataParallel, which exchanges its gradients too, all "
                "of them: use the model as it is; or close() the Synchronizer, and call distopt.torch.compress(ddp, "
                "compressor) with the DistributedDataParallel"
            )

    def _after_forward(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        for x in _outputs(outputs):
            x.register_hook(self._reach_output)  # type: ignore[no-untyped-call]

    def _reach_output(self, _: torch.Tensor) -> None:
        """Begin, if the pass that has come to an output of the model will add to a gradient of it."""
        # So others hear of a pass that raises before it has come to a parameter.  `autograd.grad` adds to none.
        if not self._syncs or self._waits:
            return
        adds, executes = self._sharded, torch._C._will_engine_execute_node
        try:
            for home in () if adds else self._homes.values():
                p = home.find()
                adds = adds or (p is not None and p.requires_grad and executes(get_gradient_edge(p).node))
        except (RuntimeError, AttributeError):
            # autograd.grad with respect to this very parameter; torch.func
            adds = False
        if adds:
            self._begin()

    def _note(self, name: str, p: torch.Tensor) -> None:
        """Note that a gradient came.  An undefined one comes too, and adds nothing."""
        if self._syncs and not self._waits:
            self._begin()
        if self._passes:
            self._passes.note(name)
        elif p.grad is not None:
            if p.grad.is_sparse and self._as_dense:
                p.grad = p.grad.to_dense()
            if self._early:
                self._early.put(name, p.grad, again=name in self._came)
            self._came.add(name)
            self._arrived.add(name)

    def _note_sparse(self, name: str, p: torch.Tensor) -> None:
        """Note that a sparse gradient came."""
        if self._syncs and not self._waits:
            self._begin()
        self._sparse_came.add(name)

    def _begin(self) -> None:
        """Make autograd call ``_end`` after the backward pass that has begun."""
        # Here, since the thread of an exchange would run callbacks beside this pass.
        self.engine.let_in()
        self._waits, self._came = True, set()
        self._versions = self._versions_now()
        self._at_end()
        if self.may_overlap and not self._sharded:
            self._early = EarlyExchange(self)

    def _at_end(self) -> None:
        call_back = torch.autograd.Variable._execution_engine.queue_callback
        # The callback that makes shards of the gradients may come after this one.
        call_back((lambda: call_back(self._end)) if self._sharded else self._end)

    def _end(self) -> None:
        """Exchange; inside of another pass, as checkpointed activations are computed in, when that one ends."""
        around = torch._C._current_autograd_node()
        if around is not None:
            around.register_hook(lambda *_: self._at_end())
            return
        early, self._early, self._waits = self._early, None, False
        if self._sharded:
            self._arrived = {name for name, home in self._homes.items() if home.changed}
            if not self._arrived:
                return
        self._exchange(early)

    def _exchange(self, early: "EarlyExchange | None") -> None:
        """Exchange the gradients, of which ``early`` has some, and give the model the means."""
        arrived, self._arrived, came, self._came = self._arrived, set(), self._came, set()
        sparse_came, self._sparse_came = self._sparse_came, set()
        homes, views = self._homes, self.views
        gradients = {name: g for name, home in homes.items() if (g := home.gradient()) is not None}
        error = self._error({name: g for name, g in gradients.items() if name in arrived})
        # Where no rank has a new gradient, the earlier one stays, while its place in a bucket is for this exchange.
        kept = {
            n: (g, g.clone()) for n, g in gradients.items() if n not in arrived and g.data_ptr() == views[n].data_ptr()
        }
        nowhere = set(homes)
        try:
            if early:
                nowhere = early.finish({n: gradients.get(n) for n in homes if n not in came}, arrived, error)
            else:
                nowhere = self.exchange_gradients(gradients, arrived, error)
        finally:
            for name in nowhere & kept.keys():
                gradient, value = kept[name]
                gradient.copy_(value)
        # They are others if a rank was lost.
        views = self.views
        for name, home in homes.items():
            if name not in nowhere:
                home.store(views[name])
        if self._sparse:
            self._sparse.exchange(sparse_came, self.engine.progress.updates)
        self._exchanges += 1

    def _report_failure(self) -> None:
        """Tell the other ranks, which wait, if the last backward pass has raised here; they raise it too."""
        if self._waits:
            error = RuntimeError("a backward pass has raised")
            self._waits, self._arrived, self._came, self._sparse_came = False, set(), set(), set()
            early, self._early = self._early, None
            # This rank has had its own error.
            with contextlib.suppress(RuntimeError):
                if early:
                    early.abandon(error)
                else:
                    self.fail(error)

    def _name(self, p: torch.Tensor) -> str | None:
        """Return the name of a parameter that takes part; None for another one."""
        name = self._names.get(id(p))
        return name if name is not None and self._homes[name].find() is p else None

    def _error(self, arrived: Mapping[str, torch.Tensor]) -> Exception | None:
        """Return an error if the model is not what it was, or the gradients that arrived are none to be exchanged."""
        module = self._module()
        for name, p in () if module is None else module.named_parameters():
            known = self._name(p) or id(p) in self._sparse_names
            if p.requires_grad and not known and p.numel() and not is_dtensor(p):
                return ValueError(
                    f"{name}: a parameter that requires a gradient must have been there, and have required one, when "
                    "the model was synchronized; close() and synchronize again after a change of the model"
                )
        versions, self._versions = self._versions, {}
        if versions and versions != (now := self._versions_now()):
            changed = next(name for name, version in versions.items() if now.get(name, version) != version)
            return ValueError(
                f"{changed}: a parameter must not change before its gradient is the mean over ranks, which it is when "
                "backward() returns, got an update inside of a backward pass; let the optimizer step after it"
            )
        for name, gradient in arrived.items():
            if gradient.requires_grad:
                return ValueError(
                    f"{name}: a gradient must be without a graph, got one of backward(create_graph=True), whose second "
                    "derivatives would be this rank's own; take them of torch.autograd.grad(loss, parameters, "
                    "create_graph=True), which exchanges nothing, and call exchange() for what is written to p.grad"
                )
        return None

    def _versions_now(self) -> dict[str, int]:
        return {name: p._version for name, home in self._homes.items() if (p := home.find()) is not None}

    def _clock(self) -> str:
        steps = f"{self._steps} optimizer step{'s' * (self._steps != 1)}"
        return f"made {steps} since the model was synchronized, before exchange number {self.engine.progress.calls + 1}"

    # -- steps of the script's optimizers

    def updated_by(self, optimizer: Any) -> bool:
        """Tell if an optimizer updates a parameter of the model."""
        return any(self._name(p) for group in optimizer.param_groups for p in group["params"])

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of an optimizer's step: a closure's loss is the mean over ranks, as its gradients are.

        Say so, once, if it is about to take gradients that nobody has exchanged.
        """
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._closure(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._closure(kwargs["closure"])}
        own = self._exchanges_before.get(optimizer, 0) == self._exchanges and self.communicator.size > 1
        if own and not self._told and any(home.foreign for home in self._homes.values()):
            self._told = True
            LOG.warning(
                "distopt: rank %d: %s.step() takes gradients of this rank alone: no backward pass has exchanged them "
                "(it was under no_sync(), or they are those of torch.autograd.grad); call exchange() of what "
                "distopt.torch.synchronize has returned before the step",
                self.communicator.rank,
                type(optimizer).__name__,
            )
        return args, kwargs

    def after_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer of the model."""
        self._steps += 1
        self._exchanges_before[optimizer] = self._exchanges

    def _closure(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure whose loss is the mean over ranks, if it calls a backward pass that exchanges."""

        def mean(*args: Any, **kwargs: Any) -> Any:
            before = self._exchanges
            loss = closure(*args, **kwargs)
            return loss if self._exchanges == before else self._mean_loss(loss)

        return mean

    def _mean_loss(self, loss: Any) -> Any:
        """Return the mean over ranks of a loss, in float64, in rank order; what is no number as it is.  Collective."""
        self.engine.check_own_rank("a closure of an optimizer")
        value = loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss
        report = float(value).hex() if isinstance(value, int | float) else "nothing"
        agreement, progress = self.engine.agreement, self.engine.progress
        line = [f"the loss of a closure, after exchange number {progress.calls}"]
        reports = agreement.vote_on_lines(progress.name, line, None, report, ", the loss of its closure")
        if "nothing" in reports:
            return loss
        mean = sum(map(float.fromhex, reports)) / len(reports)
        return torch.full_like(loss, mean, requires_grad=False) if isinstance(loss, torch.Tensor) else mean


class ModelHook:
    """A hook of a synchronized model, which does something else in a copy of it.  A file of the model has none."""

    def __init__(self, call: Callable[..., None], in_copy: Callable[..., None]):
        self._call, self._in_copy = call, in_copy

    def __call__(self, model: torch.nn.Module, *values: Any) -> None:
        self._call(model, *values)

    def __deepcopy__(self, memo: Any) -> "ModelHook":
        return ModelHook(self._in_copy, self._in_copy)

    def __reduce__(self) -> Any:
        # It takes whatever a hook is given and returns None, so that nobody needs distopt to read the file.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _forward_of_copy(model: torch.nn.Module, inputs: Any, outputs: Any = ()) -> None:
    """Warn when a copy of a synchronized model is trained as it is."""
    if not is_synchronized(model):
        for x in _outputs(outputs):
            x.register_hook(_say_in_copy)  # type: ignore[no-untyped-call]


def _say_in_copy(_: torch.Tensor) -> None:
    warnings.warn(
        "this model is a copy of a synchronized one, and is not synchronized: gradients of its backward passes are "
        "this rank's own; call distopt.torch.synchronize(copy) if all ranks train it together",
        stacklevel=1,
    )


def _outputs(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in what a model has returned that have a gradient."""
    return [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]


@functools.cache
def _watch_optimizers() -> None:
    """Tell the synchronizers of every step of torch's optimizers, from now on."""

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        for sync in tuple(_stepped_for):
            if sync.updated_by(optimizer):
                args, kwargs = sync.before_step(optimizer, args, kwargs)
        return args, kwargs

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for sync in tuple(_stepped_for):
            if sync.updated_by(optimizer):
                sync.after_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


class EarlyExchange:
    """An exchange in a thread, which takes gradients as the backward pass brings them."""

    END = object()

    def __init__(self, exchange: GradientExchange):
        self._gradients, self._queue = exchange, queue.SimpleQueue[Any]()
        self._arrived: Collection[str] = ()
        self._wrong: Exception | None = None
        # It is the thread's too.
        self._stream = exchange.current_stream()
        self._nowhere = device.in_thread(self._exchange, exchange.engine.comm.gpu)
        # Others may wait for what would never come.
        atexit.register(self._leave)

    def put(self, name: str, gradient: torch.Tensor | None, again: bool = False) -> None:
        """Hand over a gradient; ``again``, if it was handed over before, which is an error."""
        hand_over(gradient, self._stream)
        self._queue.put(ValueError(f"{name}: {TWICE}") if again else (name, gradient))

    def finish(
        self, missing: Mapping[str, torch.Tensor | None], arrived: Collection[str], error: Exception | None
    ) -> set[str]:
        """Wait for all means, and return or raise what ``exchange_gradients`` does; ``missing`` was not yet given."""
        self._arrived, self._wrong = arrived, error
        for name, gradient in missing.items():
            self.put(name, gradient)
        return self._finish(self.END)

    def abandon(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        self._finish(error)

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            self.abandon(RuntimeError("the process has ended in a backward pass"))

    def _finish(self, item: object) -> set[str]:
        """Hand over the last item, wait for the thread, and return or raise what that does."""
        atexit.unregister(self._leave)
        self._queue.put(item)
        nowhere = self._nowhere.result()
        if (here := self._gradients.current_stream()) != self._stream:
            here.wait_stream(self._stream)
        return nowhere

    def _exchange(self) -> set[str]:
        def pairs() -> Iterator[tuple[str, torch.Tensor | None]]:
            for item in iter(self._queue.get, self.END):
                if isinstance(item, Exception):
                    raise item
                yield item

        return self._gradients.exchange_early(pairs(), lambda: (self._arrived, self._wrong))


@shows(Synchronizer)
def synchronize(model: torch.nn.Module, compressor: Compressor | None = None, **options: Any) -> Synchronizer:
    """Make every backward pass of a model end with gradients that are means over ranks.  Collective.

    The script's optimizer, its schedules, scalers and clipping see gradients of the global batch.

    Args:
        model: the model; rank 0's parameters and buffers are sent to all ranks.
        compressor: what is sent; None for all of it.
        **options: ``sparse_as_dense``, which sends the sparse gradients of an ``Embedding(sparse=True)`` as dense ones
            (by default only their rows are gathered, and no compressor is applied), and the keyword arguments of
            ``GradientExchange``: ``optimizer``, the script's, which a compressor with a momentum needs; ``scaler``, if
            there is one; ``group``, a process group of torch or a communicator, as
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
