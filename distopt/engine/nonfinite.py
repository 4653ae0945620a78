"""What becomes of a step whose gradients are not finite on some rank: raise, skip, propagate, or scale the loss."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from distopt.checks import as_float, check_int
from distopt.comm.control import agreed
from distopt.engine.bucket_store import BucketStore
from distopt.engine.progress import Progress
from distopt.optim.adapters import OptimizerAdapter

# Refused calls in a row.
PATIENCE = 10
# The largest power of two whose reciprocal is a normal float32.
LARGEST = 2.0**126

Learn = Callable[[], None]


class Policy:
    """'raise': FloatingPointError on every rank.  What all policies have in common."""

    # A *call* is one forward and backward pass; with `num_batches` a step has several.  Each call that comes to an end
    # is announced once, by `passed` or by `refused`, on every rank; `enforce` may raise afterwards.

    # The attributes that a step replaces (``Undo.keep_fields``).
    CHANGES: Sequence[str] = ("skipped", "in_a_row")
    # Are gradients and sums checked for what is not finite?
    checks_finite = True
    # Does the divisor change from call to call?
    adapts = False
    # The next call's gradients are divided by it while they are packed.
    divisor = 1.0

    def __init__(self) -> None:
        self.skipped = self.in_a_row = 0
        self._speaks = True

    def attach(self, rank: int, learn: Learn) -> None:
        """Attach the policy to one model on this rank; ``learn()`` tells it at once how the last call ended."""
        self._speaks = rank == 0

    def passed(self) -> None:
        """Count a call that was finite from its gradients to its sums, which ends a row of bad ones."""
        self.in_a_row = 0

    def refused(self) -> None:
        """Count a call that was not finite, and has changed nothing on any rank."""

    def enforce(self, name: str, nonfinite: str) -> None:
        """Raise, on all ranks, for a refused call; ``nonfinite`` says what is not finite, '' if all is."""
        if nonfinite:
            self._raise(f"gradients of {name} are not finite: {nonfinite}")

    def accepts(self, name: str, nonfinite: str) -> bool:
        """Tell if a call is to be applied; ``nonfinite`` is the same text on every rank, '' if all is finite."""
        if nonfinite:
            self.refused()
        self.enforce(name, nonfinite)
        return not nonfinite

    def state(self) -> dict[str, float]:
        """Return the numbers that change from call to call, beside ``skipped`` and ``in_a_row``."""
        return {}

    def check(self, state: Any) -> None:
        """Raise TypeError or ValueError for what cannot be gone on from."""
        if not isinstance(state, dict):
            raise TypeError(f"loss_scale must be a dict, got {type(state).__name__}")

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what ``state`` returned, of this policy or of another one."""

    def _raise(self, text: str) -> None:
        raise agreed(FloatingPointError(text), self._speaks)


class Skip(Policy):
    """'skip': the call is dropped on every rank and counted; ``PATIENCE`` in a row raise."""

    def refused(self) -> None:
        """Count a call that was dropped."""
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1

    def enforce(self, name: str, nonfinite: str) -> None:
        """Raise FloatingPointError if ``PATIENCE`` calls in a row were refused."""
        if nonfinite and self.in_a_row >= PATIENCE:
            self._raise(f"{name}: {self.in_a_row} steps in a row are not finite: {nonfinite}")


class Propagate(Policy):
    """'propagate': infinities and NaNs are not looked for."""

    checks_finite = False


