"""A step hook that records the gradients of an engine's steps."""

from collections.abc import Iterable
from typing import Any

from distopt.engine.engine import Engine
from distopt.engine.hooks import StepHook
from distopt.engine.parameters import GradientCollector
from distopt.lab.tape.recorder import TapeRecorder, recorder


class TapeHook(StepHook):
    """A hook that writes the gradients of each loss to a file, before packing or sending may write over them."""

    host_only = "distopt record: the gradients of a captured step are seen by the GPU alone"

    def __init__(self, hooks: list[StepHook], tape: TapeRecorder):
        self._hooks, self._recorder = hooks, tape

    def wrap_loss(self, pairs: Iterable[Any]) -> Iterable[Any]:
        return self._recorder.watch(pairs)

    def after_vote(self, collector: GradientCollector, optimizer: Any) -> None:
        """Keep the gradients that this step has collected; remove this hook when the tape is full."""
        self._recorder.keep(collector, optimizer)
        if self._recorder.over:
            self._hooks[:] = [hook for hook in self._hooks if hook is not self]


def record(engine: Engine) -> None:
    """Add a hook that records, if ``distopt record`` has asked for it."""
    engine.check_own_rank("distopt record")
    tape = recorder(engine.comm.rank, engine.comm.size)
    if tape:
        engine.hooks.insert(0, TapeHook(engine.hooks, tape))
