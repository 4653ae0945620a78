"""The predicted time of a step: compressing, sending and decompressing, partly hidden behind the backward pass."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from distopt.kernels.layout import BucketLayout
from distopt.lab import cost
from distopt.lab.compute import FREE, Compute
from distopt.lab.forecast import Sending, sendings
from distopt.lab.modes import Mode
from distopt.lab.network import Network, Wire

Computes = Mapping[tuple[str, float], Compute]  # by (kind of mode, density or 1)


class Prediction(NamedTuple):
    """The predicted seconds of a step.

    Attributes:
        wire: of all messages, by formula or by a fit.
        compute: of compressing and decompressing, as measured on this machine, or 0.
        exchange: from the start of the backward pass (if its time is given) to the mean of the last gradient.  The
            optimizer's update and the overhead of Python are not included.

    Example:
        >>> from distopt.lab import Question, buckets, mode, network
        >>> prediction = Question(buckets([("weight", (1000, 1000))]), 8, network("10GbE")).predict(mode("dense"))
        >>> f"{prediction.wire * 1e3:.2f} ms of {prediction.exchange * 1e3:.2f} ms"
        '6.49 ms of 6.49 ms'
    """

    wire: float
    compute: float
    exchange: float


class Question(NamedTuple):
    """The setting of a prediction: gradients, ranks and a network.

    Attributes:
        buckets: the gradients' buckets, in the order in which they are sent.
        ranks: the number of ranks.
        wire: the network, or a measured fit of one.
        backward: the seconds of a backward pass, until the last gradient is ready.
        computes: the measured compute cost by (kind of mode, density); 1 stands for a mode without a density.
        overlap: whether buckets travel while the backward pass goes on, unless all have their messages together.
        exchange: 'gather', 'two_phase', 'nodes' or 'auto', as of a step.
        logical: how many ranks live in ``ranks`` processes; None for one in each.

    Example:
        >>> from distopt.lab import Question, buckets, mode, network
        >>> question = Question(buckets([("weight", (1000, 1000))]), 8, network("10GbE"), backward=0.01)
        >>> f"{question.predict(mode('dense')).exchange * 1e3:.2f} ms"
        '16.49 ms'
    """

    buckets: Sequence[BucketLayout]
    ranks: int
    wire: Wire
    backward: float = 0.0
    computes: Computes = MappingProxyType({})
    overlap: bool = True
    exchange: str = "auto"
    logical: int | None = None

    def predict(self, mode: Mode) -> Prediction:
        """Predict the seconds of a step in a mode."""
        return self.timed(self.sent(mode), mode, self.compute(mode))

    def sent(self, mode: Mode) -> list[Sending]:
        """Return the messages of a step in a mode."""
        per_node = self.wire.per_node
        return sendings(self.buckets, mode, self.ranks, True, self.exchange, per_node, self.logical)

    def compute(self, mode: Mode) -> Compute:
        """Return the compute cost of a mode, interpolated between the densities at which its kind was measured.

        If its kind was not measured, the cost is that of adding up the payloads that arrive.
        """
        known = sorted((d, measured) for (kind, d), measured in self.computes.items() if kind == mode.kind)
        if not known:
            return FREE if mode.compressor.traits.summable else Compute(0.0, self.wire.link.reduction)
        densities, measured = zip(*known, strict=True)
        aim = mode.density or 1.0
        return Compute(*(float(np.interp(aim, densities, column)) for column in zip(*measured, strict=True)))

    def timed(self, sent: Sequence[Sending], mode: Mode, compute: Compute) -> Prediction:
        """Predict the seconds of a step that sends the given buckets at the given compute cost.

        With local steps they are those of the mean step of a window, which sends the buckets.
        """
        wire = [self._wire_seconds(sending) for sending in sent]
        compute_seconds = [compute.seconds(sending) for sending in sent]
        bucket_seconds = [w + o for w, o in zip(wire, compute_seconds, strict=True)]
        # [not sum(), which rounds otherwise than the loop below since Python 3.12: a mode that sends the same as dense
        # would be faster by one rounding]
        end = self.backward + float(np.cumsum([0.0, *bucket_seconds])[-1])
        if self.overlap and mode.windows.every == 1 and len(sent) == len(self.buckets):
            # each starts as soon as its gradients are ready, which come at an even pace, element by element
            total, ready, end = max(1, sum(sending.elements for sending in sent)), 0, 0.0
            for sending, seconds in zip(sent, bucket_seconds, strict=True):
                ready += sending.elements
                end = max(end, self.backward * (ready / total)) + seconds
        every = mode.windows.every  # steps share what is sent after one of them
        mean = self.backward + (end - self.backward) / every
        return Prediction(sum(wire) / every, sum(compute_seconds) / every, mean if every > 1 else end)

    def _wire_seconds(self, sending: Sending) -> float:
        """Return the seconds of a bucket's messages; ranks of a node have as many buckets at the same time."""
        seconds = sum(self.wire.seconds(verb, n, self.ranks) for verb, n in sending.collectives)
        if isinstance(self.wire, Network) and sending.inside:
            ranks, nodes = self.wire.filled(self.ranks)
            link = self.wire.link.shared(ranks)
            seconds += sum(cost.seconds(verb, n, ranks, self.wire.inside) for verb, n in sending.inside)
            seconds += sum(cost.seconds(verb, n / ranks, nodes, link) for verb, n in sending.between)
        return seconds
