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


def clipped(g, limit):
    """Elementwise; None or <= 0 clips nothing."""
    return g if limit is None or limit <= 0 else np.clip(g, -limit, limit)


def norm(x):
    """|x| over all elements."""
    return np.sqrt(np.sum(np.square(x)))


def bounded(length, lower, upper):
    """A norm between bounds, of which None is none."""
    length = length if lower is None else max(length, lower)
    return length if upper is None else min(length, upper)


def ratio(a, b):
    """A trust ratio, 1 if a norm is 0."""
    return a / b if a > 0 and b > 0 else 1.0


def adamw(w, m, v, g, *, t, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay=0.0, correct_bias=True):
    """Update number t of AdamW, epsilon before the bias correction, the decay outside of it; returns (w, m, v)."""
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    rate = lr * np.sqrt(1 - beta_2**t) / (1 - beta_1**t) if correct_bias else lr
    return w - rate * m / (np.sqrt(v) + epsilon) - lr * weight_decay * w, m, v


def lars(
    w, b, g, *, lr, momentum=0.0, eta=1e-3, epsilon=1e-8, weight_decay=0.0, clip=None, rescale=1.0, excluded=False
):
    """One update of MXNet's LARS (You, Gitman and Ginsburg, 2017, with an epsilon); returns the new (w, b)."""
    g = rescale * g
    q = 1.0
    if norm(w) > 0 and norm(g) > 0 and not excluded:
        q = eta * norm(w) / (norm(g) + weight_decay * norm(w) + epsilon)
    b = momentum * b - lr * q * (clipped(g, clip) + weight_decay * w)
    return w + b, b


def lamb(
    w,
    m,
    v,
    g,
    *,
    t,
    lr,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    weight_decay=0.0,
    lower_bound=None,
    upper_bound=None,
    bias_correction=True,
    clip=None,
    rescale=1.0,
    excluded=False,
):
    """Update number t of LAMB (You et al., 2020, algorithm 2); returns the new (w, m, v)."""
    g = clipped(rescale * g, clip)
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    mh, vh = (m / (1 - beta_1**t), v / (1 - beta_2**t)) if bias_correction else (m, v)
    u = mh / (np.sqrt(vh) + epsilon) + weight_decay * w
    r = 1.0 if excluded else ratio(bounded(norm(w), lower_bound, upper_bound), norm(u))
    return w - lr * r * u, m, v


def orthogonalized(u, steps=5):
    """What Newton and Schulz's iteration makes of a matrix, by its polynomial of each singular value."""
    left, s, right = np.linalg.svd(u / (norm(u) + 1e-7), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return left * s @ right


def muon(w, m, g, *, lr, momentum=0.95, nesterov=True, weight_decay=0.0, steps=5, clip=None, rescale=1.0):
    """One update of Muon (Jordan et al., 2024); a filter O x I x k x k is a matrix of O rows.  Returns (w, m)."""
    g = clipped(rescale * g, clip)
    m = momentum * m + (1 - momentum) * g
    u = (momentum * m + (1 - momentum) * g if nesterov else m).reshape(len(w), -1)
    x = orthogonalized(u, steps) * np.sqrt(max(1.0, u.shape[0] / u.shape[1]))
    return w - lr * (x.reshape(w.shape) + weight_decay * w), m


def lans(
    w,
    m,
    v,
    g,
    *,
    t,
    lr,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    weight_decay=0.0,
    lower_bound=None,
    upper_bound=None,
    clip=None,
    rescale=1.0,
    excluded=False,
):
    """Update number t of LANS (Zheng et al., 2020, algorithm 2); returns the new (w, m, v)."""
    g = rescale * g
    h = clipped(g / norm(g) if norm(g) > 0 else np.zeros_like(g), clip)
    m = beta_1 * m + (1 - beta_1) * h
    v = beta_2 * v + (1 - beta_2) * h**2
    den = np.sqrt(v / (1 - beta_2**t)) + epsilon
    um, ug = m / (1 - beta_1**t) / den + weight_decay * w, h / den + weight_decay * w
    length = bounded(norm(w), lower_bound, upper_bound)
    rm, rg = (1.0, 1.0) if excluded else (ratio(length, norm(um)), ratio(length, norm(ug)))
    return w - lr * (beta_1 * rm * um + (1 - beta_1) * rg * ug), m, v


def lbsgd(w, b, grads, *, lr, strategy, scale, calls, warmup, momentum=0.0, weight_decay=0.0, clip=None, rescale=1.0):
    """One update of MXNet's LBSGD by a window of gradients, ``calls`` of them so far; returns the new (w, b)."""
    g = sum(grads) / scale
    part = {"linear": lambda x: x, "power2": lambda x: x**2, "sqrt": np.sqrt}
    if strategy == "lars":
        w2, g2 = norm(w) ** 2, norm(g) ** 2
        multiplier = min(max(np.sqrt(w2 / (g2 + weight_decay * w2 + 1e-18)), 0.01), 100)
    elif calls >= warmup:
        multiplier = scale
    else:
        multiplier = 1 + (scale - 1) * part[strategy](calls / warmup)
    b = momentum * b - lr * multiplier * (clipped(rescale * g, clip) + weight_decay * w)
    return w + b, b


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
