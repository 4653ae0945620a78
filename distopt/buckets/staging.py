"""Flat memory for SINGA's fused verbs: fill it with arrays, send it, copy the sums back."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from distopt import device


class Staging:
    """``fill`` copies arrays in, in order; ``send`` hands pieces of at most ``capacity`` elements to a collective."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._pieces: dict[np.dtype, list[np.ndarray]] = {}
        self._filled: list[tuple[int, np.dtype]] = []

    @property
    def empty(self) -> bool:
        """Was nothing filled since the last send?"""
        return not self._filled

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays behind those already there."""
        dtypes = [dtype for _, dtype in self._filled] + [x.dtype for x in arrays]
        odd = next((d for d in dtypes if d != dtypes[0]), None)
        if odd is not None:
            raise TypeError(f"fused arrays must have one dtype: {dtypes[0]} was filled, got {odd}")
        start = sum(n for n, _ in self._filled)
        for x in arrays:
            for piece, part in self._runs(x, start):
                device.copy(piece, part)
            start += x.size
            self._filled.append((x.size, x.dtype))

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        """ValueError unless these are the sizes and dtypes that were filled since the last send."""
        given = [(x.size, x.dtype) for x in arrays]
        if given != self._filled:
            raise ValueError(
                f"the list must match what was filled: {len(self._filled)} arrays were, got {len(given)}"
                + _difference(self._filled, given)
            )

    def send(self, arrays: Sequence[np.ndarray], collective: Callable[[np.ndarray], None]) -> None:
        """Apply ``collective`` to what was filled, piece by piece, and copy the results to ``arrays``."""
        total = sum(n for n, _ in self._filled)
        pieces = self._pieces.get(arrays[0].dtype, []) if arrays else []
        for k in range(-(-total // self.capacity)):
            collective(pieces[k][: min(self.capacity, total - k * self.capacity)])
        start = 0
        for x in arrays:
            for piece, part in self._runs(x, start):
                device.copy(part, piece)
            start += x.size

    def clear(self) -> None:
        """Forget what was filled."""
        self._filled.clear()

    def _runs(self, x: np.ndarray, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pairs of equal runs: staging memory from element ``start`` on, and x."""
        pieces, flat, done = self._pieces.setdefault(x.dtype, []), x.reshape(-1), 0
        while done < flat.size:
            k, at = divmod(start + done, self.capacity)
            if k == len(pieces):
                pieces.append(device.zeros(self.capacity, x.dtype, x))
            n = min(self.capacity - at, flat.size - done)
            yield pieces[k][at : at + n], flat[done : done + n]
            done += n


def _difference(filled: Sequence[tuple[int, np.dtype]], given: Sequence[tuple[int, np.dtype]]) -> str:
    for k, (a, b) in enumerate(zip(filled, given, strict=False)):
        if a != b:
            return f"; at position {k} {a[0]} elements of {a[1]} were filled, got {b[0]} of {b[1]}"
    return ""
