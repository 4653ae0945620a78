"""distopt's own optimizers: a whole bucket in one kernel call, with the mean taken inside."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distopt.adapters.adapter import Adapter, Whole
from distopt.buckets import Buffer, Buffers, Sum
from distopt.gradients import Known
from distopt.optim.optimizer import Together


class ByBucket(Adapter):
    """``prepare(scale)``, then ``update_bucket(members, total, refused, together)`` for each."""

    updates_shares = looks = True

    def _apply(self, name: str, param: Any, value: np.ndarray, mean: np.ndarray) -> Any:
        """The same kernel for one parameter."""
        return self.opt.apply(name, value, mean)

    def check(self, buffers: Buffers) -> None:
        """Does the state that there is fit?"""
        for buffer in buffers:
            self.opt.check(buffer.parameters)

    def reserve(self, buffers: Buffers) -> None:
        """A flat state for each bucket."""
        for buffer in buffers:
            self.opt.reserve(buffer.parameters, buffer.gradient)

    def masters(self, buffer: Buffer) -> np.ndarray | None:
        """As the optimizer."""
        found: np.ndarray | None = self.opt.masters(buffer.parameters, buffer.gradient)
        return found

    def numbers(self) -> list[str]:
        """As the optimizer."""
        return list(self.opt.numbers())

    def update(
        self,
        buffers: Buffers,
        order: Mapping[str, Known],
        sums: Iterable[Sum],
        scale: float,
        refused: np.ndarray | None = None,
        together: Together | None = None,
    ) -> None:
        """One call per bucket."""
        self.opt.prepare(scale)
        for buffer, total in zip(buffers, sums, strict=True):
            self.opt.update_bucket(buffer.parameters, total, refused, together)

    def prepare(self, scale: float, gpu: int | None) -> None:
        """As the optimizer; on a GPU the numbers are enqueued."""
        self.opt.prepare(scale, gpu)

    @property
    def version(self) -> int:  # type: ignore[override]
        """As the optimizer."""
        return int(self.opt.version)

    @property
    def same_each_step(self) -> bool:  # type: ignore[override]
        """As the optimizer."""
        return bool(self.opt.same_each_step)

    def take_back(self) -> None:
        """As the optimizer."""
        self.opt.take_back()

    def state_dict(self, whole: Whole | None = None) -> Any:
        """As the optimizer."""
        return self.opt.get_states(whole) if whole else self.opt.get_states()

    def __repr__(self) -> str:
        return f"optimizer {self.opt!r}"
