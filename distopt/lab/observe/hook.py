"""Observe how good what is sent in a step is."""

from collections.abc import Iterable, Sequence

import numpy as np

from distopt.comm import Communicator
from distopt.comm.message import MessageTag
from distopt.compress import DCT, Compressor
from distopt.engine.engine import Engine
from distopt.engine.hooks import StepHook
from distopt.engine.spec import StepSpec
from distopt.exchange import Algorithm
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.two_phase import Watch
from distopt.lab.observe.observer import Callback, Observer


class QualityHook(StepHook):
    """Tells a callback of every ``every``-th step (``DistOpt.observe``); without one it measures alone."""

    def __init__(self, engine: Engine, callback: Callback | None, every: int):
        self._comm, self.observer = engine.comm, Observer(callback, every)
        self.line, self.observes = repr(self.observer) if every else "", every > 0

    @property
    def wants_payloads(self) -> bool:  # type: ignore[override]
        """Whether the present step is measured."""
        return self.observer.measures_step

    def begin(self, step: int, spec: StepSpec, exchanges: int) -> None:
        """Begin a step, whose gradients are compared with what is sent of them, unless that is of a transform."""
        self.observer.begin(step, spec.reduced, exchanges)
        if self.observer.measures_step and isinstance(compressor := spec.compressor(), DCT):
            raise ValueError(
                f"compressor must send entries of gradients where it is observed, got {compressor!r}, which sends "
                "frequencies; observe(every=0) ends it"
            )

    def wrap_exchange(self, algorithm: Algorithm, compressor: Compressor) -> Algorithm:
        return self.observer.wrap(algorithm, compressor)

    def watch_shards(self, compressor: Compressor) -> Watch | None:
        return self.observer.watch_shards(compressor)

    def after_two_phases(self, buckets: Sequence[TravellingBucket], comm: Communicator) -> None:
        def add(dense: np.ndarray, tag: MessageTag) -> None:
            with comm.tagged(tag):
                comm.all_reduce(dense)

        self.observer.compare(buckets, add)

    def after_call(self, step: int, applied: bool) -> None:
        if applied:
            self.observer.report(step, self._comm)


def observe(engine: Engine, callback: Callback | None, every: int) -> None:
    """Make a hook observe an engine's steps from now on, instead of the one before it.

    Args:
        engine: makes the steps.
        callback: gets the number of a step and the numbers of its ``Quality``; None to measure alone.
        every: steps from one measurement to the next; 0 ends it.

    Raises:
        TypeError: the callback cannot be called, or ``every`` is no integer.
        ValueError: ``every`` is below 0, or the engine's arrays are on a GPU.

    Example:
        >>> import numpy as np
        >>> from distopt import DistOpt, Parameter
        >>> from distopt.compress import TopK
        >>> from distopt.lab.observe import observe
        >>> p, opt = Parameter("w", np.ones(2, np.float32)), DistOpt()
        >>> observe(opt.engine, lambda step, numbers: print(step, numbers["density"]), every=1)
        >>> opt.step([(p, np.array([1, 3], np.float32))], TopK(0.5))
        1 0.5
        True
    """
    if engine.comm.gpu is not None:
        raise ValueError(f"observe: the communicator must have its arrays on the host, got {engine.comm!r}")
    hook = QualityHook(engine, callback, every)
    others: Iterable[StepHook] = [h for h in engine.hooks if not isinstance(h, QualityHook)]
    engine.hooks[:] = [hook, *others] if hook.observer.every else others
    engine.agreement.forget()
