"""Trainings that many tests share: small integers as gradients, whose sums are exact in float32."""

import numpy as np

from distopt import DistOpt, Parameter
from distopt.optim import SGD

SHAPES = [(40, 50), (7,), (3, 5, 9), (1000,), (0,), ()]


def integers(*seeds, shapes=SHAPES):
    """Gradients of a rank in a step, which are the last of the seeds."""
    rng = np.random.default_rng(seeds)
    return [rng.integers(-9, 10, shape).astype(np.float32) for shape in shapes]


def zeros(shapes=SHAPES):
    return [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]


def trained(comm, compressor, steps, *, exchanges, gradients=integers, seed=(), lr=1.0, threshold=300, **options):
    """Train with these exchanges by turns; return the parameters, the states, and the optimizer."""
    params, opt = zeros(), DistOpt(SGD(lr), comm, threshold=threshold, **options)
    for step in range(steps):
        pairs = list(zip(params, gradients(*seed, comm.rank, step), strict=True))
        opt.step(pairs, compressor, False, exchanges[step % len(exchanges)])
    return [p.data for p in params], opt.state_dict()["states"], opt
