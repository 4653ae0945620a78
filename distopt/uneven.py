"""Data that do not last equally long on all ranks."""

from collections.abc import Callable
from typing import Any

from distopt.conditions import Kind
from distopt.loop import Loop
from distopt.memory import AllJoinedError


class Uneven(Loop):
    """Ranks that have no batches left keep the others company."""

    _again: tuple[Callable[..., bool], tuple[Any, ...]] | None = None  # the last step, and what it had after the loss

    def join(self) -> None:
        """This rank has no batches left: take part in the others' steps until none has any; collective in the end.

        Its gradients are zeros and the mean is over those ranks that bring gradients; with error feedback its residual
        is still sent; in partial steps it only receives averages.  All ranks have the same parameters and counters
        afterwards, and may go on together.

        The others' steps must be of the kind of this rank's last one, in mode, compressor and threshold, and they must
        do nothing else together, as ``save``, before all have joined; else all ranks raise ValueError.  RuntimeError,
        on every rank, if this rank has made no step yet.
        """
        self._joined, missing = True, self._collector.allow_missing
        self._collector.allow_missing = True
        try:
            while True:
                self._company()
        except AllJoinedError:
            pass
        finally:
            self._joined, self._collector.allow_missing = False, missing

    def _company(self) -> None:
        if self._again is None:
            error = RuntimeError("join() before this rank's first step: it does not know what a step is")
            self._vote(self._name, self._calls, error)
        else:
            step, rest = self._again
            step(self, [(known.param, None) for known in self._collector.order.values()], *rest)

    def _step(self, loss: Any, kind: Kind) -> bool:
        self._again = Loop._step, (kind,)
        return super()._step(loss, kind)

    def _partial_step(self, loss: Any, threshold: int | None) -> bool:
        self._again = Loop._partial_step, (threshold,)
        return super()._partial_step(loss, threshold)
