"""What a compressor is, as a record; the rest of the library decides by it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

Budget = float | Callable[[int], float]  # bytes of a step, or a schedule of them


@dataclass(frozen=True)
class Traits:
    """What a compressor is, and what may be done with its payloads.

    Attributes:
        summable: payloads of different ranks may be added on the wire, so that one all-reduce sums them up.
        ragged: lengths of payloads depend on the data, so that they may differ from rank to rank.
        lossless: nothing is ever left behind.
        stateful: ``compress`` changes what outlives the step.
        may_overflow: a sum of finite payloads may be infinite.
        bounded: on a GPU a ragged payload has room for a number of entries that all ranks know.
        corrects_momentum: the compressor has the momentum, and the optimizer must have none.
        has_hooks: ``begin`` or ``finish`` does something.
        changes_with_step: ``at_step`` returns another compressor at some steps, or random numbers depend on the step.
        elementwise: each element is sent by itself, so that neighbouring buckets may travel as one array.
        of_sums: where ranks share a host, sums of their gradients may be sent in place of these: what is trained
            differs by rounding alone.
        counts_senders: payloads are entries, of which a sum over senders can be formed (``ExchangeContext.senders``).
        recordable: on a GPU all calls with the same arrays enqueue the same launches, whatever the step is, as long as
            the compressor's ``repr`` is the same.
        budget: the bytes that a rank sends in a step, or a schedule of k that returns them, by which ``at_density`` is
            chosen; None if the compressor knows its density, or has none.
        state_prefix: how the names of its states begin in a bucket; '' unless they are none of gradients, as those of
            coefficients are not, which no other compressor of the bucket must send.

    Example:
        >>> from distopt.compress import ErrorFeedback, TopK
        >>> ErrorFeedback(TopK(0.1)).traits.stateful, TopK(0.1).traits.stateful
        (True, False)
    """

    summable: bool = False
    ragged: bool = False
    lossless: bool = False
    stateful: bool = False
    may_overflow: bool = False
    bounded: bool = False
    corrects_momentum: bool = False
    has_hooks: bool = False
    changes_with_step: bool = False
    elementwise: bool = False
    of_sums: bool = False
    counts_senders: bool = False
    recordable: bool = False
    budget: Budget | None = None
    state_prefix: str = ""


OLD_NAMES = frozenset(field.name for field in fields(Traits))


class TraitsAsAttributes:
    """Keeps traits for one more version as they were in 0.1: attributes of a compressor, or of its class."""

    traits: Traits = Traits()

    if not TYPE_CHECKING:

        def __init_subclass__(cls, **given: Any):
            super().__init_subclass__(**given)
            old = {name: value for name, value in vars(cls).items() if name in OLD_NAMES}
            if old:
                cls.traits = replace(cls.traits, **old)
            for name in old:  # what an instance has set must not be hidden by its class, nor be found in two places
                delattr(cls, name)

        def __setattr__(self, name: str, value: Any):
            if name in OLD_NAMES:
                super().__setattr__("traits", replace(self.traits, **{name: value}))
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name in OLD_NAMES:
                return getattr(self.traits, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
