"""The memory of a plan: a flat gradient per bucket, and what outlives a step beside it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distopt import kernels
from distopt.buckets.plan import Bucket, Plan
from distopt.kernels import Members

Alloc = Callable[[int, Any], np.ndarray]
States = dict[str, dict[str, np.ndarray]]  # state name -> parameter name -> array


class Buffer:
    """One bucket's flat arrays, and the tables by which kernels reach its members."""

    def __init__(self, bucket: Bucket, shapes: Sequence[tuple[int, ...]], alloc: Alloc):
        self.bucket, self._alloc = bucket, alloc
        self.gradient = alloc(bucket.size, bucket.dtype)
        self.state: dict[str, np.ndarray] = {}
        self.gradients = Members(bucket.names, shapes, bucket.offsets, bucket.dtype)
        self.parameters = Members(bucket.names, shapes, bucket.offsets, bucket.dtype)
        self.bad = np.zeros(len(bucket.names), np.int64)

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The members' parts of a flat array of this bucket, by name, in their shapes."""
        return {name: self.gradients.view(flat, row) for row, name in enumerate(self.bucket.names)}

    def kept(self, state: str) -> np.ndarray:
        """The flat array that outlives a step, zeros at first."""
        if state not in self.state:
            self.state[state] = self._alloc(self.bucket.size, self.bucket.dtype)
        return self.state[state]

    def pack(self, grads: Sequence[np.ndarray]) -> None:
        """Copy gradients to their places, unless they live there; count per member what is not finite in ``bad``."""
        self.bad[:] = 0
        if not self.gradients.points_to(grads):
            self.gradients.point_to(self._untangled(grads))
        kernels.pack(self.gradients, self.gradient, 1.0, self.bad)

    def _untangled(self, grads: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """The gradients, with copies of those in another member's place, which packing would overwrite."""
        start = self.gradient.ctypes.data
        places = start + self.gradients.rows["offset"] * self.bucket.dtype.itemsize
        addresses = np.array([g.ctypes.data for g in grads])
        tangled = (addresses >= start) & (addresses < start + self.gradient.nbytes) & (addresses != places)
        return [g.copy() if t else g for g, t in zip(grads, tangled, strict=True)] if tangled.any() else grads


class Buffers:
    """All buckets of a plan; states move in from another plan by parameter name."""

    def __init__(self, plan: Plan, values: Mapping[str, np.ndarray], alloc: Alloc, states: States):
        self.plan = plan
        self._buffers = [Buffer(b, [values[n].shape for n in b.names], alloc) for b in plan.buckets]
        self._views = {name: v for b in self for name, v in b.views(b.gradient).items()}
        for state, arrays in states.items():
            for buffer in self:
                for name, view in buffer.views(buffer.kept(state)).items():
                    view[...] = arrays.get(name, 0)

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def view(self, name: str) -> np.ndarray:
        """Where a parameter's gradient lives."""
        return self._views[name]

    def pack(self, grads: Mapping[str, np.ndarray | None]) -> None:
        """Bring all gradients to their places; a missing one is zeros."""
        for buffer in self:
            buffer.pack([self._gradient(name, grads.get(name)) for name in buffer.bucket.names])

    def _gradient(self, name: str, grad: np.ndarray | None) -> np.ndarray:
        if grad is None:
            self._views[name][...] = 0
            return self._views[name]
        return grad

    def nonfinite(self) -> str:
        """Which of the packed gradients are not finite, '' if all are."""
        return ", ".join(
            f"{name} ({int(count)} of {size} entries)"
            for buffer in self
            if buffer.bad.any()
            for name, size, count in zip(buffer.bucket.names, buffer.bucket.sizes, buffer.bad, strict=True)
            if count
        )

    def states(self) -> States:
        """What outlives a step, as views, cut by parameter."""
        found: States = {}
        for buffer in self:
            for state, flat in buffer.state.items():
                found.setdefault(state, {}).update(buffer.views(flat))
        return found
