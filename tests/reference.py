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


def rmsprop(w, r, g, *, lr, rho=0.9, epsilon=1e-8, weight_decay=0.0):
    """One update of SINGA's RMSProp; returns the new (w, r)."""
    d = g + weight_decay * w
    r = rho * r + (1 - rho) * d**2
    return w - lr * d / np.sqrt(r + epsilon), r


def adagrad(w, h, g, *, lr, epsilon=1e-8, weight_decay=0.0):
    """One update of SINGA's AdaGrad; returns the new (w, h)."""
    d = g + weight_decay * w
    h = h + d**2
    return w - lr * d / np.sqrt(h + epsilon), h


def adam(w, m, v, g, *, t, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-8, weight_decay=0.0):
    """Update number t = 1, 2, ... of SINGA's Adam; returns the new (w, m, v)."""
    d = g + weight_decay * w
    m = beta_1 * m + (1 - beta_1) * d
    v = beta_2 * v + (1 - beta_2) * d**2
    return w - lr * (m / (1 - beta_1**t)) / (np.sqrt(v / (1 - beta_2**t)) + epsilon), m, v


def trust_ratio(w, g, *, ratio, weight_decay, epsilon=0.0):
    """LARS's q of a tensor, 1 where a norm is 0."""
    w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    return ratio * w_norm / (g_norm + weight_decay * w_norm + epsilon) if w_norm and g_norm else 1.0


def lars_of_the_paper(w, v, g, *, lr, momentum, ratio, weight_decay):
    """One update of You et al.'s LARS, the learning rate inside the buffer; returns the new (w, v)."""
    q = trust_ratio(w, g, ratio=ratio, weight_decay=weight_decay)
    v = momentum * v + lr * q * (g + weight_decay * w)
    return w - v, v


def lars_around_sgd(w, b, g, *, lr, momentum, ratio, weight_decay, epsilon=0.0, excluded=False):
    """One update of MoXing's wrapper around momentum SGD, the learning rate outside; returns the new (w, b)."""
    q = 1.0 if excluded else trust_ratio(w, g, ratio=ratio, weight_decay=weight_decay, epsilon=epsilon)
    return sgd(w, b, q * (g + weight_decay * w), lr=lr, momentum=momentum)
