"""The kernels of ``native/``, by name: ``kernels.pack(layout, flat, scale, counts, largest)``.

Example:
    >>> import numpy as np
    >>> from distopt import kernels
    >>> x = np.array([3.0, -4.0])
    >>> kernels.clip(x, 3.5)
    >>> x.tolist()
    [3.0, -3.5]
"""

from collections.abc import Callable

from distopt.kernels.dispatch import KERNELS

globals().update(KERNELS)


def __getattr__(name: str) -> Callable[..., None]:
    """Raise AttributeError that lists the kernels."""
    raise AttributeError(f"no kernel {name!r} in native/; there are {', '.join(sorted(KERNELS))}")
