"""The papers' equations in float64 numpy: the third opinion beside host and device."""

import numpy as np


def sgd(w, b, g, *, lr, momentum=None, dampening=0.0, weight_decay=0.0, nesterov=False):
    """One update of SINGA's SGD; returns the new (w, b).  ``momentum=None`` is plain SGD."""
    d = g + weight_decay * w
    if momentum is None:
        return w - lr * d, b
    b = momentum * b + (1 - dampening) * d
    return w - lr * (d + momentum * b if nesterov else b), b


def mean(parts):
    """The mean over ranks, in float64."""
    return np.mean([np.asarray(p, np.float64) for p in parts], axis=0)
