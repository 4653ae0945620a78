"""The parameter lists that the benchmarks use: (name, shape), in forward order."""

import numpy as np

from distopt.lab import models


def tiny():
    """2000 tensors of 512 to 4096 elements."""
    sizes = np.random.default_rng(0).integers(512, 4097, 2000)
    return [(f"t{k}", (int(n),)) for k, n in enumerate(sizes)]


MODELS = models.MODELS | {"tiny": tiny}
