"""Hooks of a step: what is told of its loss, its payloads and its end."""

from collections.abc import Iterable, Sequence
from typing import Any

from distopt.comm import Communicator
from distopt.compress import Compressor
from distopt.engine.bucket_store import BucketStore
from distopt.engine.divergence import check_divergence
from distopt.engine.parameters import GradientCollector
from distopt.engine.progress import Progress
from distopt.engine.spec import StepSpec
from distopt.exchange import Algorithm
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.two_phase import Watch

RECORD = "DISTOPT_RECORD"  # set by distopt record: STEPS:EVERY:FOLDER, as "10:1:/path"


class StepHook:
    """Be told of every step of a model.  The base class does nothing.

    Attributes:
        line: is compared by the ranks' votes; '' is not.
        wants_payloads: the hook sees each bucket's exchange in the present step, so that no shortcut through shared
            memory is taken.
        host_only: why a step with this hook cannot be captured as a CUDA graph; '' if it can.
    """

    line = ""
    wants_payloads = False
    host_only = ""

    def begin(self, step: int, spec: StepSpec, exchanges: int) -> None:
        """Be told that a step begins, the ``step``-th from 1, with so many exchanges."""

    def wrap_loss(self, pairs: Iterable[Any]) -> Iterable[Any]:
        """Pass on the (param, grad) pairs of a loss as they come."""
        return pairs

    def wrap_exchange(self, algorithm: Algorithm, compressor: Compressor) -> Algorithm:
        """Return the algorithm that exchanges the buckets of this step."""
        return algorithm

    def watch_shards(self, compressor: Compressor) -> Watch | None:
        """Return what is shown the buckets of this step that are exchanged in two phases."""

    def after_two_phases(self, buckets: Sequence[TravellingBucket], comm: Communicator) -> None:
        """Be told that these buckets have their sums.  Collective."""

    def after_vote(self, collector: GradientCollector, optimizer: Any) -> None:
        """Be told that all ranks have agreed on the step, whose gradients are in ``collector``."""

    def after_call(self, step: int, applied: bool) -> None:
        """Be told that all of a call has been enqueued, which was the ``step``-th update if ``applied``."""


class DivergenceCheck(StepHook):
    """Compare the ranks' parameters after every ``every``-th step, as long as there were no partial ones."""

    def __init__(self, every: int, comm: Communicator, store: BucketStore, progress: Progress):
        self._every, self._comm, self._store, self._progress = every, comm, store, progress

    def after_call(self, step: int, applied: bool) -> None:
        """Raise RuntimeError, on every rank alike, if they have diverged.  Collective."""
        if applied and step % self._every == 0 and not self._progress.partial:
            values = self._store.values
            self._comm.transaction(lambda: check_divergence(self._comm.control, values, f"after step {step}"))
