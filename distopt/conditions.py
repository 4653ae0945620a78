"""What a step may be, and what it may send: all that forbids one, before anything is sent."""

from collections.abc import Callable
from typing import NamedTuple

from distopt.compress import Compressor, Dense
from distopt.memory import Memory
from distopt.numbers import whole

Make = Callable[[], Compressor]


class Kind(NamedTuple):
    """What a step does with the gradients of its loss."""

    make: Make = Dense  # of what is sent; raises what forbids such a step
    threshold: int | None = None  # that fills a bucket; None: as always
    clip: float | None = None  # they are held between -clip and clip
    break_even: bool = False  # never more bytes than dense
    what: str = "a step"
    sent: bool = True  # to all ranks; else this one goes on with its own


class Conditions(Memory):
    """What the steps of one model must fulfil."""

    def _at_this_step(self, compressor: Compressor) -> Compressor:
        """What a compressor is at the next update; ValueError if it cannot work there."""
        if getattr(compressor, "corrects_momentum", False):
            self._check_momentum(type(compressor).__name__)
        at_step: Callable[[int], Compressor] | None = getattr(compressor, "at_step", None)
        return at_step(self.step_counter) if at_step else compressor

    def _check_momentum(self, name: str) -> None:
        """ValueError if the compressor of this name would not be all that there is of momentum."""
        found = self._optimizer.momentum()
        if found:
            raise ValueError(
                f"{name} has the momentum, on each rank, and {found} would be a second one: "
                "give the momentum to the compressor, and the optimizer none, as SGD(lr)"
            )
        if self._window.num_batches > 1 and not self._window.sync_on_apply:
            raise ValueError(f"sync_on_apply=False exchanges every batch, but {name} has one momentum per update")

    def _check_sizes(self, compressor: Compressor) -> None:
        """ValueError for a bucket that a compressor cannot take."""
        for b in self._memory:
            compressor.payload_bytes(b.gradient.size, b.gradient.itemsize, b.gradients)

    def _checked_threshold(self, kind: Kind) -> int:
        """The threshold of this step; raises what forbids a step of this kind."""
        if self._failure:
            raise RuntimeError(self._failure)
        self._window.check(kind.sent)
        if kind.clip is not None and not kind.clip >= 0:
            raise ValueError(f"clip_Value must be at least 0, got {kind.clip}")
        if kind.threshold is None:
            return self._threshold if self._sharded else self.threshold
        return whole("threshold", kind.threshold, least=0)

    @property
    def _needs_all_means(self) -> str:
        """The option that looks at the mean gradients of all parameters before an update; '' if none does."""
        return "gradient_hook" if self._gradient_hook else "" if self._clip_norm is None else "clip_norm"

    def _check_capture(self, compressor: Compressor) -> None:
        """ValueError for a step that cannot be captured."""
        if self._recorder:
            raise ValueError("distopt record: the gradients of a captured step are seen by the GPU alone")
        if self._needs_all_means:
            raise ValueError(
                f"{self._needs_all_means}: the host works on every mean, which a captured step could not wait for"
            )
        if self._wire.gpu is None:
            raise ValueError(f"a step is captured on a GPU; {self._wire!r} carries arrays on the host")
        if self._wire.rank_ordered and self._wire.size > 1:
            raise ValueError(
                "deterministic=True: sums in rank order need memory anew, which a captured step cannot have"
            )
        if compressor.ragged:
            raise ValueError(f"{compressor!r} sends as much as the data want: such a step cannot be captured")
        if getattr(compressor, "sparsity", None) is not None:
            raise ValueError(
                f"{compressor!r} changes with its warmup, which a captured step could not: capture it without"
            )
        if self._window.num_batches > 1:
            raise ValueError(f"num_batches={self._window.num_batches}: calls of different kinds cannot be captured")
        if self._nonfinite.adapts:
            raise ValueError(f"{self._nonfinite!r}: the scale changes, which a captured step could not: use 'skip'")
        if not self._optimizer.same_each_step:
            raise ValueError(f"{self._optimizer!r} does not do the same at every call: it cannot be captured")
        if not self._optimizer.looks:
            raise ValueError(f"{self._optimizer!r} is called by the host at every step: it cannot be captured")
