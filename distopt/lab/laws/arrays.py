"""Laws of one array, on one rank: what compressors send and keep, what top-K selects, what optimizers update.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

from typing import Any

import numpy as np

from distopt.compress import DCT, Compressor, ExchangeContext, TopK
from distopt.compress.base import sketched
from distopt.compress.planes import unpack_entries
from distopt.compress.state import prefixed
from distopt.lab.laws.runs import require
from distopt.optim.part import Equations


def add_up(kept: np.ndarray, sent: np.ndarray, before: np.ndarray, ulps: float = 0, what: object = "") -> None:
    """What stays and what arrives are what was there, to the bit, or within ``ulps`` of the largest of them."""
    below_all = np.nextafter(np.finfo(before.dtype).max, before.dtype.type(0))  # the largest has no next one
    largest = np.minimum(np.maximum(np.maximum(abs(kept), abs(sent)), abs(before)), below_all)
    wrong = ~(abs(kept + sent - before) <= ulps * np.spacing(largest))
    if wrong.any():
        at = int(wrong.argmax())
        allowed = f"within {ulps:g} ulp" if ulps else "to the bit"
        text = f"entry {at} of {before.size} {before.dtype} was {before.flat[at]!r}"
        raise AssertionError(f"{what} {allowed}: {text}, {kept.flat[at]!r} kept and {sent.flat[at]!r} sent".lstrip())


def conservation(
    compressor: Compressor, x: np.ndarray, size: int = 1, ulps: float = 0, residual: np.ndarray | None = None
) -> None:
    """Law 1: before == after + decompress(compress(before)), to the bit, or within ``ulps`` of the largest of them.

    What is before is x, or its coefficients, and what a compressor with a memory has kept: ``residual``.
    """
    context, state, before = ExchangeContext(size=size), prefixed({}, compressor.traits), x.copy()
    if isinstance(compressor, DCT):
        before = compressor.coefficients(x, context).copy()
    if compressor.traits.stateful:
        state.update({"residual": np.zeros_like(x) if residual is None else residual, "velocity": np.zeros_like(x)})
        before += state["residual"]
    context = sketched(compressor, x, state, context)
    payload, out = compressor.compress(x, state, context), np.full_like(x, np.nan if compressor.traits.summable else 0)
    expected = compressor.payload_bytes(x.size, x.itemsize)
    require(expected in (None, payload.nbytes), f"{compressor!r}: {payload.nbytes} bytes, and not {expected}")
    if payload is x:  # the payload is x itself, x is spent, and the sum stands in x
        out, x = x, np.zeros_like(x)
    compressor.decompress(payload, out, context)
    add_up(state["residual"] if compressor.traits.stateful else x, out, before, ulps, repr(compressor))


def top_k_is_a_stable_sort(x: np.ndarray, k: int, what: str = "") -> None:
    """Top-K takes the first k entries of numpy's stable sort by magnitude: ties go to the lowest index."""
    case, expected = f"the {k} largest of {x.size} {x.dtype} {what}", np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    left = x.copy()
    index, values = unpack_entries(TopK(k / x.size).compress(left, {}, ExchangeContext()), x.dtype)
    require(index.size == k, f"{case}: {index.size} entries were sent")
    wrong = np.flatnonzero(index != expected)
    first = "".join(f", first {index[at]} for {expected[at]}" for at in wrong[:1])
    require(not wrong.size, f"{case}: {wrong.size} entries are not those of the sort{first}")
    require(values.tobytes() == x[expected].tobytes(), f"{case}: a value that was sent is not that of the array")
    x = x.copy()
    x[expected] = 0
    require(left.tobytes() == x.tobytes(), f"{case}: what stays is not the array without what was sent")


def updates_are_the_equations(case: Equations, rng: np.random.Generator, dtype: Any, tolerance: float) -> float:
    """20 updates of an optimizer are its paper's equations in float64; the largest error, relative to the weights."""
    opt, w = case.make(), rng.standard_normal((24, 10)).astype(dtype)
    arrays = [w.astype(np.float64), *np.zeros((case.slots, *w.shape))]
    for update in range(20):
        g = (rng.integers(-16, 17, w.shape) / 8).astype(dtype)  # of which Signum's sums are exact
        opt.apply("w", w, g)
        opt.step()
        arrays = list(case.rule(update + 1, *arrays, g.astype(np.float64)))
    error = float(abs(w - arrays[0]).max() / abs(arrays[0]).max())
    text = f"{type(opt).__name__} in {w.dtype} is {error:.1e} from its equations after 20 updates"
    require(error <= tolerance, f"{text}, {tolerance:.0e} is allowed")
    return error
