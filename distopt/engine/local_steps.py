"""Local steps: an engine of this rank alone, and an outer loop with the others."""

from collections.abc import Sequence
from typing import Any

from distopt.comm import Communicator, LocalCommunicator
from distopt.comm.local import LocalControl
from distopt.engine.engine import Engine
from distopt.engine.outer_loop import Arrays, OuterLoop
from distopt.engine.parameters import Loss
from distopt.engine.spec import StepSpec

LOCAL_STEP = StepSpec(label="a local step")


def alone(comm: Communicator) -> Communicator:
    """Return a communicator of this rank alone, in whose errors it has its number among all."""
    local = LocalCommunicator(f"local steps of rank {comm.rank}", comm.gpu)
    local.control = LocalControl(comm.rank)
    return local


def places(inner: Engine) -> Sequence[Arrays]:
    """Return the arrays that hold parameters: the masters that an optimizer keeps, and the parameters, by name."""
    masters: dict[str, Any] = {}
    for bucket in inner.store.buckets_if_any or ():
        flat = inner.optimizer.masters(bucket)
        masters |= {} if flat is None else bucket.views(flat)
    return masters, inner.store.values


class LocalTraining:
    """Steps of this rank alone, and exchanges with the others after some of them."""

    def __init__(self, inner: Engine, outer: OuterLoop):
        # Calls since the last step that counted; with ``num_batches`` several are one.
        self.inner, self.outer, self.calls = inner, outer, 0

    def run(self, loss: Loss) -> bool:
        """Make a step of this rank alone, and the exchange that is due after it; tell if the step was applied."""
        # A step that was refused, as not finite, counts in the window, so that all ranks count alike.
        self.inner.check_open()
        if not self.outer.begun:
            loss = self.begin(loss)
        if self.calls == 0:
            self.outer.let_in()
        try:
            applied = self.inner.step_alone(loss, LOCAL_STEP)
        except Exception as error:
            # No other rank has raised it.
            vars(error).pop("agreed", None)
            raise
        self.calls += 1
        if self.calls == self.inner.accumulator.num_batches:
            self.calls = 0
            self.outer.advance()
        return applied

    def begin(self, loss: Loss) -> Any:
        """Learn the parameters that a loss brings, and return its pairs.  Collective."""
        collector, error = self.inner.store.collector, None
        pairs: list[Any] = []
        try:
            pairs = collector.read(loss)
            collector.enroll(param for param, _ in pairs)
        except Exception as e:
            error = e
        try:
            self.outer.begin(self.inner.store.values, error)
        except Exception:
            if not self.inner.store.started:
                collector.forget()
            raise
        return pairs

    def join(self) -> None:
        """Take part in the others' exchanges until no rank has batches left (``OuterLoop.join``).  Collective."""
        self.inner.check_open()
        self.outer.join()
