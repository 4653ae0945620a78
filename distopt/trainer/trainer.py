"""Gluon's Trainer: gradients are summed over ranks and divided by the size of the global batch."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device
from distopt.buckets import Reduced, read_sums, unsharded, write_sums
from distopt.checks import as_float
from distopt.comm import Communicator, world
from distopt.comm.control import agreed
from distopt.engine.agreement import AllJoinedError
from distopt.engine.engine import Attempt, Engine
from distopt.engine.facade import Checkpointed, record_if_asked, watch_first_gradients
from distopt.engine.joining import Joining
from distopt.engine.nonfinite import LossScaler
from distopt.engine.parameters import Parameter, checked_gradient
from distopt.engine.spec import Options, StepSpec
from distopt.engine.views import gradient_views, parameter_views
from distopt.optim import AnyOptimizer, Optimizer, OptimizerWrapper
from distopt.trainer import freshness, gluon

# bounds of a batch size: 1 / batch_size is a normal float32
LEAST, MOST = 2.0**-126, 2.0**126
Pairs = list[tuple[Parameter, np.ndarray | None]]


class NoLearningRateError(TypeError, AttributeError):
    """The error for an optimizer that is not distopt's and so has no known learning rate."""

    # It is an AttributeError too, so that `hasattr` and `inspect.getmembers` can ask.


