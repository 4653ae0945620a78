"""The papers' equations in float64 numpy: the third opinion beside host and device."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distopt.optim import (
    ALL,
    LAMB,
    LANS,
    LARS,
    LBSGD,
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    BatchGradients,
    LarsWrapper,
    Muon,
    RMSProp,
    Signum,
)
from distopt.optim.part import Equations

Array = np.ndarray


def sgd(
    w: Array,
    b: Any,
    g: Array,
    *,
    lr: float,
    momentum: float | None = None,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[Array, Any]:
    """Return (w, b) after one update of SINGA's SGD; ``momentum=None`` is plain SGD."""
    d = g + weight_decay * w
    if momentum is None:
        return w - lr * d, b
    b = momentum * b + (1 - dampening) * d
    return w - lr * (d + momentum * b if nesterov else b), b


def signum(
    w: Array, b: Array, g: Array, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> tuple[Array, Array]:
    """Return (w, b) after one update of Signum (Bernstein et al., 2018), its decay beside the step."""
    b = momentum * b + g
    return w - lr * weight_decay * w - lr * np.sign(b), b


def rmsprop(
    w: Array, r: Array, g: Array, *, lr: float, rho: float = 0.9, epsilon: float = 1e-8, weight_decay: float = 0.0
) -> tuple[Array, Array]:
    """Return (w, r) after one update of SINGA's RMSProp."""
    d = g + weight_decay * w
    r = rho * r + (1 - rho) * d**2
    return w - lr * d / np.sqrt(r + epsilon), r


def adagrad(
    w: Array, h: Array, g: Array, *, lr: float, epsilon: float = 1e-8, weight_decay: float = 0.0
) -> tuple[Array, Array]:
    """Return (w, h) after one update of SINGA's AdaGrad."""
    d = g + weight_decay * w
    h = h + d**2
    return w - lr * d / np.sqrt(h + epsilon), h


def moments(m: Array, v: Array, g: Array, beta_1: float, beta_2: float) -> tuple[Array, Array]:
    """Return the means of gradients and of their squares, with one gradient more."""
    return beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2


def adam(
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    *,
    t: int,
    lr: float,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Return (w, m, v) after update number t = 1, 2, ... of SINGA's Adam."""
    d = g + weight_decay * w
    m, v = moments(m, v, d, beta_1, beta_2)
    return w - lr * (m / (1 - beta_1**t)) / (np.sqrt(v / (1 - beta_2**t)) + epsilon), m, v


def adamw(
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    *,
    t: int,
    lr: float,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    correct_bias: bool = True,
) -> tuple[Array, Array, Array]:
    """Return (w, m, v) after update t of AdamW: epsilon before the bias correction, the decay outside of it."""
    m, v = moments(m, v, g, beta_1, beta_2)
    rate = lr * np.sqrt(1 - beta_2**t) / (1 - beta_1**t) if correct_bias else lr
    return w - rate * m / (np.sqrt(v) + epsilon) - lr * weight_decay * w, m, v


def clipped(g: Array, limit: float | None) -> Array:
    """Return g held between -limit and limit; None or <= 0 clips nothing."""
    return g if limit is None or limit <= 0 else np.clip(g, -limit, limit)


def norm(x: Array) -> float:
    """Return |x| over all elements."""
    return float(np.sqrt(np.sum(np.square(x))))


def bounded(length: float, lower: float | None, upper: float | None) -> float:
    """Return a norm between bounds, of which None is none."""
    length = length if lower is None else max(length, lower)
    return length if upper is None else min(length, upper)


def ratio(a: float, b: float) -> float:
    """Return a trust ratio, 1 if a norm is 0."""
    return a / b if a > 0 and b > 0 else 1.0


def lars(
    w: Array,
    b: Array,
    g: Array,
    *,
    lr: float,
    momentum: float = 0.0,
    eta: float = 1e-3,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float | None = None,
    rescale: float = 1.0,
    excluded: bool = False,
) -> tuple[Array, Array]:
    """Return (w, b) after one update of MXNet's LARS (You, Gitman and Ginsburg, 2017, with an epsilon)."""
    g = rescale * g
    q = 1.0 if excluded else trust_ratio(w, g, ratio=eta, weight_decay=weight_decay, epsilon=epsilon)
    b = momentum * b - lr * q * (clipped(g, clip) + weight_decay * w)
    return w + b, b


def lamb(
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    *,
    t: int,
    lr: float,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
    bias_correction: bool = True,
    clip: float | None = None,
    rescale: float = 1.0,
    excluded: bool = False,
) -> tuple[Array, Array, Array]:
    """Return (w, m, v) after update number t of LAMB (You et al., 2020, algorithm 2)."""
    g = clipped(rescale * g, clip)
    m, v = moments(m, v, g, beta_1, beta_2)
    mh, vh = (m / (1 - beta_1**t), v / (1 - beta_2**t)) if bias_correction else (m, v)
    u = mh / (np.sqrt(vh) + epsilon) + weight_decay * w
    r = 1.0 if excluded else ratio(bounded(norm(w), lower_bound, upper_bound), norm(u))
    return w - lr * r * u, m, v


def lans(
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    *,
    t: int,
    lr: float,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
    clip: float | None = None,
    rescale: float = 1.0,
    excluded: bool = False,
) -> tuple[Array, Array, Array]:
    """Return (w, m, v) after update number t of LANS (Zheng et al., 2020, algorithm 2)."""
    g = rescale * g
    h = clipped(g / norm(g) if norm(g) > 0 else np.zeros_like(g), clip)
    m, v = moments(m, v, h, beta_1, beta_2)
    den = np.sqrt(v / (1 - beta_2**t)) + epsilon
    um, ug = m / (1 - beta_1**t) / den + weight_decay * w, h / den + weight_decay * w
    length = bounded(norm(w), lower_bound, upper_bound)
    rm, rg = (1.0, 1.0) if excluded else (ratio(length, norm(um)), ratio(length, norm(ug)))
    return w - lr * (beta_1 * rm * um + (1 - beta_1) * rg * ug), m, v


def orthogonalized(u: Array, steps: int = 5) -> Array:
    """Return what Newton and Schulz's iteration makes of a matrix, by its polynomial of each singular value."""
    left, s, right = np.linalg.svd(u / (norm(u) + 1e-7), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    product: Array = left * s @ right
    return product


def muon(
    w: Array,
    m: Array,
    g: Array,
    *,
    lr: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    steps: int = 5,
    clip: float | None = None,
    rescale: float = 1.0,
) -> tuple[Array, Array]:
    """Return (w, m) after one update of Muon (Jordan et al., 2024); a filter O x I x k x k is a matrix of O rows."""
    g = clipped(rescale * g, clip)
    m = momentum * m + (1 - momentum) * g
    u = (momentum * m + (1 - momentum) * g if nesterov else m).reshape(len(w), -1)
    x = orthogonalized(u, steps) * np.sqrt(max(1.0, u.shape[0] / u.shape[1]))
    return w - lr * (x.reshape(w.shape) + weight_decay * w), m


WARMUPS: dict[str, Callable[[float], float]] = {"linear": lambda x: x, "power2": lambda x: x**2, "sqrt": np.sqrt}


def lbsgd(
    w: Array,
    b: Array,
    grads: Sequence[Array],
    *,
    lr: float,
    strategy: str,
    scale: int,
    calls: int,
    warmup: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    rescale: float = 1.0,
) -> tuple[Array, Array]:
    """Return (w, b) after one update of MXNet's LBSGD by a window of gradients, ``calls`` of them so far."""
    g = sum(grads[1:], start=grads[0]) / scale
    if strategy == "lars":
        w2, g2 = norm(w) ** 2, norm(g) ** 2
        multiplier = min(max(np.sqrt(w2 / (g2 + weight_decay * w2 + 1e-18)), 0.01), 100)
    elif calls >= warmup:
        multiplier = scale
    else:
        multiplier = 1 + (scale - 1) * WARMUPS[strategy](calls / warmup)
    b = momentum * b - lr * multiplier * (clipped(rescale * g, clip) + weight_decay * w)
    return w + b, b


def trust_ratio(w: Array, g: Array, *, ratio: float, weight_decay: float, epsilon: float = 0.0) -> float:
    """Return LARS's q of a tensor, 1 where a norm is 0."""
    w_norm, g_norm = norm(w), norm(g)
    return ratio * w_norm / (g_norm + weight_decay * w_norm + epsilon) if w_norm and g_norm else 1.0


def lars_around_sgd(
    w: Array,
    b: Array,
    g: Array,
    *,
    lr: float,
    momentum: float,
    ratio: float,
    weight_decay: float,
    epsilon: float = 0.0,
    excluded: bool = False,
) -> tuple[Array, Array]:
    """Return (w, b) after one update of MoXing's wrapper around momentum SGD, the learning rate outside."""
    q = 1.0 if excluded else trust_ratio(w, g, ratio=ratio, weight_decay=weight_decay, epsilon=epsilon)
    return sgd(w, b, q * (g + weight_decay * w), lr=lr, momentum=momentum)


def mean(parts: Sequence[Array]) -> Array:
    """Return the mean over ranks, in float64."""
    return np.asarray(np.mean([np.asarray(p, np.float64) for p in parts], axis=0))


def mixed(key: int, number: int) -> int:
    """SplitMix64 of a key and a number, in Python's integers."""
    bits = 2**64 - 1
    key = (key + number + 0x9E3779B97F4A7C15) & bits
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & bits
    key = (key ^ key >> 27) * 0x94D049BB133111EB & bits
    return key ^ key >> 31


def chosen_by_key(sizes: Sequence[int], every: int, key: int, turn: int) -> list[list[int]]:
    """Per tensor the entry that partial averaging by a key chooses of each block, which may be after the last one."""
    found = []
    for number, size in enumerate(sizes):
        begins = [(mixed(mixed(key, number), block) >> 32) * every >> 32 for block in range(-(-size // every))]
        found.append([block * every + (begin + turn) % every for block, begin in enumerate(begins)])
    return found


def chosen_by_seed(sizes: Sequence[int], every: int, seed: int, step: int) -> list[list[int]]:
    """Per tensor the entries that partial averaging by a seed chooses in a step, ascending."""
    chosen = chosen_by_key(sizes, every, mixed(mixed(0, seed), step // every), step % every)
    return [[place for place in places if place < size] for places, size in zip(chosen, sizes, strict=True)]


def _case(kind: Callable[..., Any], rule: Callable[..., tuple[Any, ...]], slots: int = 1, **numbers: Any) -> Equations:
    """Return the case of a rule with one slot, or with two moments, which counts its updates."""

    def update(t: int, *arrays: Array) -> tuple[Any, ...]:
        return rule(*arrays, **numbers, **({"t": t} if slots == 2 else {}))

    return Equations(functools.partial(kind, **numbers), update, slots)


def _means_of_two(t: int, w: Array, window: Array, g: Array) -> tuple[Array, Array]:
    """Return (w, window) after a call of SGD at rate 0.1 that updates with the mean of two gradients."""
    return (w, g) if t % 2 else (w - 0.1 * (window + g) / 2, np.zeros_like(w))


def _lbsgd_of_two(t: int, w: Array, b: Array, window: Array, g: Array) -> tuple[Array, ...]:
    """Return (w, b, window) after a call of LBSGD with a window of two calls, and 8 of warm-up."""
    if t % 2:
        return w, b, g
    numbers = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
    return (*lbsgd(w, b, [window, g], strategy="linear", scale=2, calls=t, warmup=8, **numbers), np.zeros_like(w))


CASES: dict[str, Equations] = {
    "SGD": _case(SGD, sgd, lr=0.1, weight_decay=1e-2),
    "SGD with momentum": _case(SGD, sgd, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "SGD with Nesterov's momentum": _case(SGD, sgd, lr=0.1, momentum=0.9, nesterov=True),
    "Signum": _case(Signum, signum, lr=0.01, momentum=0.5, weight_decay=1e-2),
    "RMSProp": _case(RMSProp, rmsprop, lr=0.01, rho=0.9, epsilon=1e-3, weight_decay=1e-2),
    "AdaGrad": _case(AdaGrad, adagrad, lr=0.1, epsilon=1e-3, weight_decay=1e-2),
    "Adam": _case(Adam, adam, 2, lr=0.01, epsilon=1e-3, weight_decay=1e-2),
    "AdamW": _case(AdamW, adamw, 2, lr=0.01, epsilon=1e-3, weight_decay=1e-2),
    "LARS": _case(LARS, lars, lr=1.0, momentum=0.9, eta=0.01, weight_decay=1e-2),
    "LAMB": _case(LAMB, lamb, 2, lr=0.01, epsilon=1e-3, weight_decay=1e-2),
    "LANS": _case(LANS, lans, 2, lr=0.01, epsilon=1e-3, weight_decay=1e-2),
    "LBSGD": Equations(
        lambda: LBSGD(0.05, 0.9, 1e-2, warmup_epochs=1, batch_scale=2, updates_per_epoch=8), _lbsgd_of_two, 2
    ),
    "Muon": _case(Muon, muon, lr=0.02, momentum=0.95, weight_decay=1e-2),
    "LarsWrapper": Equations(
        lambda: LarsWrapper(SGD(0.1, momentum=0.9), ratio=0.01, weight_decay=1e-2),
        lambda t, *arrays: lars_around_sgd(*arrays, lr=0.1, momentum=0.9, ratio=0.01, weight_decay=1e-2),
        1,
    ),
    "BatchGradients": Equations(lambda: BatchGradients(SGD(0.1), 2), _means_of_two, 1),
}
CASES |= {name: case for about in ALL.values() for name, case in about().equations.items()}
