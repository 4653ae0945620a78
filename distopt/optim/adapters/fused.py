"""The adapter for distopt's own optimizers: a whole bucket in one kernel call, which also takes the mean."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distopt.buckets import Bucket, BucketSet, Reduced
from distopt.optim.adapters.base import ApplyAdapter, Known
from distopt.optim.optimizer import Optimizer, OwnedSlots, Unshard, UpdatingRanks


class FusedAdapter(ApplyAdapter):
    """An adapter for distopt's optimizers: ``prepare(scale)``, then ``update_buckets``."""

    updates_shards = reads_skip_flag = True

    def __init__(self, opt: Optimizer):
        super().__init__(opt)
        self.unrecorded, self.whole = opt.unrecorded, opt.whole

    def check(self, buckets: BucketSet) -> None:
        for bucket in buckets:
            self.opt.check(bucket.parameters)

    def follow(self, order: Mapping[str, Known]) -> None:
        self.opt.follow(zip(order, map(operator.attrgetter("param"), order.values()), strict=True))

    def reserve(self, buckets: BucketSet) -> None:
        for group in buckets.groups:
            self.opt.reserve(group.parameters, group.gradient)

    def tables(self) -> Iterable[OwnedSlots]:
        return self.opt.tables()  # type: ignore[no-any-return]

    def masters(self, bucket: Bucket) -> np.ndarray | None:
        group = bucket.group
        masters = self.opt.masters(group.parameters, group.gradient)
        begin = group.spec.offsets[group.spec.names.index(bucket.spec.names[0])] - bucket.spec.offsets[0]
        return None if masters is None else masters[begin : begin + bucket.spec.size]

    def numbers(self) -> list[str]:
        return list(self.opt.numbers())

    def update(
        self,
        buckets: BucketSet,
        order: Mapping[str, Known],
        sums: Iterable[Reduced],
        scale: float,
        skip_flag: np.ndarray | None = None,
        ranks: UpdatingRanks | None = None,
    ) -> None:
        self.opt.prepare(scale)
        groups, totals = buckets.grouped(sums)
        tables = map(operator.attrgetter("parameters"), groups)
        self.opt.update_buckets(zip(tables, totals, strict=True), skip_flag, ranks)

    def prepare(self, scale: float, gpu: int | None) -> None:
        self.opt.prepare(scale, gpu)

    @property
    def version(self) -> int:  # type: ignore[override]
        return int(self.opt.version)

    @property
    def same_each_step(self) -> bool:  # type: ignore[override]
        return bool(self.opt.same_each_step)

    def take_back(self) -> None:
        self.opt.take_back()

    def state_dict(self, unshard: Unshard | None = None) -> Any:
        return self.opt.get_states(unshard) if unshard else self.opt.get_states()

    def __repr__(self) -> str:
        return f"optimizer {self.opt!r}"
