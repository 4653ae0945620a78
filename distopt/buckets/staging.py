"""Flat memory for SINGA's fused verbs: filled with arrays, sent, and copied back."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from distopt import device


class Staging:
    """A flat memory for fused collectives, which are given pieces of at most ``capacity`` elements."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._pieces: dict[np.dtype, list[np.ndarray]] = {}
        self._filled: list[tuple[int, np.dtype]] = []

    @property
    def empty(self) -> bool:
        """Whether nothing was filled since the last send."""
        return not self._filled

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays after those already there; TypeError if their dtypes differ."""
        dtypes = [dtype for _, dtype in self._filled] + [x.dtype for x in arrays]
        odd = next((d for d in dtypes if d != dtypes[0]), None)
        if odd is not None:
            raise TypeError(f"fused arrays must be of one dtype, {dtypes[0]} as those filled, got {odd}")
        start = sum(n for n, _ in self._filled)
        for x in arrays:
            for piece, part in self._runs(x, start):
                device.copy(piece, part)
            start += x.size
            self._filled.append((x.size, x.dtype))

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        """Raise ValueError unless these are the sizes and dtypes that were filled since the last send."""
        listed = [(x.size, x.dtype) for x in arrays]
        if listed != self._filled:
            different = next((k for k, (a, b) in enumerate(zip(self._filled, listed, strict=False)) if a != b), None)
            where = ""
            if different is not None:
                (n, dtype), (got, kind) = self._filled[different], listed[different]
                where = f"; at position {different} {n} elements of {dtype} were filled, got {got} of {kind}"
            raise ValueError(
                f"the list must be the {len(self._filled)} arrays that were filled, got {len(listed)}{where}"
            )

    def send(self, arrays: Sequence[np.ndarray], collective: Callable[[np.ndarray], None]) -> None:
        """Apply ``collective`` to the filled memory, piece by piece, and copy the results to ``arrays``."""
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
        """Forget the filled arrays."""
        self._filled.clear()

    def _runs(self, x: np.ndarray, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pairs of runs of equal length: of the staging memory from element ``start`` on, and of ``x``."""
        pieces, flat, done = self._pieces.setdefault(x.dtype, []), x.reshape(-1), 0
        while done < flat.size:
            k, at = divmod(start + done, self.capacity)
            if k == len(pieces):
                pieces.append(device.zeros(self.capacity, x.dtype, x))
            n = min(self.capacity - at, flat.size - done)
            yield pieces[k][at : at + n], flat[done : done + n]
            done += n