class Trainer(Checkpointed):
    """A trainer that applies an optimizer to parameters, with the gradients of all ranks, after each backward pass.

    A gradient is *fresh* once it was assigned or touched (``Parameter``), and stale after a step, one that was refused
    too.  Before any data moves all ranks agree on what is fresh where, on ``batch_size``, and on what they do; errors
    are the same on all ranks, and a call that raised for such a reason may be made again when that has been mended.
    What raises later, as a gradient of another shape, leaves gradients fresh, but for those in ``gradient_views`` if
    there is a ``loss_scaler``, by which they may have been divided in place.
    Rank 0's parameters are broadcast at the first step.  After a step the contents of gradients in ``gradient_views``
    are undefined; other gradients are as they were.  A rank may ``join()`` if the others continue with ``step`` and its
    last batch size.

    Args:
        params: a dict of ``Parameter``, taken in the order of its keys, or a list or tuple.  One that is given more
            than once is one parameter; names must be unique.  Those with ``grad_req='null'`` are left out; one that had
            it at the first step cannot be trained later (ValueError).
        optimizer: the name of one of ``distopt.optim`` in lower case, or any object that ``DistOpt`` takes.
        optimizer_params: the arguments of an optimizer by name, by distopt's names, or ``learning_rate``,
            ``lr_scheduler``, ``wd``, ``beta1``, ``beta2``.  A ``learning_rate`` beside an ``lr_scheduler`` becomes the
            scheduler's ``base_lr``; ``aggregate_num`` and ``use_fused_step`` are ignored.
        kvstore: None, a communicator, or 'device', 'local', 'dist', 'dist_sync', 'dist_device_sync', 'horovod' or
            'byteps', which all mean None.
        compression_params: ``{'type': '2bit', 'threshold': 0.5}``, or the types '1bit', 'fp16', 'topk' (with a
            ``density``) and 'none'.  It may be assigned later: what '2bit', '1bit' or 'topk' leave behind waits for the
            next step with one of them.  'exchange' is that of ``DistOpt.step``, a gather by default: the sum is all
            that the ranks have sent, as MXNet's servers make it.
        update_on_kvstore: None or False; there is no server.
        communicator: the communicator; None is ``distopt.world()``.
        threshold: the number of elements that fill a bucket (``buckets.plan``).
        loss_scaler: a ``LossScaler``, by whose scale gradients are divided before they are summed; with None, gradients
            that are not finite raise FloatingPointError on every rank.
        clip_norm: the largest norm, as for ``DistOpt``, of the sums divided by ``batch_size``, without parameters that
            are left alone.

    Raises:
        TypeError: an argument has the wrong type; the text names it.
        ValueError: an argument is out of range; the text names it.

    Example:
        >>> import numpy as np
        >>> from distopt import Parameter, Trainer
        >>> from distopt.comm import LocalCommunicator
        >>> weight = Parameter("weight", np.ones(2, "f4"))
        >>> trainer = Trainer([weight], "sgd", {"learning_rate": 0.5}, communicator=LocalCommunicator())
        >>> weight.grad = np.array([4, 8], "f4")  # the sum over a batch of 8 samples
        >>> trainer.step(batch_size=8)
        True
        >>> weight.data
        array([0.75, 0.5 ], dtype=float32)
    """

    def __init__(
        self,
        params: Any,
        optimizer: str | AnyOptimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = None,
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        communicator: Communicator | None = None,
        threshold: int = 2097152,
        loss_scaler: LossScaler | None = None,
        clip_norm: float | None = None,
    ):
        if update_on_kvstore is not None and update_on_kvstore is not False:
            raise ValueError(f"update_on_kvstore must be None or False: no server updates, got {update_on_kvstore!r}")
        if not isinstance(loss_scaler, LossScaler | None):
            raise TypeError(f"loss_scaler must be a LossScaler or None, got {type(loss_scaler).__name__}")
        self._params = gluon.parameters(params)
        rule = gluon.optimizer(optimizer, optimizer_params)
        for field in ("lr_mult", "wd_mult") if isinstance(rule, Optimizer) else ():
            for name in set(getattr(rule, field)) - {p.name for p in self._params}:
                raise ValueError(f"keys of {field} must be names of parameters, got {name!r}")
        self.compression_params = compression_params
        self.communicator = gluon.communicator(kvstore, communicator) or world()
        # the parameters that are trained now
        self._active = self._params
        # of the current call
        self._batch_size = 1.0
        # whether stale gradients are allowed
        self._ignores = False
        # names of parameters with a fresh gradient on some rank
        self._touched: set[str] = set()
        # the ranks of a stale gradient, by name
        self._stale: dict[str, list[int]] = {}
        # True: sums wait for ``update``; False: they were refused
        self._sums: bool | None = None
        # arguments of the last call, if it was ``step``
        self._last_step: tuple[float, bool] | None = None
        # (parameter, gradient, stand-in)
        self._stand_ins: list[tuple[Parameter, np.ndarray | None, np.ndarray]] = []
        comm = self.communicator
        options = Options.checked(
            comm,
            nonfinite="raise" if loss_scaler is None else loss_scaler,
            allow_missing=True,
            clip_norm=clip_norm,
        )
        engine = Engine(rule, comm, options, threshold=threshold, kind="Trainer")
        super().__init__(engine, {"threshold": threshold, "clip_norm": clip_norm, "loss_scaler": loss_scaler})
        record_if_asked(engine)
        watch_first_gradients(engine)

    # -- properties

    @property
    def optimizer(self) -> Any:
        """The optimizer object."""
        return self.opt

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; TypeError for an optimizer that is not one of distopt's."""
        self.engine.nonfinite.poll()
        return self._own_optimizer("learning_rate").lr_value

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate to a number; all ranks must set the same.

        Raises:
            ValueError: the learning rate is a schedule, or ``lr`` is below 0 or not finite.
            TypeError: ``lr`` is a schedule, or the optimizer is not one of distopt's.
        """
        rule = self._own_optimizer("set_learning_rate")
        if rule.is_scheduled("lr"):
            raise ValueError(
                "set_learning_rate: the learning rate must be a number, got a schedule; assign trainer.optimizer.lr"
            )
        if callable(lr):
            raise TypeError(
                "set_learning_rate: lr must be a number, got a callable; give a schedule when the optimizer is made"
            )
        rule.lr = lr

    def _own_optimizer(self, what: str) -> Optimizer:
        rule = self.opt
        while isinstance(rule, OptimizerWrapper):
            rule = rule.opt
        if not isinstance(rule, Optimizer):
            raise NoLearningRateError(f"{what}: the optimizer must be one of distopt.optim, got {type(rule).__name__}")
        return rule

    @property
    def compression_params(self) -> Mapping[str, Any] | None:
        """The compression of gradients from now on; all ranks must assign the same."""
        return self._compression_params

    @compression_params.setter
    def compression_params(self, params: Mapping[str, Any] | None) -> None:
        self._compression, self._exchange = gluon.compressor(params), gluon.exchange(params)
        self._compression_params = None if params is None else dict(params)

    def gradient_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Return arrays in the buckets' memory, one per parameter; gradients written there need not be copied.

        Assign them as the parameters' ``grad``, and call ``touch()`` for those that the backward pass has written.  The
        plan is of all parameters that are trained, whichever are given, in the Trainer's order.

        Raises:
            ValueError: on every rank alike, for a parameter with ``grad_req='add'``: after a step the contents of its
                view are undefined.
        """

        def check(names: list[str]) -> None:
            for p in self._params:
                if p.name in names and p.grad_req == "add":
                    raise ValueError(
                        f"{p.name}: grad_req must be 'write' for gradient_views, got 'add', whose gradient must stay"
                    )

        return gradient_views(self.engine, params, check, self._planned)

    def parameter_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """Return an array per parameter in memory that all ranks share (``DistOpt.parameter_views``).  Collective."""
        return parameter_views(self.engine, params, self._planned)

    # -- a step

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> bool:
        """Sum the gradients over ranks, divide by ``batch_size``, and update the parameters.  Collective.

        Args:
            batch_size: the size of the global batch, of all ranks together.
            ignore_stale_grad: whether stale gradients are allowed.  One counts as zeros where another rank's is fresh,
                and a parameter without a fresh one anywhere is left alone: no weight decay, no momentum.

        Returns:
            True if an update was applied; on a GPU the next call may take it back.

        Raises:
            ValueError: on every rank alike; it names stale gradients and their ranks.
        """
        self.engine.let_in()
        self._agree_on_fresh("step", batch_size, ignore_stale_grad)
        self._last_step = batch_size, ignore_stale_grad
        return self._run_and_consume(lambda: self.engine.step(self._fresh_pairs(), self._spec), self._make_stale)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> bool:
        """Replace each ``param.grad`` by its sum over ranks, as the compressor carries it, for ``update``.  Collective.

        In between the sums may be changed, on all ranks alike: clipped by their norm, for example.  For an array that
        cannot hold its sum, read-only or of 16 bits, another one stands in until the update; sums are float32 or
        float64.  On a GPU the host waits here for the outcome.

        Args:
            ignore_stale_grad: as for ``step``.

        Returns:
            False if the sums were not finite and are skipped; then ``update`` skips too.
        """
        self.engine.let_in()
        self._agree_on_fresh("allreduce_grads", 1.0, ignore_stale_grad)
        self._last_step = None
        self._sums = self._run_and_consume(self._sum_up, self._make_stale)
        return self._sums

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> bool:
        """Divide the sums of ``allreduce_grads`` by ``batch_size``, and update the parameters.  Collective.

        Together they are ``step``.

        Args:
            batch_size: the size of the global batch, of all ranks together.
            ignore_stale_grad: as for ``step``.

        Returns:
            True if an update was applied.
        """
        waits = self._sums
        error = None
        if waits is None:
            error = RuntimeError("update must come after allreduce_grads, whose sums it applies; call that first")
        self._agree("update", batch_size, ignore_stale_grad, error=error)
        self._check_stale(self._stale)

        def forget() -> None:
            self._restore_gradients()
            self._make_stale()

        return self._run_and_consume(self._update_by_sums if waits else lambda: False, forget)

    @property
    def _spec(self) -> StepSpec:
        """The specification of a step: sums are divided by the batch size; parameters fresh nowhere are left alone."""
        names = self.engine.store.collector.order or [p.name for p in self._planned]
        only = None if self._touched.issuperset(names) else frozenset(self._touched)
        return StepSpec(
            lambda: self._compression,
            break_even=True,
            exchange=self._exchange,
            divisor=self._batch_size,
            only=only,
        )

    def _fresh_pairs(self) -> Pairs:
        trained = set(self._active) if not self.engine.agreement.joined else ()
        return [(p, p.grad if p.fresh and p in trained else None) for p in self._planned]

    def _sum_up(self) -> bool:
        """Replace gradients by their sums over ranks, and tell if those are finite.  Collective."""
        sums = self.engine.transaction(self._exchange_sums)
        if sums is None:
            return False
        with self.engine.progress.halfway:
            return self._write_sums(sums)

    def _exchange_sums(self) -> list[Reduced] | None:
        """Return the sum over ranks of each bucket; None if it is not finite.  Collective."""
        engine = self.engine
        attempt = engine.voted(engine.prepare, self._fresh_pairs(), self._spec)
        if attempt is None:
            return None
        with engine.progress.halfway:
            reducer = attempt.reducer or engine.choose_reducer(attempt.spec)
            return engine.finite_sums(reducer, reducer.reduce([b.gradient for b in engine.store.buckets]))

    def _write_sums(self, sums: list[Reduced]) -> bool:
        engine, buckets = self.engine, self.engine.store.buckets
        touched = [p for p in self._active if p.name in self._touched]
        targets = write_sums(buckets, sums, {p.name: p.grad for p in touched}, engine.store.skip_flag)
        self._stand_ins = [(p, p.grad, targets[p.name]) for p in touched if p.grad is not targets[p.name]]
        for p, _, stand_in in self._stand_ins:
            p.grad = stand_in
        if any(len(total) > 1 for total in sums):
            # Others have read this rank's shard.
            engine.comm.barrier()
        engine.accumulator.reset(engine.store)
        engine.store.mark_stream()
        finite = False
        try:
            finite = engine.sums_are_finite()
        finally:
            if not finite:
                self._restore_gradients()
        return finite

    def _update_by_sums(self) -> bool:
        """Update by gradients that are the same on all ranks.  Collective."""
        engine, spec = self.engine, self._spec
        attempt = engine.transaction(lambda: engine.voted(self._packed_sums, spec))
        if attempt is None or not engine.settle_call(spec):
            return False
        with engine.progress.halfway:
            engine.accumulator.open(0, reduced=True)
            sums: list[Reduced] = [unsharded(b.gradient) for b in engine.store.buckets]
            engine.update(*engine.hooked_and_clipped(sums, 1.0 / engine.step_context.divisor, spec), spec)
        engine.end_call(applied=True)
        return True

    def _packed_sums(self, spec: StepSpec) -> Attempt:
        """Pack the sums as the caller has left them; an error is kept for the vote."""
        engine, attempt = self.engine, Attempt(spec)
        attempt.error = engine.begin()
        if attempt.error:
            return attempt
        attempt.compressor = engine.compressor
        try:
            engine.store.clear_counts(engine.store.of_ranks)
            engine.checked_threshold(spec)
            engine.step_context.resume(spec)
            engine.declare_numbers(attempt.compressor)
            for p in self._active:
                if engine.store.collector.order[p.name].value is not p.data:
                    raise ValueError(
                        f"{p.name}: data must be the array of when its gradient was summed, got another one"
                    )
            sums = {p.name: p.grad for p in self._active if p.name in self._touched}
            read_sums(engine.store.buckets, sums, _checked_sum)
        except Exception as error:
            attempt.error = error
        return attempt

    # -- freshness

    @property
    def _planned(self) -> list[Parameter]:
        """The parameters that are trained; before the first step also those for which a checkpoint holds state."""
        kept = self.engine.store.restored_names()
        return [p for p in self._params if p.grad_req != "null" or p.name in kept]

    def _agree_on_fresh(self, call: str, batch_size: Any, ignore: Any) -> None:
        """Vote on which gradients are fresh on which rank, before data move.  Collective."""
        self._active = [p for p in self._params if p.grad_req != "null"]
        known, error = self.engine.store.collector.order, None
        if late := [p.name for p in self._active if known and p.name not in known]:
            text = f"{', '.join(late[:5])}: grad_req was 'null' at the first step; make a new Trainer with these states"
            error = ValueError(text)
        mine = [] if self.engine.agreement.joined else [p.name for p in self._active if not p.fresh]
        reports = self._agree(call, batch_size, ignore, json.dumps(mine) if mine else "", error)
        stale = freshness.stale_by_name(reports)
        touched = {p.name for p in self._active if len(stale.get(p.name, ())) < self.engine.agreement.live}
        self._check_stale(stale)
        if self.engine.store.sharded and not touched.issuperset(self.engine.store.collector.order):
            text = "no rank has a gradient of some parameter, but shared parameters are updated all at once"
            raise agreed(ValueError(text), self.engine.comm.rank == 0)
        self._stale, self._touched, self._sums = stale, touched, None

    def _agree(
        self, call: str, batch_size: Any, ignore: Any, report: str = "", error: Exception | None = None
    ) -> list[str]:
        """Return all ranks' reports if they make the same call; else raise on all alike, unchanged.  Collective."""
        engine = self.engine
        engine.check_open()
        engine.resolve_last_step()
        try:
            number = as_float("batch_size", batch_size)
            if not LEAST <= number <= MOST:
                raise ValueError(f"batch_size must be in [{LEAST:.2g}, {MOST:.2g}], got {batch_size!r}")
            if not isinstance(ignore, bool | np.bool_):
                raise TypeError(f"ignore_stale_grad must be True or False, got {ignore!r}")
            self._batch_size, self._ignores = number, bool(ignore)
        except (TypeError, ValueError) as e:
            error = e
        agreement, progress = engine.agreement, engine.progress
        frozen = [p.name for p in self._params if p.grad_req == "null"]
        options = f"batch_size={self._batch_size:.17g}, ignore_stale_grad={self._ignores}, frozen={frozen}"
        line = f"{call} number {progress.calls + 1} of Trainer {agreement.number}, {options}"
        reports = agreement.vote_on_lines(progress.name, [line], error, report, f", its {call}")
        if not agreement.live:
            raise AllJoinedError
        return reports

    def _check_stale(self, stale: Mapping[str, Sequence[int]]) -> None:
        """Raise ValueError, on all ranks alike, for gradients that may not be stale."""
        if stale and not self._ignores:
            raise agreed(ValueError(freshness.stale_message(stale)), self.engine.comm.rank == 0)

    def _run_and_consume(self, do: Callable[[], bool], consume: Callable[[], None]) -> bool:
        """Run a step, and call ``consume`` if it used the gradients: applied them, or refused them as not finite."""
        # An error before that leaves them fresh; one that is raised after the update does not.
        updates = self.engine.progress.updates
        try:
            done = do()
        except BaseException as error:
            if isinstance(error, FloatingPointError) or self.engine.progress.updates > updates:
                consume()
            else:
                self._make_overwritten_stale()
            raise
        consume()
        return done

    def _make_overwritten_stale(self) -> None:
        """Make gradients stale that packing has overwritten in views: divided by the loss scale, or by another's."""
        buckets, order = self.engine.store.buckets_if_any, self.engine.store.collector.order
        if buckets is None or self._sums is not None:
            return
        for p in self._active:
            if p.fresh and device.is_array(p.grad) and p.name in order:
                home = 0 if self.engine.nonfinite.policy.adapts else device.address(buckets.view(p.name))
                p.fresh = not buckets.in_other_views(np.array([device.address(p.grad)], np.uintp), np.uintp(home)).any()

    def _make_stale(self) -> None:
        self._sums = None
        for p in self._params:
            p.fresh = False

    def _restore_gradients(self) -> None:
        """Give parameters their gradients back where other arrays stood in."""
        for p, gradient, stand_in in self._stand_ins:
            if gradient is not None and p.grad is stand_in:
                p.grad = gradient
        self._stand_ins = []

    def join(self) -> None:
        """Take part in the others' steps until no rank has batches left, without own batches.  Collective in the end.

        As ``DistOpt.join``; the others must continue with ``step`` and this rank's last batch size.
        """
        self.engine.join(self._shadow_step)

    def _shadow_step(self) -> None:
        """Make the last step again, without gradients.  Collective."""
        if self._last_step is None:
            error = RuntimeError("join() comes after step(): the sums of allreduce_grads may be changed before update")
            self._agree("step", 1.0, True, error=error)
        else:
            self.step(*self._last_step)

    def rejoin(self, extra: Any = None) -> Any:
        """In a process that was started in the place of a lost one: wait until the others admit it, and do as they do.

        As ``DistOpt.rejoin``, with the parameters of the constructor, those with ``grad_req='null'`` among them.  The
        others admit it before a ``step`` or an ``allreduce_grads``, and its gradients are stale, as everyone's are
        after a step::

            trainer.rejoin()
            for step in range(trainer.step_counter, steps):
                ...  # forward, backward
                trainer.step(batch_size)

        Args:
            extra: what else a process that joins needs, or a callable that returns it.

        Returns:
            The others' ``extra``, {} if there was none; None, and nothing is changed, in a job that begins.

        Raises:
            ValueError: it has other parameters, or another kind of optimizer.
            RuntimeError: the others have ended before they have admitted it.
        """
        joins = self.communicator.outside
        others = Joining(self._state, self._checkpointer, self._params, extra).rejoin()
        if joins:
            self._make_stale()
        return others

    # -- states

    def save_states(self, path: str | Path) -> Path:
        """Save all but the parameters in a new checkpoint in the folder ``path``, as ``save``.  Collective.

        Returns:
            The checkpoint's folder.
        """
        return self.save(path)

    def load_states(self, path: str | Path) -> None:
        """Load the newest good checkpoint in the folder ``path``, as ``load``.  Collective.

        Batch size, ``rescale_grad`` and all hyper-parameters stay this Trainer's.

        Raises:
            FileNotFoundError: on every rank alike, if there is none.
            ValueError: on every rank alike, for the states of another optimizer.
        """
        if self.load(path) is None:
            raise agreed(FileNotFoundError(f"{path}: there is no checkpoint"), self.engine.comm.rank == 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, as ``DistOpt.load_state_dict``; sums that wait for ``update`` are dropped."""
        super().load_state_dict(state)
        self._restore_gradients()
        self._sums = None


def _checked_sum(name: str, home: np.ndarray, total: Any) -> np.ndarray:
    """Return a sum that fits its bucket; TypeError or ValueError for one that does not."""
    gradient = checked_gradient(name, home, total)
    if gradient is None:
        raise ValueError(f"{name}: the gradient must be the sum of allreduce_grads, got None")
    return gradient
