"""Hooks of a step: what is said of its loss, its payloads and its end."""

import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.control import ControlChannel, agreed, fingerprint
from distopt.compress import Compressor
from distopt.engine.bucket_store import BucketStore
from distopt.engine.parameters import GradientCollector
from distopt.engine.progress import Progress
from distopt.engine.spec import StepSpec
from distopt.exchange import Algorithm
from distopt.exchange.all_reduce import TravellingBucket
from distopt.exchange.two_phase import Watch

LOG = logging.getLogger("distopt")
# Set by distopt record: STEPS:EVERY:FOLDER, as "10:1:/path".
RECORD = "DISTOPT_RECORD"


class StepHook:
    """Hear of every step of a model.  The base class does nothing."""

    # What the ranks' votes compare; nothing if it is ''.
    line = ""
    # The hook sees each bucket's exchange in the present step, so that no shortcut through shared memory is taken.
    wants_payloads = False
    # It does so in some steps, whose exchange is to be that of all others.
    observes = False
    # Why a step with this hook cannot be captured as a CUDA graph; '' if it can.
    host_only = ""

    def begin(self, step: int, spec: StepSpec, exchanges: int) -> None:
        """Hear that a step begins, the ``step``-th from 1, with so many exchanges."""

    def wrap_loss(self, pairs: Iterable[Any]) -> Iterable[Any]:
        """Pass on the (param, grad) pairs of a loss as they come."""
        return pairs

    def wrap_exchange(self, algorithm: Algorithm, compressor: Compressor) -> Algorithm:
        """Return the algorithm that exchanges the buckets of this step."""
        return algorithm

    def watch_shards(self, compressor: Compressor) -> Watch | None:
        """Return what is shown the buckets of this step that are exchanged in two phases."""

    def after_two_phases(self, buckets: Sequence[TravellingBucket], comm: Communicator) -> None:
        """Hear that these buckets have their sums.  Collective."""

    def after_vote(self, collector: GradientCollector, optimizer: Any) -> None:
        """Hear that all ranks have agreed on the step, whose gradients are in ``collector``."""

    def after_call(self, step: int, applied: bool) -> None:
        """Hear that all of a call has been enqueued, which was the ``step``-th update if ``applied``."""


class DivergenceCheck(StepHook):
    """Compare the ranks' parameters after every ``every``-th step, as long as there were no partial ones."""

    def __init__(self, every: int, comm: Communicator, store: BucketStore, progress: Progress):
        self._every, self._comm, self._store, self._progress = every, comm, store, progress

    def after_call(self, step: int, applied: bool) -> None:
        """Raise RuntimeError, on every rank, if they have diverged.  Collective."""
        if applied and step % self._every == 0 and not self._progress.partial:
            values = self._store.values
            self._comm.transaction(lambda: check_divergence(self._comm.control, values, f"after step {step}"))


def check_divergence(control: ControlChannel, values: Mapping[str, np.ndarray], when: str) -> None:
    """Compare the ranks' parameters by checksum; RuntimeError on every rank if they differ.  Collective."""
    # A memory error, a script that changes parameters on one rank, or an optimizer that rolls dice makes them differ,
    # and no gradient ever brings them together again.
    on_host = [device.host_copy(v) if device.on_gpu(v) else v for v in values.values()]
    sums = [zlib.crc32(v.reshape(-1).view(np.uint8).data) for v in on_host]
    name = f"comparing parameters {when}"
    digests = control.vote(name, 0, list, report=f"{fingerprint(map(str, sums)):x}")
    if len(set(digests)) > 1:
        everyone = [json.loads(text) for text in control.vote(name, 1, list, report=json.dumps(sums))]
        first = next((n, row) for n, *row in zip(values, *everyone, strict=True) if len(set(row)) > 1)
        raise agreed(RuntimeError(f"ranks have diverged {when}: {_minority(*first)}"), control.rank == 0)


def _minority(name: str, row: list[int]) -> str:
    """Who differs; of two equal halves it is the one without rank 0."""
    common = max(Counter(row).items(), key=lambda item: (item[1], item[0] == row[0]))[0]
    differing = [rank for rank, value in enumerate(row) if value != common]
    ranks = f"rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))}"
    return f"{name} differs on {ranks} from the other {len(row) - len(differing)}"


class FirstGradients(StepHook):
    """Say so if all ranks bring the same gradients to the first step, bit by bit: they may read the same batches."""

    # Nothing else would: the ranks train, and all of them together do the work of one.  Looks at the beginning of each
    # gradient on the host, and is gone when all ranks have agreed on a step.  Not for elastic jobs: a process that
    # joins has another first step.

    # Entries that are looked at of a gradient.
    ENTRIES = 4096
    TEXT = (
        "the first gradients are the same on all %d ranks, bit by bit: if each rank is to have data of its own, it "
        "does not (share the data out by world.rank, or by the rank that the loss of a logical one is called with; "
        "random numbers need a seed for each rank)"
    )

    def __init__(self, hooks: list[StepHook], comm: Communicator):
        self._hooks, self._comm = hooks, comm
        # Of each rank that lives here, the checksum of what has come; 0 for nothing but zeros.
        self._sums: list[int] = []

    def wrap_loss(self, pairs: Iterable[Any]) -> Iterator[Any]:
        """Pass on the pairs; each gradient is looked at before anybody else sees it."""
        self._sums.append(0)
        for pair in pairs:
            grad = pair[1] if isinstance(pair, tuple | list) and len(pair) == 2 else None
            if isinstance(grad, np.ndarray):
                begin = grad.flat[: self.ENTRIES]
                if begin.any():
                    self._sums[-1] = zlib.crc32(begin.view(np.uint8).data, self._sums[-1])
            yield pair

    def after_vote(self, collector: GradientCollector, optimizer: Any) -> None:
        """Compare the ranks' checksums, once; a rank that fails later in its step has done so too.  Collective."""
        self._hooks.remove(self)
        ranks = self._comm.ranks
        texts = self._comm.control.gather(" ".join(map(str, self._sums[-len(ranks.here) :])))
        sums = set(" ".join(texts).split())
        if self._comm.rank == 0 and len(sums) == 1 and sums != {"0"}:
            LOG.warning("distopt: " + self.TEXT, ranks.size)