class LossScaler(Skip):
    """Keep the gradients of 16-bit arithmetic above its smallest numbers: a dynamic loss scale (Micikevicius, 2018).

    Multiply the loss by ``scale`` in every forward pass.  Gradients are divided by it while they are packed, before
    they meet anything that outlives the step; so a change of the scale changes nothing else.  If a gradient, or a sum,
    of any rank is not finite, the call is dropped on every rank and the scale is divided by ``factor``, for the very
    next forward pass; after ``window`` finite calls in a row it is multiplied by it.  Scales are powers of two, so that
    neither rounds.  At ``min_scale`` a step or two may be dropped, but 10 in a row raise FloatingPointError on every
    rank: that is no overflow.

    ``init_scale``, ``max_scale``, ``min_scale``: powers of two from 1 to 2^126, in this order: min, init, max;
    ``factor``: a power of two of at least 2; ``window``: an integer of at least 1.  One scaler belongs to one DistOpt
    or Trainer, whose checkpoints hold it.

    Raises TypeError and ValueError that name the argument.

    Example:
        >>> import numpy as np
        >>> from distopt import DistOpt, LossScaler, Parameter
        >>> from distopt.optim import SGD
        >>> scaler = LossScaler(init_scale=4.0)
        >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt(SGD(0.5), nonfinite=scaler)
        >>> opt([(p, np.full(2, np.inf, np.float32))]), scaler.scale  # dropped
        (False, 2.0)
        >>> opt([(p, scaler.scale * np.ones(2, np.float32))]), p.data
        (True, array([0.5, 0.5], dtype=float32))
    """

    CHANGES = "skipped", "in_a_row", "divisor", "clean"
    adapts = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        factor: float = 2.0,
        window: int = 2000,
        max_scale: float = 2.0**24,
        min_scale: float = 1.0,
    ):
        super().__init__()
        self.min_scale = _power_of_two("min_scale", min_scale, 1.0, LARGEST)
        self.max_scale = _power_of_two("max_scale", max_scale, self.min_scale, LARGEST)
        self.init_scale = self.divisor = _power_of_two("init_scale", init_scale, self.min_scale, self.max_scale)
        self.factor = _power_of_two("factor", factor, 2.0, LARGEST)
        self.window = check_int("window", window, least=1)
        # Finite calls since the scale was changed, or one was dropped.
        self.clean = 0
        # How the guard that it belongs to learns the last outcome.
        self._learn: weakref.WeakMethod[Learn] | None = None

    @property
    def scale(self) -> float:
        """The loss scale, to multiply the loss by.  On a GPU the host waits here for the outcome of the last call."""
        learn = self._learn() if self._learn else None
        if learn:
            learn()
        return self.divisor

    def attach(self, rank: int, learn: Learn) -> None:
        """Attach the scaler to one model; ValueError if it belongs to another."""
        if self._learn:
            raise ValueError(
                "a LossScaler must be of one DistOpt or Trainer, got one that belongs to another; make one for each"
            )
        super().attach(rank, learn)
        self._learn = weakref.WeakMethod(learn)

    def passed(self) -> None:
        """Count a finite call; multiply the scale by ``factor`` after ``window`` of them in a row."""
        super().passed()
        self.clean += 1
        if self.clean == self.window:
            self.divisor, self.clean = min(self.divisor * self.factor, self.max_scale), 0

    def refused(self) -> None:
        """Divide the scale by ``factor``; only calls at the smallest scale count as a row of refused ones."""
        at_floor, row = self.divisor == self.min_scale, self.in_a_row
        super().refused()
        self.in_a_row = row + 1 if at_floor else 0
        self.divisor, self.clean = max(self.divisor / self.factor, self.min_scale), 0

    def enforce(self, name: str, nonfinite: str) -> None:
        """Raise FloatingPointError if ``PATIENCE`` calls in a row were refused at the smallest scale."""
        if nonfinite and self.in_a_row >= PATIENCE:
            self._raise(
                f"{name}: {self.in_a_row} steps in a row are not finite at min_scale={self.min_scale}: {nonfinite}"
            )

    def state(self) -> dict[str, float]:
        """Return the scale, and the finite calls since it was changed."""
        return {"scale": self.divisor, "clean": self.clean}

    def check(self, state: Any) -> None:
        """ValueError for a scale that this scaler could not have; {} is of a run without one."""
        super().check(state)
        if not state:
            return
        if set(state) != {"scale", "clean"}:
            raise ValueError(f"the entries of loss_scale must be ['clean', 'scale'], got {sorted(state)}")
        _power_of_two("the scale of loss_scale", state["scale"], self.min_scale, self.max_scale)
        check_int("the clean steps of loss_scale", state["clean"], least=0)

    def restore(self, state: dict[str, float]) -> None:
        """Take the scale and the count of a checkpoint."""
        if state:
            # A window that is shorter than the one it was saved with may be full already.
            self.divisor, self.clean = float(state["scale"]), min(int(state["clean"]), self.window - 1)

    def __repr__(self) -> str:
        """Return the arguments of the constructor, which ranks compare."""
        made = [f"{k}={getattr(self, k)}" for k in ("init_scale", "factor", "window", "max_scale", "min_scale")]
        return f"LossScaler({', '.join(made)})"


