"""Partial synchronization: update with own gradients, then average some of the parameters."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from distopt import device, kernels
from distopt.buckets import Reduced, unsharded
from distopt.comm.message import MessageTag
from distopt.compress import Compressor, Dense
from distopt.engine.engine import Engine
from distopt.engine.parameters import Loss
from distopt.engine.shares import Share, ShareAverage
from distopt.engine.spec import StepSpec
from distopt.exchange import reduce_shards
from distopt.kernels.layout import BucketLayout


class Averaged(NamedTuple):
    """What is averaged after a partial step, as a user gave it: one bucket, or a share of all entries."""

    # Elements that fill a bucket; None for the usual number.
    threshold: int | None = None
    # None: one bucket.
    share: Any = None
    # Chooses the entries of a share.
    seed: Any = 0


class PartialSteps:
    """Make partial steps (SINGA's ``backward_and_partial_update``)."""

    # Each parameter is averaged once in as many steps as there are buckets, each entry once in as many as a share needs
    # to be all; the optimizer's state stays local.

    def __init__(self, engine: Engine):
        self._engine, self._shares = engine, ShareAverage(engine)

    def step(self, loss: Loss, averaged: Averaged) -> bool:
        """Make one step; tell if an update was applied.  Collective."""
        threshold, share, seed = averaged
        divisor = float(self._engine.accumulator.num_batches)
        label = "a partial step" + f" of share={share}, seed={seed}" * (share is not None)
        spec = StepSpec(partial(self._compressor, averaged), threshold, reduced=False, divisor=divisor, label=label)
        self._engine.let_in()
        return self._engine.step(loss, spec, partial(self._update, averaged))

    def _compressor(self, averaged: Averaged) -> Compressor:
        """Return that of a step that sends no gradients; raise what forbids the step."""
        if averaged.share is not None:
            Share.checked(averaged.share, averaged.seed)
        if self._engine.store.sharded:
            raise ValueError(
                "parameters must not be shared in a partial step, which changes each rank's own, got parameter_views"
            )
        return Dense()

    def _update(self, averaged: Averaged, sums: Iterable[Reduced], scale: float, spec: StepSpec) -> None:
        engine = self._engine
        store, progress = engine.store, engine.progress
        if engine.agreement.joined:
            # This rank's own parameters stay, but for what others average.
            engine.accumulator.reset(store, store.skip_flag)
            engine.count_update()
        else:
            engine.update(sums, scale, spec)
        if averaged.share is not None:
            self._shares.average(Share.checked(averaged.share, averaged.seed))
        elif list(store.buckets):
            self._average_bucket(progress.partial % len(list(store.buckets)))
        progress.partial += 1

    def _average_bucket(self, number: int) -> None:
        """Replace the parameters of a bucket by their mean over the ranks that have not joined.  Collective."""
        engine = self._engine
        tables, total = engine.transaction(lambda: self._sum_parameters(number))
        for shard, layout in itertools.product(total, tables):
            members = layout.shard(shard.number, shard.of)
            kernels.unpack(members, shard.flat, 1.0 / engine.agreement.live, engine.store.skip_flag)
        if len(total) > 1:
            # Others have read this rank's shard.
            engine.comm.barrier()

    def _sum_parameters(self, number: int) -> tuple[list[BucketLayout], Reduced]:
        """Return tables of the parameters of a bucket, and their sum over ranks.  Collective."""
        engine, comm = self._engine, self._engine.comm
        engine.renew_plan()
        bucket = engine.store.buckets[number]
        tables, masters = [bucket.parameters], engine.optimizer.masters(bucket)
        if masters is not None:
            # The parameters follow from their masters.
            tables.insert(0, bucket.means.point_to(list(bucket.views(masters).values())))
        kernels.pack(tables[0], bucket.gradient, 1.0, bucket.bad, bucket.largest)
        if engine.agreement.joined:
            device.clear(bucket.gradient)
        tag = MessageTag("parameters", engine.progress.updates, bucket.number, bucket.parameters)
        with comm.tagged(tag):
            if bucket.peers is None:
                comm.all_reduce(bucket.gradient)
                comm.wait()
                total = unsharded(bucket.gradient)
            else:
                comm.barrier()
                total = reduce_shards(bucket, comm)
                comm.barrier()
        return tables, total
