"""The papers' equations in float64 numpy: the third opinion beside host and device."""

import numpy as np

from distopt.lab.commands.prove_references import (  # noqa: F401  those of optimizers, by the same name here
    adagrad,
    adam,
    adamw,
    lamb,
    lans,
    lars,
    lars_around_sgd,
    lbsgd,
    muon,
    rmsprop,
    sgd,
    trust_ratio,
)


def mean(parts):
    """The mean over ranks, in float64."""
    return np.mean([np.asarray(p, np.float64) for p in parts], axis=0)


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


def mixed(key, number):
    """SplitMix64 of a key and a number, in Python's integers."""
    bits = 2**64 - 1
    key = (key + number + 0x9E3779B97F4A7C15) & bits
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & bits
    key = (key ^ key >> 27) * 0x94D049BB133111EB & bits
    return key ^ key >> 31


def chosen_by_key(sizes, every, key, turn):
    """Per tensor the entry that partial averaging by a key chooses of each block, which may be behind the last one."""
    found = []
    for number, size in enumerate(sizes):
        begins = [(mixed(mixed(key, number), block) >> 32) * every >> 32 for block in range(-(-size // every))]
        found.append([block * every + (begin + turn) % every for block, begin in enumerate(begins)])
    return found


def chosen_by_seed(sizes, every, seed, step):
    """Per tensor the entries that partial averaging by a seed chooses in a step, ascending."""
    chosen = chosen_by_key(sizes, every, mixed(mixed(0, seed), step // every), step % every)
    return [[place for place in places if place < size] for places, size in zip(chosen, sizes, strict=True)]
