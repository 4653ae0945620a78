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

    def pack(self) -> None:
        """Copy the gradients to their places, unless they live there; count in ``bad`` what is not finite."""
        self.bad[:] = 0
        kernels.pack(self.gradients, self.gradient, 1.0, self.bad)


class Buffers:
    """All buckets of a plan."""

    def __init__(self, plan: Plan, values: Mapping[str, np.ndarray], alloc: Alloc):
        self.plan = plan
        self._buffers = [Buffer(b, [values[n].shape for n in b.names], alloc) for b in plan.buckets]
        self._views = {name: v for b in self for name, v in b.views(b.gradient).items()}
        self._places = {name: v.ctypes.data for name, v in self._views.items() if v.size}

    def __len__(self) -> int:
        """Parameters."""
        return len(self._views)

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def view(self, name: str) -> np.ndarray:
        """Where a parameter's gradient lives."""
        return self._views[name]

    def pack(self, grads: Mapping[str, np.ndarray | None]) -> None:
        """Bring all gradients to their places; a missing one is zeros."""
        missing = []
        for buffer in self:
            found = [grads.get(name) for name in buffer.bucket.names]
            missing += [self._views[n] for n, g in zip(buffer.bucket.names, found, strict=True) if g is None]
            present = [self._views[n] if g is None else g for n, g in zip(buffer.bucket.names, found, strict=True)]
            if not buffer.gradients.points_to(present):
                buffer.gradients.point_to(
                    [self._untangled(*pair) for pair in zip(buffer.bucket.names, present, strict=True)]
                )
        for view in missing:
            view[...] = 0
        for buffer in self:
            buffer.pack()

    def _untangled(self, name: str, grad: np.ndarray) -> np.ndarray:
        """The gradient, or a copy if it lies in the memory of another one, which packing would overwrite."""
        at_home = not grad.size or grad.ctypes.data == self._places[name]
        strange = not at_home and any(np.may_share_memory(grad, b.gradient) for b in self)
        return grad.copy() if strange else grad

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

    def check(self, states: States) -> None:
        """ValueError for the state of a parameter that is not here, or is of another shape."""
        for state, arrays in states.items():
            for name, a in arrays.items():
                if name not in self._views or a.shape != self._views[name].shape:
                    here = f"shape {self._views[name].shape}" if name in self._views else "no such parameter"
                    raise ValueError(f"state {state} of {name} has shape {a.shape}; here is {here}")

    def restore(self, states: States) -> None:
        """Let ``states`` be what outlives a step; they come from another plan, or from a checkpoint."""
        for buffer in self:
            buffer.state.clear()
            for state, arrays in states.items():
                for name, view in buffer.views(buffer.kept(state)).items():
                    view[...] = arrays.get(name, 0)
