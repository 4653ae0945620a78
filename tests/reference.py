"""The papers' equations in float64 numpy, as the package has them, and more of them that no law asks for."""

import numpy as np

from distopt.lab.laws.references import *  # noqa: F403
from distopt.lab.laws.references import trust_ratio


def lars_of_the_paper(w, v, g, *, lr, momentum, ratio, weight_decay):
    """One update of You et al.'s LARS, the learning rate inside the buffer; returns the new (w, v)."""
    q = trust_ratio(w, g, ratio=ratio, weight_decay=weight_decay)
    v = momentum * v + lr * q * (g + weight_decay * w)
    return w - v, v


def sum_in_turn(terms, accumulators):
    """The sum of float64 numbers by accumulators that take them in turn and are folded pairwise: one order of many."""
    sums = np.zeros(accumulators)
    for row in np.concatenate([terms, np.zeros(-len(terms) % accumulators)]).reshape(-1, accumulators):
        sums += row
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return float(sums[0])


def sums_of_chunks(terms):
    """A tensor's sums over chunks, in the order of native/sums.h."""
    return [sum_in_turn(terms[begin : begin + 4096], 16) for begin in range(0, len(terms), 4096)]


def sum_of_tensor(terms):
    """The sum of a tensor's terms in the order of native/sums.h."""
    return sum_in_turn(sums_of_chunks(terms), 256)
