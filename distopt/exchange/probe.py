"""Look at what is sent, and change nothing of it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from distopt import device
from distopt.comm import Communicator
from distopt.comm.meter import Meter
from distopt.compress import At, Compressor
from distopt.compress.compressor import decompress_all, table
from distopt.exchange.quality import Quality
from distopt.exchange.walk import RunningSum, Turns
from distopt.ledger import Purpose

Algorithm = Callable[[np.ndarray, Compressor, Communicator, dict[str, np.ndarray], At], None]


class Probe:
    """A compressor for one bucket of one step, which tells what of each rank's gradient it sends; else as it is.

    While it lives there is one more array of the bucket's size, and another one while a rank has its turn.
    """

    def __init__(self, compressor: Compressor, quality: Quality):
        self._compressor, self._quality = compressor, quality
        self._sum, self._turns = RunningSum(lambda nbytes: device.zeros(nbytes, np.uint8)), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compressor, name)

    @property
    def dense(self) -> np.ndarray:
        """The sum of the gradients of the ranks that had their turn, as they came."""
        return self._sum.total

    def copy(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """As ``compress``, which sees what is left behind."""
        return self.compress(x, state, at)

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """As the compressor."""
        members, share = table(x, at), self._quality.of(at.rank)
        self._sum.add(x, first=not self._turns)
        self._turns += 1
        share.had(members, x)
        payload = self._compressor.compress(x, state, at)
        spent = np.may_share_memory(payload, x)
        carried = x.copy() if spent else self._carried(payload, x, at)
        share.sent(members, carried, self._kept(x, spent, state))
        return payload

    def _kept(self, x: np.ndarray, spent: bool, state: dict[str, np.ndarray]) -> np.ndarray:
        """What has not left x, of which all has if it is ``spent``; NaN if only the compressor knows."""
        if not self._compressor.stateful:
            return np.zeros_like(x) if spent else x
        return state["residual"] if "residual" in state else np.full_like(x, np.nan)

    def _carried(self, payload: np.ndarray, x: np.ndarray, at: At) -> np.ndarray:
        """What a payload stands for; members that are summed as they are stand in x."""
        found = device.zeros(x.size, x.dtype)
        members = table(x, at)
        whole = self.whole(members, at).host != 0 if hasattr(self._compressor, "whole") else np.zeros(1, bool)
        if self._compressor.summable:
            self._compressor.decompress(payload, found, at)
        elif not whole.all():
            decompress_all(self._compressor, [payload], found, at)
        for row in np.flatnonzero(whole).tolist():
            members.view(found, row)[...] = members.view(x, row)
        return found

    def compare(self, total: np.ndarray, at: At) -> None:
        """The sum over ranks of what was sent, with that of the gradients."""
        self._quality.compare(table(total, at), total, self.dense)


def observed(algorithm: Algorithm, quality: Quality) -> Algorithm:
    """The same algorithm; behind it, one more all-reduce tells what a dense step would have been."""

    def exchange(
        x: np.ndarray, compressor: Compressor, comm: Communicator, state: dict[str, np.ndarray], at: At
    ) -> None:
        probe: Any = Probe(compressor, quality)
        algorithm(x, probe, comm, state, at)
        with comm.on_behalf_of(_purpose(at)):
            comm.all_reduce(probe.dense)
        probe.compare(x, at)

    return exchange


class ObservedTurns(Turns):
    """Turns of ranks that are looked at."""

    def __init__(self, compressor: Compressor, scratch: Callable[[str, int], np.ndarray], quality: Quality):
        self._probe: Any = Probe(compressor, quality)
        super().__init__(self._probe, scratch)

    def give(self, x: np.ndarray, at: At) -> None:
        """Overwrite x by the sum, and compare it."""
        super().give(x, at)
        self._probe.compare(x, at)

    def write(self, meter: Meter, x: np.ndarray, at: At, break_even: bool) -> None:
        """The dense sum is a message too."""
        super().write(meter, x, at, break_even)
        with meter.on_behalf_of(_purpose(at)):
            meter.all_reduce(x.size, x.itemsize)


def _purpose(at: At) -> Purpose:
    return at.purpose._replace(phase="quality")
