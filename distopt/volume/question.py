"""How long a step takes: buckets that are compressed, sent and decompressed, some of them behind the backward pass."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from distopt.tables import Members
from distopt.volume.compute import FREE, Compute
from distopt.volume.forecast import Sending, sendings
from distopt.volume.modes import Mode
from distopt.volume.network import Wire

Computes = Mapping[tuple[str, float], Compute]  # by kind of mode and density, 1 where that is none


class Prediction(NamedTuple):
    """Seconds: of all messages, of compressing and decompressing, and of both with the backward pass.

    ``wire`` is predicted by formula, ``compute`` measured on this machine, or 0.  ``exchange`` is from the start of the
    backward pass, if it takes any time, to the mean of the last gradient: the update is not in it, nor what a step of
    Python takes.
    """

    wire: float
    compute: float
    exchange: float


class Question(NamedTuple):
    """Gradients in these buckets, on so many ranks; ``backward`` seconds go by until the last of them is there.

    ``overlap``: buckets of modes without a memory travel while the backward pass goes on.
    """

    buckets: Sequence[Members]
    ranks: int
    wire: Wire
    backward: float = 0.0
    computes: Computes = MappingProxyType({})
    overlap: bool = True

    def predict(self, mode: Mode) -> Prediction:
        """What a step takes in a mode."""
        sent = sendings(self.buckets, mode, self.ranks)
        return self.timed(sent, mode, self.compute(mode))

    def compute(self, mode: Mode) -> Compute:
        """What a mode computes, between the densities at which its kind is known.

        Where it is not known it is what a sum takes: the payloads that arrive are added up.
        """
        known = sorted((d, found) for (kind, d), found in self.computes.items() if kind == mode.kind)
        if not known:
            return FREE if mode.compressor.summable else Compute(0.0, self.wire.link.reduction)
        densities, found = zip(*known, strict=True)
        aim = mode.density or 1.0
        return Compute(*(float(np.interp(aim, densities, column)) for column in zip(*found, strict=True)))

    def timed(self, sent: Sequence[Sending], mode: Mode, compute: Compute) -> Prediction:
        """What it takes to send this."""
        wire = [self._wire(sending) for sending in sent]
        own = [compute.seconds(sending) for sending in sent]
        each = [w + o for w, o in zip(wire, own, strict=True)]
        end = self._behind(sent, each) if self.overlap and mode.hides else self.backward + sum(each)
        return Prediction(sum(wire), sum(own), end)

    def _wire(self, sending: Sending) -> float:
        return sum(self.wire.seconds(verb, nbytes, self.ranks) for verb, nbytes in sending.collectives)

    def _behind(self, sent: Sequence[Sending], each: Sequence[float]) -> float:
        """The end of buckets that travel one after the other, each as soon as its gradients are there.

        These come at an even pace, element by element.
        """
        total, there, end = max(1, sum(sending.elements for sending in sent)), 0, 0.0
        for sending, seconds in zip(sent, each, strict=True):
            there += sending.elements
            end = max(end, self.backward * (there / total)) + seconds
        return end
