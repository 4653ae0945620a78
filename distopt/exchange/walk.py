"""Ranks that take their turns in one process: what each sends is added up in rank order, as if all had been there."""

from collections.abc import Callable

import numpy as np

from distopt import device, kernels
from distopt.comm.communicator import BFLOAT16, HALVES
from distopt.comm.meter import Meter
from distopt.compress import At, Compressor
from distopt.compress.compressor import look
from distopt.exchange.mixed import Apart
from distopt.exchange.traffic import traffic
from distopt.ledger import Anatomy, Look


class RunningSum:
    """((x0 + x1) + x2) + ... of flat arrays; halves are added in float32, and rounded once."""

    def __init__(self, memory: Callable[[int], np.ndarray]):
        self._memory, self.total = memory, np.empty(0)

    def add(self, x: np.ndarray, first: bool) -> None:
        """The next rank's array."""
        half = x.dtype in HALVES
        if first:
            dtype = np.dtype(np.float32) if half else x.dtype
            self.total = self._memory(x.size * dtype.itemsize).view(dtype)
        if half:
            kind, verb = "bfloat16" if x.dtype == BFLOAT16 else "half", "from" if first else "add"
            getattr(kernels, f"{verb}_{kind}")(x, self.total)
        elif first:
            device.copy(self.total, x)
        else:
            kernels.accumulate(x, self.total)

    def give(self, x: np.ndarray) -> None:
        """Overwrite the last array by the sum."""
        if x.dtype in HALVES:
            getattr(kernels, "to_bfloat16" if x.dtype == BFLOAT16 else "to_half")(self.total, x)
        else:
            device.copy(x, self.total)


class Turns:
    """One step's exchange of one bucket: ``add`` what each rank takes of it, in rank order, then ``give`` the sum."""

    def __init__(self, compressor: Compressor, scratch: Callable[[str, int], np.ndarray]):
        self._compressor, self._scratch = compressor, scratch
        self._sum = RunningSum(lambda nbytes: scratch("sum over ranks", nbytes))
        self._sizes: list[int] = []  # of each rank's payload
        self._look: Look = lambda: Anatomy(0)  # at the first one's
        self._summed: np.ndarray | None = None  # what the last rank brought to be summed
        self._apart: Apart | None = None  # members of it that the compressor leaves whole

    def add(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> None:
        """The bucket of rank ``at.rank``, and what that keeps."""
        compressor, first = self._compressor, not self._sizes
        payload = compressor.compress(x, state, at)
        self._sizes.append(payload.nbytes)
        if compressor.summable:
            self._summed = payload
        elif hasattr(compressor, "whole"):
            self._apart = Apart(x, compressor, at)
            self._summed = None if self._apart.none else self._apart.flat
        if self._summed is not None:
            self._sum.add(self._summed, first)
        if self._gathers:
            total = self._entries(x)
            if first:
                device.clear(total)
                self._look = look(compressor, payload, x, at)
            compressor.decompress(payload, total, at)

    def give(self, x: np.ndarray, at: At) -> None:
        """Overwrite x by the sum."""
        if self._summed is not None:
            self._sum.give(self._summed)
        if self._compressor.summable:
            assert self._summed is not None
            self._compressor.decompress(self._summed, x, at)
        if self._gathers:
            device.copy(x, self._entries(x))
        if self._gathers and self._apart and not self._apart.none:
            self._apart.put_back()

    def write(self, meter: Meter, x: np.ndarray, at: At, break_even: bool) -> None:
        """Let a ledger have the messages by which ranks would have exchanged this."""
        whole = self._apart.flat.size if self._apart and not self._apart.none else None
        for message in traffic(self._compressor, x.size, x.itemsize, self._sizes, whole, break_even):
            members = self._apart.members if self._apart and message.whole else at.bucket
            with meter.on_behalf_of(at.purpose._replace(members=members)):
                message.write(meter, self._look)

    @property
    def _gathers(self) -> bool:
        return not self._compressor.summable and not (self._apart and self._apart.all)

    def _entries(self, x: np.ndarray) -> np.ndarray:
        return self._scratch("sum of entries", x.nbytes).view(x.dtype)
