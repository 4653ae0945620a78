"""distopt's own optimizers: a whole bucket in one kernel call, with the mean taken inside."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distopt.adapters.adapter import Adapter
from distopt.buckets import Buffers
from distopt.gradients import Gradient


class ByBucket(Adapter):
    """``update_bucket(members, grad, scale)``."""

    @staticmethod
    def fits(opt: Any) -> bool:
        """Is it one of ours?"""
        return callable(getattr(opt, "update_bucket", None))

    def apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> None:
        """The same kernel for one parameter."""
        self.opt.apply(name, value, mean)

    def check(self, buffers: Buffers) -> None:
        """Does the state that there is fit?"""
        for buffer in buffers:
            self.opt.check(buffer.parameters)

    def numbers(self) -> tuple[float, ...]:
        """As the optimizer."""
        return tuple(self.opt.numbers())

    def update(self, buffers: Buffers, order: Mapping[str, Gradient], sums: Sequence[np.ndarray], scale: float) -> None:
        """One call per bucket."""
        for buffer, total in zip(buffers, sums, strict=True):
            members = buffer.parameters.point_to([order[n].value for n in buffer.bucket.names])
            self.opt.update_bucket(members, total, scale)

    def __repr__(self) -> str:
        return f"optimizer {self.opt!r}"
