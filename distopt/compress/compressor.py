"""Compressors are values without state: ``compress`` moves mass out of an array, ``decompress`` puts it into another.

The law, for every compressor and every x:  before == after + decompress(compress(before))          (conservation)
"""

from typing import NamedTuple, Protocol

import numpy as np


class At(NamedTuple):
    """Where a call stands: updates applied so far, and this rank among how many."""

    step: int = 0
    rank: int = 0
    size: int = 1


class Compressor(Protocol):
    """What a compressor is; ``exchange`` derives the collective from its properties."""

    @property
    def summable(self) -> bool:
        """May payloads of different ranks be added on the wire?"""

    @property
    def lossless(self) -> bool:
        """Is nothing ever left behind?"""

    def payload_bytes(self, n: int) -> int | None:
        """Bytes of the payload of n float32 elements; None if that depends on the data."""

    def compress(self, x: np.ndarray, state: dict[str, np.ndarray], at: At) -> np.ndarray:
        """Move the part of the flat array x that is worth sending out of it; leave the rest in x.

        The payload may be x itself.  ``state`` holds arrays of x's size ('residual', 'velocity') that belong to
        DistOpt, which makes, saves and moves them.
        """

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Put a payload into ``out``: overwrite if summable, add if not."""
