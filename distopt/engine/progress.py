"""How far a training is: its counters, and whether it can go on."""

import contextlib
from collections.abc import Iterator

from distopt.comm.control import PeerLeft
from distopt.engine.accumulation import GradientAccumulator
from distopt.engine.undo import Undo

HALF_LOADED = "loading a state ended halfway; load a checkpoint to go on"


class Progress:
    """Count updates, and remember what makes it impossible to go on."""

    # The attributes that a step replaces (``Undo.keep_fields``).
    CHANGES = "updates", "partial", "version", "failure"

    def __init__(
        self, accumulator: GradientAccumulator, remedy: str = "load a checkpoint to go on", counted: str = "step"
    ):
        # remedy: what to do about a failure; counted: what an update is called; in errors and votes.
        self._accumulator, self.remedy, self._counted = accumulator, remedy, counted
        # Updates so far, and partial steps among them; the version grows with every call that a captured step would not
        # know of.
        self.updates = self.partial = self.version = 0
        # The text of the error that every further step raises; '' if training can go on.
        self.failure = ""
        # The counters before the present call, where a GPU may refuse it later.
        self._undo = Undo()
        self.halfway = Halfway(self)

    @property
    def calls(self) -> int:
        """The number of the present call, from 0: the same on all ranks."""
        return self.updates * self._accumulator.num_batches + self._accumulator.batches

    @property
    def name(self) -> str:
        """The present call, in errors and votes."""
        more = self._accumulator.num_batches > 1
        return f"{self._counted} {self.updates + 1}" + f", batch {self._accumulator.batches + 1}" * more

    def snapshot(self) -> None:
        """Remember the counters, for ``roll_back``."""
        self._undo.forget()
        self._undo.keep_fields(self, "updates", "partial")
        self._undo.keep_fields(self._accumulator, "batches", "num_gradients")

    def roll_back(self) -> bool:
        """Count as if the last call had not been; tell if it was an update."""
        updates = self.updates
        self._undo.undo()
        return self.updates < updates

    def check(self) -> None:
        """Raise RuntimeError after an update that failed halfway."""
        if self.failure:
            raise RuntimeError(self.failure)

    def fail(self, text: str) -> None:
        """Make every further step raise RuntimeError with this text, until a state is loaded."""
        self.failure = self.failure or text

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context that loads a state; every further step raises RuntimeError if it is interrupted."""
        self.failure = HALF_LOADED
        yield
        self.failure = ""


class Halfway:
    """Context of the part of a step that follows its vote: an error in it, Ctrl-C too, ends the training."""

    # Residuals, counters or parameters may be left that only a checkpoint makes right; but for what all ranks refuse,
    # before anything is applied: a sum that is not finite, a gradient hook's error.

    def __init__(self, progress: Progress):
        self._progress, self._step = progress, 0

    def __enter__(self) -> None:
        """Enter the part of a step that follows its vote."""
        self._step = self._progress.updates + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if error is None or (hasattr(error, "agreed") and not isinstance(error, PeerLeft)):
            return
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._progress.fail(f"the update of step {self._step} failed halfway with {text}; {self._progress.remedy}")
