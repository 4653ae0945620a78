"""Gluon's Trainer: sums over ranks, divided by the size of the whole batch, for parameters known beforehand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distopt import device, freshness, gluon
from distopt.buckets import States, Sum, leave, take
from distopt.comm import Communicator, world
from distopt.conditions import Kind
from distopt.gradients import Parameter, checked_gradient
from distopt.guard import agreed, fingerprint
from distopt.loop import Exchange, Packed, as_they_are
from distopt.memory import AllJoinedError
from distopt.nonfinite import LossScaler
from distopt.numbers import real
from distopt.optim import AnyOptimizer, Optimizer, Wrapper
from distopt.saving import Saving

LEAST, MOST = 2.0**-126, 2.0**126  # of a batch, so that 1 / batch_size is a normal float32
Pairs = list[tuple[Parameter, np.ndarray | None]]


class NoLearningRateError(TypeError, AttributeError):
    """The optimizer is not distopt's; an AttributeError too, so that ``hasattr`` and ``inspect.getmembers`` can ask."""


class Trainer(Saving):
    """Apply an optimizer to parameters, with the gradients of all ranks: ``step(batch_size)`` after each backward pass.

    * ``params``: a dict of ``Parameter``, taken in the order of its keys, or a list or tuple.  One that is given more
      than once is one parameter; names must be unique; those with ``grad_req='null'`` are left out, and those that had
      it at the first step for good: ValueError.
    * ``optimizer``: the name of one of ``distopt.optim`` in lower case, made with ``optimizer_params`` (by distopt's
      names, or ``learning_rate``, ``lr_scheduler``, ``wd``, ``beta1``, ``beta2``), or any object that DistOpt takes.
    * ``kvstore``: None, a communicator, or 'device', 'local', 'dist_sync', which all are None; ``communicator``: the
      same; None is ``distopt.world()``.
    * ``compression_params``: ``{'type': '2bit', 'threshold': 0.5}``, or the types '1bit', 'fp16', 'topk' (with a
      ``density``) and 'none'; may be assigned on the way: what '2bit', '1bit' or 'topk' leave behind waits for the next
      step with one of them.
    * ``update_on_kvstore``: None or False; there is no server.
    * ``threshold``: elements that fill a bucket (``buckets.plan``).
    * ``loss_scaler``: a ``LossScaler``, by whose scale gradients are divided before they are summed; None: gradients
      that are not finite raise FloatingPointError on every rank.
    * ``clip_norm``: as DistOpt's, of the sums divided by ``batch_size``, without parameters that are left alone.

    A gradient is *fresh* once it was assigned or touched (``Parameter``), and stale after a step, one that was refused
    too.  Before any data moves all ranks agree on what is fresh where, on ``batch_size``, and on what they do; errors
    are the same on all ranks, and a call that raised for such a reason may be made again when that has been mended.
    What raises later, as a gradient of another shape, leaves gradients fresh, but for those in ``gradient_views`` if
    there is a ``loss_scaler``, by which they may have been divided in place.
    Rank 0's parameters are broadcast at the first step.  After a step the contents of gradients in ``gradient_views``
    are undefined; other gradients are as they were.  A rank may ``join()`` if the others go on with ``step`` and its
    last batch size.

    Raises TypeError and ValueError that name the argument.
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
        _check_multipliers(rule, self._params)
        self.compression_params = compression_params
        self.communicator = gluon.communicator(kvstore, communicator) or world()
        self._active = self._params  # those that are trained now
        self._batch_size = 1.0  # of the present call
        self._ignores = False  # stale gradients
        self._touched: set[str] = set()  # parameters whose gradient is fresh on some rank
        self._stale: dict[str, list[int]] = {}  # ranks on which a gradient is not, by its parameter's name
        self._sums: bool | None = None  # are there sums that wait for ``update``?  False: they were refused
        self._last_step: tuple[float, bool] | None = None  # the arguments of the last call, if that was ``step``
        self._stand_ins: list[tuple[Parameter, np.ndarray | None, np.ndarray]] = []  # for gradients that hold no sum
        super().__init__(
            rule,
            self.communicator,
            threshold=threshold,
            overlap=False,
            broadcast=True,
            nonfinite="raise" if loss_scaler is None else loss_scaler,
            allow_missing=True,
            check_every=0,
            num_batches=1,
            sync_on_apply=True,
            buffSize=4194304,
            clip_norm=clip_norm,
            gradient_hook=None,
        )
        self._options_given["loss_scaler"] = loss_scaler

    # ------------------------------------------------------------------------------------------------- what it has

    @property
    def optimizer(self) -> Any:
        """The optimizer object."""
        return self.opt

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step.  TypeError for an optimizer that is not one of distopt's."""
        self._learn()
        return self._own_optimizer("learning_rate").lr_value

    def set_learning_rate(self, lr: float) -> None:
        """Let the learning rate be a number from now on; all ranks must.

        Raises ValueError if it is a schedule, or for a value below 0 or not finite; TypeError for another schedule, or
        for an optimizer that is not one of distopt's.
        """
        rule = self._own_optimizer("set_learning_rate")
        if rule.is_scheduled("lr"):
            raise ValueError("set_learning_rate: the learning rate is a schedule; assign trainer.optimizer.lr")
        if callable(lr):
            raise TypeError("set_learning_rate: lr must be a number; a schedule is given when the optimizer is made")
        rule.lr = lr

    def _own_optimizer(self, what: str) -> Optimizer:
        rule = self.opt
        while isinstance(rule, Wrapper):
            rule = rule.opt
        if not isinstance(rule, Optimizer):
            raise NoLearningRateError(f"{what} needs an optimizer of distopt.optim, got {type(rule).__name__}")
        return rule

    @property
    def compression_params(self) -> Mapping[str, Any] | None:
        """How gradients are compressed from now on; all ranks must assign the same."""
        return self._compression_params

    @compression_params.setter
    def compression_params(self, params: Mapping[str, Any] | None) -> None:
        self._compression = gluon.compressor(params)
        self._compression_params = None if params is None else dict(params)

    def gradient_views(self, params: Iterable[Any]) -> list[np.ndarray]:
        """As DistOpt's; assign them as the parameters' ``grad``, and ``touch()`` what the backward pass has written.

        The plan is of all parameters that are trained, whichever are given, in the Trainer's order.
        Raises ValueError, on every rank alike, for a parameter with ``grad_req='add'``: after a step the contents of
        its view are undefined.
        """
        return super().gradient_views(params)

    def _check_views(self, names: list[str]) -> None:
        super()._check_views(names)
        for p in self._params:
            if p.name in names and p.grad_req == "add":
                raise ValueError(f"{p.name}: gradient_views is not for grad_req='add', whose gradient must stay")

    def _known(self, params: Iterable[Any]) -> list[str]:
        """The plan is of all that are trained, whichever of them are given."""
        given, planned = list(params), {id(p): p for p in self._planned}
        if not self._collector.order:
            self._collector.enroll([*planned.values(), *(p for p in given if id(p) not in planned)])
        return super()._known(given)

    # ------------------------------------------------------------------------------------------------- a step

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> bool:
        """Sum the gradients over ranks, divide by ``batch_size``, that of all ranks together, and update.

        ``ignore_stale_grad``: a stale gradient counts as zeros where another rank's is fresh, and a parameter without
        a fresh one anywhere is left alone: no weight decay, no momentum.  Without it, ValueError on every rank names
        the stale gradients and their ranks.  True if an update was applied; on a GPU the next call may take it back.
        """
        self._agree_on_fresh("step", batch_size, ignore_stale_grad)
        self._last_step = batch_size, ignore_stale_grad
        return self._use_up(lambda: self._step(self._fresh_pairs(), self._kind), self._make_stale)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> bool:
        """Leave in each ``param.grad`` the sum over ranks, or what a compressor made of it, for ``update``.

        In between the sums may be changed, on all ranks alike: clipped by their norm.  For an array that cannot hold
        its sum, read-only or of 16 bits, another one stands in until the update; sums are float32 or float64.

        False if they were not finite and are skipped, and so is ``update`` then.  On a GPU the host waits here, to
        know.
        """
        self._agree_on_fresh("allreduce_grads", 1.0, ignore_stale_grad)
        self._last_step = None
        self._sums = self._use_up(self._sum_up, self._make_stale)
        return self._sums

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> bool:
        """Divide what ``allreduce_grads`` has summed by ``batch_size``, and update: together they are ``step``.

        True if an update was applied.
        """
        waits = self._sums
        missing = None if waits is not None else RuntimeError("update applies what allreduce_grads has summed: call it")
        self._agree("update", batch_size, ignore_stale_grad, error=missing)
        self._refuse_stale(self._stale)
        return self._use_up(self._update_by_sums if waits else lambda: False, self._forget_sums)

    @property
    def _kind(self) -> Kind:
        return Kind(lambda: self._compression, break_even=True)

    def _fresh_pairs(self) -> Pairs:
        trained = set(self._active) if not self._joined else ()
        return [(p, p.grad if p.fresh and p in trained else None) for p in self._planned]

    def _sum_up(self) -> bool:
        """Gradients are sums over ranks from now on, if those are finite."""
        exchange = self._begun(lambda: self._ready(lambda: self._packed(self._fresh_pairs(), self._kind)))
        if exchange is None:
            return False
        with self._indivisible():
            return self._leave_sums(exchange)

    def _leave_sums(self, exchange: Exchange) -> bool:
        sums = self._finite_sums(exchange([b.gradient for b in self._memory]))
        if sums is None:
            return False
        touched = [p for p in self._active if p.name in self._touched]
        left = leave(self._memory, sums, {p.name: p.grad for p in touched}, self._refusal.number)
        self._stand_ins = [(p, p.grad, left[p.name]) for p in touched if p.grad is not left[p.name]]
        for p, _, stand_in in self._stand_ins:
            p.grad = stand_in
        if any(len(total) > 1 for total in sums):
            self._wire.barrier()  # until here others read this rank's share
        self._window.start(self._memory)
        self._hand_over()
        stand = False
        try:
            stand = self._sums_stand()
        finally:
            if not stand:
                self._give_back()
        return stand

    def _sums_stand(self) -> bool:
        """Were all gradients finite?  On a GPU the host asks."""
        if not self._refusal.later:
            return True
        self._refusal.send()
        refused = self._was_refused()
        self._settle()
        return not refused

    def _update_by_sums(self) -> bool:
        """An update by gradients that are the same on all ranks."""
        exchange = self._begun(lambda: self._ready(self._packed_sums))
        if exchange is None or not self._decided():
            return False
        with self._indivisible():
            self._apply(list(exchange([b.gradient for b in self._memory])), self._divisor)
        self._ended(applied=True)
        return True

    def _packed_sums(self) -> Packed:
        """As the caller left them."""
        try:
            self._checked_threshold(Kind())
            self._take_numbers(self._compressor)
            self._refuse_moved()
            take(self._memory, {p.name: p.grad for p in self._active if p.name in self._touched}, _checked_sum)
        except Exception as error:
            return error, as_they_are
        return None, as_they_are

    def _refuse_moved(self) -> None:
        """ValueError for a parameter whose array is another one than the bucket's table has."""
        for p in self._active:
            if self._collector.order[p.name].value is not p.data:
                raise ValueError(f"{p.name}: its data is another array than when its gradient was summed")

    # ------------------------------------------------------------------------------------------------- what is fresh

    @property
    def _planned(self) -> list[Parameter]:
        """Those that are trained, and before the first step those too of which a checkpoint has something for later."""
        kept = {name for arrays in self._restored.values() for name in arrays}
        return [p for p in self._params if p.grad_req != "null" or p.name in kept]

    def _agree_on_fresh(self, call: str, batch_size: Any, ignore: Any) -> None:
        """The vote before data move: which gradients are fresh on which rank."""
        self._active = [p for p in self._params if p.grad_req != "null"]
        error = self._late()
        mine = [] if self._joined else [p.name for p in self._active if not p.fresh]
        stale = freshness.by_name(self._agree(call, batch_size, ignore, freshness.told(mine), error))
        touched = {p.name for p in self._active if len(stale.get(p.name, ())) < self._live}
        self._refuse_stale(stale)
        if self._sharded and not touched.issuperset(self._collector.order):
            text = "no rank has a gradient of some parameter, but shared parameters are updated all at once"
            raise agreed(ValueError(text), self._wire.rank == 0)
        self._stale, self._touched, self._sums = stale, touched, None

    def _agree(
        self, call: str, batch_size: Any, ignore: Any, report: str = "", error: Exception | None = None
    ) -> list[str]:
        """All ranks' reports, if they make the same call; nothing has been changed when it raises, on all alike."""
        self._check_open()
        self._begun(self._settle)
        try:
            self._batch_size, self._ignores = _checked_size(batch_size), _flag(ignore)
        except (TypeError, ValueError) as e:
            error = e
        line = self._in_full(call)
        control, name, part = self._wire.control, self._name, f", its {call}"
        reports = control.vote(name, fingerprint([line]), lambda: [line], error, report, part, self._joined)
        self._live = control.live
        if not self._live:
            raise AllJoinedError
        return reports

    def _in_full(self, call: str) -> str:
        """What this rank is about to do."""
        frozen = [p.name for p in self._params if p.grad_req == "null"]
        options = f"batch_size={self._batch_size:.17g}, ignore_stale_grad={self._ignores}, frozen={frozen}"
        return f"{call} number {self._calls + 1} of Trainer {self._number}, {options}"

    def _late(self) -> Exception | None:
        """ValueError for a parameter that is trained from now on, and has no place in the plan."""
        known = self._collector.order
        late = [p.name for p in self._active if known and p.name not in known]
        text = f"{', '.join(late[:5])}: grad_req was 'null' at the first step; make a new Trainer with these states"
        return ValueError(text) if late else None

    def _refuse_stale(self, stale: Mapping[str, Sequence[int]]) -> None:
        """ValueError, on all ranks alike, for gradients that may not be stale."""
        if stale and not self._ignores:
            raise agreed(ValueError(freshness.complaint(stale)), self._wire.rank == 0)

    def _use_up(self, do: Callable[[], bool], used_up: Callable[[], None]) -> bool:
        """Use gradients, applied or refused; they are not used up if it raises for another reason before that."""
        before = self.step_counter
        try:
            done = do()
        except BaseException as error:
            if isinstance(error, FloatingPointError) or self.step_counter > before:  # what raised came behind the step
                used_up()
            else:
                self._make_overwritten_stale()
            raise
        used_up()
        return done

    def _make_overwritten_stale(self) -> None:
        """Packing has written over gradients that lie in views: divided there by the loss scale, or another's."""
        for p in self._active if self._buffers is not None and self._sums is None else ():
            if p.fresh and device.is_array(p.grad) and p.name in self._collector.order:
                home = 0 if self._nonfinite.adapts else device.address(self._memory.view(p.name))
                p.fresh = not self._memory.strange(np.array([device.address(p.grad)], np.uintp), np.uintp(home)).any()

    def _make_stale(self) -> None:
        self._sums = None
        for p in self._params:
            p.fresh = False

    def _forget_sums(self) -> None:
        self._give_back()
        self._make_stale()

    def _give_back(self) -> None:
        """Gradients for which others stood in are the parameters' again."""
        for p, own, stand_in in self._stand_ins:
            if own is not None and p.grad is stand_in:
                p.grad = own
        self._stand_ins = []

    # ------------------------------------------------------------------------------------------------- the loop's

    @property
    def _divisor(self) -> float:
        """The batch size: sums are of its gradients."""
        return self._batch_size

    @property
    def _untouched(self) -> list[str]:
        """Parameters that the present step leaves alone."""
        if len(self._touched) >= len(self._collector.order):
            return []
        return [name for name in self._collector.order if name not in self._touched]

    @property
    def _update_looks(self) -> bool:
        return super()._update_looks and not self._untouched

    def _update_with(self, sums: Iterable[Sum], scale: float) -> None:
        """All at once, or those that are touched one by one."""
        if self._untouched:
            touched = {name: known for name, known in self._collector.order.items() if name in self._touched}
            self._optimizer.one_by_one(self._memory, touched, sums, scale)
        else:
            super()._update_with(sums, scale)

    def _finite_sums(self, exchanged: Iterable[Sum]) -> list[Sum] | None:
        """What is sent of a residual without being applied stays in it."""
        if not self._untouched:
            return super()._finite_sums(exchanged)
        before = self._kept_aside()
        sums = super()._finite_sums(exchanged)
        for state, arrays in self._memory.states().items():
            for name in self._untouched:
                if name in before.get(state, {}):
                    device.copy(arrays[name], before[state][name])
                else:
                    device.clear(arrays[name])
        return sums

    def _kept_aside(self) -> States:
        """What outlives the step, of untouched parameters."""
        states = self._memory.states()
        return {state: {n: device.copied(arrays[n]) for n in self._untouched} for state, arrays in states.items()}

    def _company(self) -> None:
        """A rank that has joined makes its last step again, without gradients."""
        if self._last_step is None:
            error = RuntimeError("join() comes after step(): the sums of allreduce_grads may be changed before update")
            self._agree("step", 1.0, True, error=error)
        else:
            self.step(*self._last_step)

    # ------------------------------------------------------------------------------------------------- states

    def save_states(self, path: str | Path) -> Path:
        """Save all but the parameters in a new checkpoint in the folder ``path``, as ``save``; collective.

        Returns the checkpoint's folder.
        """
        return self.save(path)

    def load_states(self, path: str | Path) -> None:
        """Go on from the newest good checkpoint in the folder ``path``, as ``load``; collective.

        Batch size, ``rescale_grad`` and all hyper-parameters stay this Trainer's.  Raises, on every rank alike,
        FileNotFoundError if there is none, and ValueError for the states of another optimizer.
        """
        if self.load(path) is None:
            raise agreed(FileNotFoundError(f"{path}: there is no checkpoint"), self._wire.rank == 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As DistOpt's; sums that wait for ``update`` are dropped."""
        super().load_state_dict(state)
        self._give_back()
        self._sums = None


def _checked_sum(name: str, home: np.ndarray, total: Any) -> np.ndarray:
    """A sum like its bucket; TypeError or ValueError for what is none."""
    found = checked_gradient(name, home, total)
    if found is None:
        raise ValueError(f"{name}: its gradient, which allreduce_grads has summed, is None")
    return found


def _check_multipliers(rule: Any, params: Iterable[Parameter]) -> None:
    """ValueError for multipliers of parameters that there are not."""
    names = {p.name for p in params}
    for field in ("lr_mult", "wd_mult") if isinstance(rule, Optimizer) else ():
        for name in set(getattr(rule, field)) - names:
            raise ValueError(f"{field} has {name!r}, which is no parameter's name")


def _flag(ignore: Any) -> bool:
    if not isinstance(ignore, bool | np.bool_):
        raise TypeError(f"ignore_stale_grad must be True or False, got {ignore!r}")
    return bool(ignore)


def _checked_size(batch_size: Any) -> float:
    number = real("batch_size", batch_size)
    if not LEAST <= number <= MOST:
        raise ValueError(f"batch_size must be in [{LEAST:.2g}, {MOST:.2g}], got {batch_size!r}")
    return number
