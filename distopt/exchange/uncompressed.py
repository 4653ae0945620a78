"""The members of a bucket that a compressor leaves as they are, to be summed so beside the payloads of the others."""

import math

import numpy as np

from distopt import kernels
from distopt.compress import ExchangeContext
from distopt.compress.context import layout_of
from distopt.device import DeviceMirror


class UncompressedMembers:
    """The members of x that a compressor leaves as they are, copied to one flat array, unless that is all of x.

    Args:
        x: the gradients of a bucket, ``(n,)``, after they were compressed.
        mask: what the compressor's ``uncompressed`` has returned.
        context: the call of the compressor.

    Attributes:
        all, none: are these all members, or none?
        flat: their values, one after the other; x itself if these are all.
        members: their places in ``flat``.
    """

    def __init__(self, x: np.ndarray, mask: DeviceMirror, context: ExchangeContext):
        layout, chosen = layout_of(x, context), mask.host != 0
        self.all, self.none = bool(chosen.all()), not chosen.any()
        self.flat, self.members = x, layout
        if not self.all:
            self.members = layout.select(chosen).compacted(x)
            self.flat = context.scratch("whole", self.members.extent * x.itemsize).view(x.dtype)
            nonfinite = context.scratch("whole and not finite", 8 * chosen.size).view(np.int64)
            kernels.pack(self.members, self.flat, 1.0, nonfinite, math.inf)

    def put_back(self) -> None:
        """Write their values to x."""
        kernels.unpack(self.members, self.flat, 1.0)
