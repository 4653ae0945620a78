"""Partial synchronization: update with own gradients, then average the parameters of one bucket, round-robin."""

import itertools
from collections.abc import Iterable

from distopt import device, kernels
from distopt.buckets import Bucket, Reduced, unsharded
from distopt.comm.message import MessageTag
from distopt.compress import Compressor, Dense
from distopt.engine.engine import Engine
from distopt.engine.parameters import Loss
from distopt.engine.spec import StepSpec
from distopt.exchange import reduce_shards


class PartialSteps:
    """Make partial steps (SINGA's ``backward_and_partial_update``).

    Each parameter is averaged once in as many steps as there are buckets; the optimizer's state stays local.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def step(self, loss: Loss, threshold: int | None) -> bool:
        """Make one step; tell if an update was applied.  Collective."""
        divisor = float(self._engine.accumulator.num_batches)
        spec = StepSpec(self._compressor, threshold, reduced=False, divisor=divisor, label="a partial step")
        return self._engine.step(loss, spec, self._update)

    def _compressor(self) -> Compressor:
        """The one of a step that sends no gradients; raises ValueError if the parameters are not this rank's own."""
        if self._engine.store.sharded:
            raise ValueError(
                "parameters must not be shared in a partial step, which changes each rank's own, got parameter_views"
            )
        return Dense()

    def _update(self, sums: Iterable[Reduced], spec: StepSpec) -> None:
        engine = self._engine
        store, progress = engine.store, engine.progress
        if engine.agreement.joined:  # its own parameters stay, but for what others average
            if engine.means.hook:
                engine.vote_on_hook(None)
            engine.accumulator.reset(store.buckets, store.skip_flag)
            engine.count_update()
        else:
            engine.update(sums, spec)
        buckets = list(store.buckets)
        if buckets:
            self._average(buckets[progress.partial % len(buckets)])
        progress.partial += 1

    def _average(self, bucket: Bucket) -> None:
        """Replace the parameters of a bucket by their mean over the ranks that have not joined.  Collective."""
        engine, comm = self._engine, self._engine.comm
        tables, masters = [bucket.parameters], engine.optimizer.masters(bucket)
        if masters is not None:  # from which the parameters follow
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
        for shard, layout in itertools.product(total, tables):
            members = layout.shard(shard.number, shard.of)
            kernels.unpack(members, shard.flat, 1.0 / engine.agreement.live, engine.store.skip_flag)
        if bucket.peers is not None:
            comm.barrier()
