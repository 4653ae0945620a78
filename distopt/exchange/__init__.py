"""The one place where a compressor meets a communicator; one file per algorithm."""

from collections.abc import Callable

import numpy as np

from distopt.comm import Communicator
from distopt.compress import At, Compressor
from distopt.exchange.reduce import reduce
from distopt.exchange.window import Window

Algorithm = Callable[[np.ndarray, Compressor, Communicator, dict[str, np.ndarray], At], None]


def choose(compressor: Compressor) -> Algorithm:
    """The algorithm for a compressor's payloads: it replaces a flat array by the sum over ranks of what they carry."""
    if compressor.summable:
        return reduce
    raise TypeError(f"{compressor!r}: payloads that cannot be summed on the wire have no algorithm yet")


__all__ = ["Algorithm", "Window", "choose", "reduce"]