POLICIES: dict[str, Callable[[], Policy]] = {"raise": Policy, "skip": Skip, "propagate": Propagate}


def policy(nonfinite: Any) -> Policy:
    """Return the policy of this name, or a policy itself; raise ValueError for anything else."""
    if isinstance(nonfinite, Policy):
        return nonfinite
    if not isinstance(nonfinite, str) or nonfinite not in POLICIES:
        raise ValueError(f"nonfinite must be one of {tuple(POLICIES)} or a LossScaler, got {nonfinite!r}")
    return POLICIES[nonfinite]()


def _power_of_two(name: str, value: Any, least: float, most: float) -> float:
    """Return ``value`` as a float; TypeError or ValueError that names the field if it is no power of two in range."""
    number = as_float(name, value)
    if not least <= number <= most or math.frexp(number)[0] != 0.5:
        raise ValueError(f"{name} must be a power of two in [{least}, {most}], got {value}")
    return number


class NonfiniteGuard:
    """Apply a policy to what the checks of a model's buckets find."""

    # On the host a step that is not finite ends before its update.  On a GPU kernels skip it by a flag, and the host
    # learns of it afterwards: the counters are rolled back, and the policy applies in the next call.

    # The attributes that a step replaces (``Undo.keep_fields``).
    CHANGES = ("refused",)

    def __init__(self, policy: Policy, store: BucketStore, progress: Progress, optimizer: OptimizerAdapter):
        self.policy, self._store, self._progress, self._optimizer = policy, store, progress, optimizer
        # Entries of the last step that were not finite, as the GPU said, and no vote knows yet.
        self.refused = 0

    def lines(self) -> list[str]:
        """Return the numbers that must be the same on all ranks in the next vote."""
        return [f"the loss scale {self.policy.divisor!r}"]

    def accepts(self, nonfinite: str) -> bool:
        """Tell if the present call is to be applied; ``nonfinite`` is the same on all ranks, '' if all is finite."""
        return not nonfinite or self.policy.accepts(self._progress.name, nonfinite)

    def poll(self) -> None:
        """Learn from the GPU what became of the last step, and roll back one that was refused."""
        capacity = self._store.capacity
        if self._store.check.pending and not self.learn_if_refused():
            self.policy.passed()
        if capacity:
            capacity.poll(count=not self.refused)

    def learn_if_refused(self) -> bool:
        """Ask the GPU whether it has refused the present call, and roll that back then.  The host waits."""
        self.refused = self._store.check.outcome()
        if self.refused:
            self.roll_back()
            self.policy.refused()
        return self.refused > 0

    def roll_back(self) -> None:
        """Count as if the last step had not been."""
        if self._progress.roll_back():
            self._optimizer.take_back()

    def pop_refused(self) -> int:
        """Return how many entries of the last step were not finite, and forget it."""
        entries, self.refused = self.refused, 0
        return entries

    def enforce(self, nonfinite: str) -> None:
        """Raise, on all ranks, what the policy raises for the present call, if it was refused."""
        self.policy.enforce(self._progress.name, nonfinite)
