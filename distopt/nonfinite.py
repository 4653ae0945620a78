"""What becomes of a step whose gradients are not finite on some rank: raise, skip, do not look, or scale the loss."""

import math
import weakref
from collections.abc import Callable
from typing import Any

from distopt.guard import agreed
from distopt.numbers import real, whole

PATIENCE = 10  # refused calls in a row
LARGEST = 2.0**126  # whose reciprocal is still a normal float32

Learn = Callable[[], None]


class Policy:
    """'raise': FloatingPointError on every rank.  What all policies have in common.

    A *call* is one forward and backward pass; with ``num_batches`` a step has several.  Each call that comes to an end
    is told of once, by ``passed`` or by ``refused``, on every rank alike; ``judge`` may raise afterwards.
    """

    looks = True  # does anybody look?
    adapts = False  # does the divisor change from call to call?
    divisor = 1.0  # of the gradients of the next call, by which they are divided while they are packed

    def __init__(self) -> None:
        self.skipped = self.in_a_row = 0
        self._speaks = True

    def serve(self, rank: int, learn: Learn) -> None:
        """Be the policy of one model on this rank; ``learn()`` lets it know at once what became of the last call."""
        self._speaks = rank == 0

    def passed(self) -> None:
        """A call was finite from its gradients to its sums, and ends a row of bad ones."""
        self.in_a_row = 0

    def refused(self) -> None:
        """A call was not, and has changed nothing on any rank."""

    def judge(self, name: str, found: str) -> None:
        """Raise, where all ranks are, for a call that was refused; ``found`` is what is not finite, '' if all is."""
        if found:
            self._raise(f"gradients of {name} are not finite: {found}")

    def accepts(self, name: str, found: str) -> bool:
        """Is a call to be applied?  ``found`` is the same text on every rank."""
        if found:
            self.refused()
        self.judge(name, found)
        return not found

    def state(self) -> dict[str, float]:
        """What changes from call to call, beside ``skipped`` and ``in_a_row``."""
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
        """Counted."""
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1

    def judge(self, name: str, found: str) -> None:
        """Raise when there were too many in a row."""
        if found and self.in_a_row >= PATIENCE:
            self._raise(f"{name}: {self.in_a_row} steps in a row are not finite: {found}")


class Propagate(Policy):
    """'propagate': nobody looks."""

    looks = False


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
    """

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
        self.window = whole("window", window, least=1)
        self.clean = 0  # finite calls since the scale was changed, or one was dropped
        self._learn: weakref.WeakMethod[Learn] | None = None  # of whom it belongs to

    @property
    def scale(self) -> float:
        """What to multiply the loss by.  On a GPU the host waits here for the outcome of the last call."""
        learn = self._learn() if self._learn else None
        if learn:
            learn()
        return self.divisor

    def serve(self, rank: int, learn: Learn) -> None:
        """Belong to one model; ValueError if it belongs to another."""
        if self._learn:
            raise ValueError("this LossScaler belongs to another DistOpt or Trainer: each needs its own")
        super().serve(rank, learn)
        self._learn = weakref.WeakMethod(learn)

    def passed(self) -> None:
        """Grow, in the end."""
        super().passed()
        self.clean += 1
        if self.clean == self.window:
            self.divisor, self.clean = min(self.divisor * self.factor, self.max_scale), 0

    def refused(self) -> None:
        """Shrink; only what the smallest scale does not help counts as a row of bad calls."""
        at_floor, row = self.divisor == self.min_scale, self.in_a_row
        super().refused()
        self.in_a_row = row + 1 if at_floor else 0
        self.divisor, self.clean = max(self.divisor / self.factor, self.min_scale), 0

    def judge(self, name: str, found: str) -> None:
        """Raise when there were too many in a row at the floor."""
        if found and self.in_a_row >= PATIENCE:
            self._raise(f"{name}: {self.in_a_row} steps in a row are not finite at min_scale={self.min_scale}: {found}")

    def state(self) -> dict[str, float]:
        """Scale and count."""
        return {"scale": self.divisor, "clean": self.clean}

    def check(self, state: Any) -> None:
        """ValueError for a scale that this scaler could not have; {} is of a run without one."""
        super().check(state)
        if not state:
            return
        if set(state) != {"scale", "clean"}:
            raise ValueError(f"loss_scale has the entries ['clean', 'scale'], got {sorted(state)}")
        _power_of_two("the scale of loss_scale", state["scale"], self.min_scale, self.max_scale)
        whole("the clean steps of loss_scale", state["clean"], least=0)

    def restore(self, state: dict[str, float]) -> None:
        """Go on from there."""
        if state:
            # a window that is shorter than the one it was saved with may be full already
            self.divisor, self.clean = float(state["scale"]), min(int(state["clean"]), self.window - 1)

    def __repr__(self) -> str:
        """How it was made: ranks compare it."""
        made = [f"{k}={getattr(self, k)}" for k in ("init_scale", "factor", "window", "max_scale", "min_scale")]
        return f"LossScaler({', '.join(made)})"


POLICIES: dict[str, Callable[[], Policy]] = {"raise": Policy, "skip": Skip, "propagate": Propagate}


def policy(nonfinite: Any) -> Policy:
    """The policy that is meant; ValueError if none is."""
    if isinstance(nonfinite, Policy):
        return nonfinite
    if not isinstance(nonfinite, str) or nonfinite not in POLICIES:
        raise ValueError(f"nonfinite must be one of {tuple(POLICIES)} or a LossScaler, got {nonfinite!r}")
    return POLICIES[nonfinite]()


def _power_of_two(name: str, given: Any, least: float, most: float) -> float:
    """``given`` as a float; TypeError or ValueError that names the field if it is no power of two in the range."""
    number = real(name, given)
    if not least <= number <= most or math.frexp(number)[0] != 0.5:
        raise ValueError(f"{name} must be a power of two in [{least}, {most}], got {given}")
    return number
