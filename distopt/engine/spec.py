"""Values that say what a step is: the options of an optimizer, and the specification of one call."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distopt.buckets import Reduced
from distopt.checks import check_bool, check_bound, check_callable, check_int
from distopt.comm import Communicator
from distopt.compress import Compressor, Dense

CompressorFactory = Callable[[], Compressor]
Function = TypeVar("Function", bound=Callable[..., Any])
GradientHook = Callable[[list[tuple[Any, np.ndarray]]], object]


def among(names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a caller was given, as ``locals()`` has it, of these names."""
    return {name: given[name] for name in names if name in given}


def shows(taken: Callable[..., Any]) -> Callable[[Function], Function]:
    """Show in a signature, in the place of ``**options``, the keyword arguments of what takes them."""

    def show(function: Function) -> Function:
        own, theirs = inspect.signature(function), inspect.signature(taken).parameters
        shown = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        shown |= {name: p for name, p in theirs.items() if p.kind is p.KEYWORD_ONLY and name not in shown}
        vars(function)["__signature__"] = own.replace(parameters=list(shown.values()))
        return function

    return show


class Options(NamedTuple):
    """The options of a step, as the docstring of ``DistOpt`` describes them."""

    # Decided: buckets are reduced while gradients arrive, or not.
    overlap: bool = False
    broadcast: bool = True
    # As it was given, for ranks to compare.
    nonfinite: Any = "raise"
    allow_missing: bool = False
    check_every: int = 0
    num_batches: int = 1
    sync_on_apply: bool = True
    clip_norm: float | None = None
    gradient_hook: GradientHook | None = None
    buddy: bool = False
    # Sums are added in the order of all ranks, or exactly, not by nodes unless that is asked for.
    deterministic: bool | str = False

    @classmethod
    def checked(cls, comm: Communicator, **given: Any) -> "Options":
        """Check what a user gave, and decide what depends on the ranks."""
        options = cls(**given)
        return options._replace(
            overlap=_overlaps(options.overlap, comm),
            broadcast=check_bool("broadcast", options.broadcast),
            allow_missing=check_bool("allow_missing", options.allow_missing),
            check_every=check_int("check_every", options.check_every, least=0),
            num_batches=check_int("num_batches", options.num_batches, least=1),
            sync_on_apply=check_bool("sync_on_apply", options.sync_on_apply),
            clip_norm=None if options.clip_norm is None else check_bound("clip_norm", options.clip_norm),
            gradient_hook=check_callable("gradient_hook", options.gradient_hook, "(param, mean) pairs"),
            buddy=check_bool("buddy", options.buddy),
            deterministic=options.deterministic or comm.ranks.logical,
        )

    def lines(self, comm: Communicator) -> list[str]:
        """The options that all ranks must have alike, for the vote."""
        names = ("broadcast", "nonfinite", "num_batches", "sync_on_apply", "allow_missing", "check_every")
        return [
            ", ".join(f"{name}={getattr(self, name)!r}" for name in names),
            "exact sums" if comm.exact else "sums in rank order" if comm.rank_ordered else "sums in any order",
            f"logical={comm.ranks.size}, {_threads()} threads" if comm.ranks.logical else "no logical ranks",
            f"overlap={self.overlap}",
            f"clip_norm={self.clip_norm}",
            "a gradient hook" if self.gradient_hook else "no gradient hook",
            f"buddy={self.buddy}",
        ]


DENSE = Dense()  # of steps that name none, the same one each time


def dense() -> Compressor:
    """Return ``DENSE``."""
    return DENSE


class StepSpec(NamedTuple):
    """The specification of a step."""

    # Raises what forbids such a step.
    compressor: CompressorFactory = dense
    # Elements that fill a bucket; None keeps the usual number.
    threshold: int | None = None
    # Every element of the gradients is first held between -clip_value and clip_value.
    clip_value: float | None = None
    # Never send more bytes than a dense array has.
    break_even: bool = False
    # 'gather', 'two_phase', 'nodes' or 'auto' (``exchange.choice``).
    exchange: str = "auto"
    # What has chosen 'nodes' or another one in the user's place, for a plan to say: "auto", "measured", "measuring".
    chosen_by: str = ""
    # 'ranks' divides the sum of an entry by all gradients, 'senders' by the ranks that have sent it.
    over: str = "ranks"
    # False in a partial step, which updates with this rank's own gradients.
    reduced: bool = True
    # Makes means of the sums; None divides by the number of gradients.
    divisor: float | None = None
    # Names of the parameters that are updated; None updates all.
    only: Collection[str] | None = None
    # Returns the names of the parameters of which a rank's gradients are new, once its loss has given them: others are
    # of an earlier pass, and count where another rank has a new one.  None: all that a loss gives are new.
    arrived: Callable[[int], Collection[str]] | None = None
    # Of the ranks (``Communicator.epoch``) whose gradients there are: with others the step is not made.  None: a loss
    # is called for those.
    epoch: int | None = None
    # How far this rank is, which ranks compare; '' for nothing.
    clock: str = ""
    # The step's name in errors and votes.
    label: str = "a step"

    def describe(self, compressor: Compressor, two_phase: bool = False) -> str:
        """One line that ranks compare in the vote."""
        clipped = f", clipped at {self.clip_value}" * (self.clip_value is not None)
        gathered = not (self.break_even or compressor.traits.summable)
        exchange = ", two-phase" * two_phase + ", by nodes" * (self.exchange == "nodes")
        exchange += ", break_even=False" * gathered + ", over senders" * (self.over == "senders")
        return f"{self.label} with {compressor!r}{clipped}{exchange}"


# What a step is updated with, which all ranks have before one of them updates: the sums of all buckets, None if there
# is nothing to apply, and what makes means of them.
Outcome = tuple[Iterable[Reduced] | None, float]
NOTHING: Outcome = None, 0.0
# Updates the parameters by a scale times the sums.
Update = Callable[[Iterable[Reduced], float, StepSpec], None]


def _threads() -> str:
    """Return how many threads add up a product of matrices here, as far as it is known: its bits depend on that."""
    torch = sys.modules.get("torch")
    return str(torch.get_num_threads()) if torch else os.environ.get("OMP_NUM_THREADS", "all")


def _overlaps(overlap: str | bool, comm: Communicator) -> bool:
    """Decide 'auto': overlap pays where ranks sit on several machines, or have GPUs."""
    if not isinstance(overlap, bool) and not (isinstance(overlap, str) and overlap == "auto"):
        raise ValueError(f"overlap must be 'auto', True or False, got {overlap!r}")
    if comm.ranks.by_process or (comm.size == 1 and not comm.membership):
        return False
    if overlap is True and not comm.may_overlap:
        raise ValueError(
            "overlap must be 'auto' or False with this MPI, which does not give MPI_THREAD_MULTIPLE, got True"
        )
    return comm.may_overlap and (comm.spans_hosts or comm.gpu is not None if overlap == "auto" else bool(overlap))
