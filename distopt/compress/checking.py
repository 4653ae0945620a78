"""A check of a compressor: what a step relies on, tried without other ranks."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from distopt.compress.base import Compressor, at_density, check_compressor, payload_nbytes, sketched
from distopt.compress.context import BucketContext, ExchangeContext
from distopt.compress.dct import DCT
from distopt.compress.error_feedback import ErrorFeedback
from distopt.compress.state import RESIDUAL, State
from distopt.kernels.layout import BucketLayout

SIZES = 0, 1, 7, 1000, 4097  # of buckets with one member
SHAPES, OFFSETS = ((3, 50), (7,), (40, 10)), (0, 160, 176)  # of a bucket with several, and gaps between them
SUMMED = "float32", "float64", "int32", "int64", "uint8", "float16", "bfloat16"  # dtypes, by any communicator
LARGE = 100.0  # more than any other entry


def check(compressor: Compressor, ulps: float = 4) -> None:
    """Try a compressor on a few arrays, as a step would call it: most mistakes in one of your own would be silent.

    A payload must be a flat array of ``payload_bytes``, and the same for the same arguments.  ``decompress`` must
    overwrite if ``summable``, and add if not.  What stays in x and what arrives must add up to what was there, also
    with ``add`` if ``compress`` takes that; gaps must stay zero, and a NaN must leave x where a large number would.
    Arrays are float32, and float64 unless ``payload_bytes`` raises ValueError for that.

    ``ErrorFeedback`` and ``DCT`` are looked through.  Not looked at are hooks, what ``sharded`` returns, and GPUs; of a
    compressor with hooks or a momentum, only payloads and ``decompress`` are.

    Args:
        compressor: the compressor.
        ulps: by how many units in the last place, of the largest number in it, a sum may be off.

    Raises:
        TypeError: ``compressor`` is none.
        ValueError: something does not hold; the text names the method, the numbers and the size.

    Example:
        >>> from distopt.compress import ErrorFeedback, TopK
        >>> check(ErrorFeedback(TopK(0.01)))
        >>> class Forgetful(TopK):
        ...     def compress(self, x, state, context, add=None):
        ...         return super().compress(x.copy(), state, context, add)
        ...
        ...     def __repr__(self):
        ...         return "Forgetful"
        >>> check(Forgetful(0.5))
        Traceback (most recent call last):
        ValueError: Forgetful.compress must take out of x what it sends, x is as it was (n = 1, float32)
    """
    check_compressor(compressor)
    remembers = False
    while isinstance(compressor, ErrorFeedback | DCT):
        remembers, compressor = remembers or isinstance(compressor, ErrorFeedback), compressor.compressor
    if compressor.traits.budget is not None:
        compressor = at_density(compressor, 0.01)  # as a step takes the one that has as many bytes
    compressor = compressor.at_step(0)
    taken = inspect.signature(compressor.compress).parameters.values()
    adds = any(parameter.name == "add" or parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
    if remembers and not adds:
        raise ValueError(f"{compressor!r}.compress must take add=None, by which ErrorFeedback gives it the gradient")
    for layout in _layouts(compressor):
        trial = _Trial(compressor, layout, ulps)
        if not remembers:
            trial.run()
        if adds:
            trial.run(with_add=True)


def differs(kept: np.ndarray, sent: np.ndarray, before: np.ndarray, ulps: float) -> np.ndarray:
    """Return where kept + sent is not ``before`` within ``ulps`` of the largest of the three; a NaN never is."""
    largest = np.maximum(np.maximum(abs(kept), abs(sent)), abs(before))
    found: np.ndarray = ~(abs(kept + sent - before) <= ulps * np.spacing(largest))
    return found


def _layouts(compressor: Compressor) -> Iterator[BucketLayout]:
    for dtype in (np.float32, np.float64):
        if dtype is np.float64:
            try:
                compressor.payload_bytes(1, 8)
            except ValueError:
                return
        for n in SIZES:
            yield BucketLayout(["x"], [(n,)], [0], dtype)
        yield BucketLayout(["w", "b", "v"], SHAPES, OFFSETS, dtype)


class _Trial:
    """Calls of a compressor, which has no other one around it, for a bucket."""

    def __init__(self, compressor: Compressor, layout: BucketLayout, ulps: float):
        self._compressor, self._layout, self._ulps = compressor, layout, ulps
        values = BucketLayout(layout.names, layout.shapes, layout.records["offset"].tolist(), layout.dtype)
        values.point_to([np.zeros(shape, layout.dtype) for shape in layout.shapes])
        memory = BucketContext(layout, values, lambda name, nbytes: np.zeros(nbytes, np.uint8))  # as in a plan
        self._context, self._rng = ExchangeContext(bucket=memory), np.random.default_rng(layout.extent)

    def run(self, with_add: bool = False) -> None:
        """Raise ValueError for the first thing that does not hold."""
        x, add = self._array(self._rng.standard_normal), None
        if with_add:
            add = self._array(self._rng.standard_normal)
        payload, kept, sent = self._send(x, add)
        if payload.tobytes() != self._send(x, add)[0].tobytes():
            self._refuse("compress", "must return the same payload for the same x, state and context, got another one")
        if not (self._compressor.traits.has_hooks or self._compressor.traits.corrects_momentum):
            self._check_conservation(x, add, kept, sent)
            if x.size:
                self._check_nan(x, add)

    def _array(self, make: Callable[[tuple[int, ...]], np.ndarray]) -> np.ndarray:
        """Return an array of members that are made by their shapes; gaps are zero, as they always are."""
        x = np.zeros(self._layout.extent, self._layout.dtype)
        for row, shape in enumerate(self._layout.shapes):
            self._layout.view(x, row)[...] = make(shape)
        return x

    def _send(self, x: np.ndarray, add: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compress a copy of x; return the payload, what stays, and what arrives."""
        compressor, x, state = self._compressor, x.copy(), State()
        self._context = context = sketched(compressor, x, state, self._context)
        returned = self._call("compress", x, state, context, **({} if add is None else {"add": add.copy()}))
        if not isinstance(returned, np.ndarray) or returned.ndim != 1 or not returned.flags.c_contiguous:
            text = f"{type(returned).__name__} {returned!r:.60}"
            self._refuse("compress", f"must return a contiguous numpy array of one dimension, got {text}")
        if compressor.traits.summable and returned.dtype.name not in SUMMED:
            text = f"must return numbers that are summed on the wire ({', '.join(SUMMED)}), got {returned.dtype}"
            self._refuse("compress", text)
        payload, kept, expected = returned.copy(), state.get(RESIDUAL, x).copy(), self._expected_bytes()
        if expected not in (None, payload.nbytes):
            self._refuse("compress", f"returned {payload.nbytes} bytes, payload_bytes says {expected}")
        summed = compressor.uncompressed(self._layout, context)
        if summed is not None and summed.host.all():  # x itself is sent, and no payload
            return payload, kept, np.zeros_like(x)
        if returned is x and compressor.traits.summable:
            self._call("decompress", returned, x, context)
            return payload, np.zeros_like(x), x
        sent, method = self._decompressed(payload), "decompress" if compressor.traits.summable else "decompress_all"
        self._call(method, returned if compressor.traits.summable else [returned], x, context)
        if np.may_share_memory(returned, x) and x.tobytes() != sent.tobytes():
            self._refuse("compress", f"must not return a part of x, which {method} overwrites before it has read it")
        return payload, kept, sent

    def _decompressed(self, payload: np.ndarray) -> np.ndarray:
        """Return what a payload stands for."""
        sent, more = np.zeros(self._layout.extent, self._layout.dtype), self._array(np.ones)
        for out in (sent, more):
            self._call("decompress", payload.copy(), out, self._context)
        gap = np.flatnonzero((sent != 0) & (self._array(np.ones) == 0))
        if gap.size:
            text = f"out[{gap[0]}] is {sent[gap[0]]:g}, context.layout has the members"
            self._refuse("decompress", f"must leave zeros in gaps between members, which the next step finds: {text}")
        if self._compressor.traits.summable:
            self._expect("decompress", "must overwrite out if summable", more, sent)
        else:
            self._expect("decompress", "must add to out if not summable", more, self._array(np.ones) + sent)
            both = self._array(np.ones)
            self._call("decompress_all", [payload, payload], both, self._context)
            self._expect("decompress_all", "must overwrite out by the sum of payloads", both, sent + sent)
        return sent

    def _expect(self, method: str, text: str, found: np.ndarray, expected: np.ndarray) -> None:
        wrong = differs(np.zeros_like(found), found, expected, self._ulps) & ~(np.isnan(found) & np.isnan(expected))
        if wrong.any():
            at = int(wrong.argmax())
            self._refuse(method, f"{text}: out[{at}] must be {expected[at]:g}, got {found[at]:g}")

    def _check_conservation(self, x: np.ndarray, add: np.ndarray | None, kept: np.ndarray, sent: np.ndarray) -> None:
        before, there = (x, "x") if add is None else (x + add, "x + add")
        wrong = differs(kept, sent, before, self._ulps)
        if not wrong.any():
            return
        if not differs(kept, np.zeros_like(x), before, self._ulps).any():
            self._refuse("compress", f"must take out of x what it sends, {there} is as it was")
        if add is not None and not differs(kept, sent, x, self._ulps).any():
            self._refuse("compress", "must add add to x, what stays and what arrives are x alone")
        at = int(wrong.argmax())
        numbers = f"entry {at} of {there} was {before[at]:g}, {kept[at]:g} stays and {sent[at]:g} arrives"
        self._refuse("compress", f"must leave in x what it does not send: {numbers}")

    def _check_nan(self, x: np.ndarray, add: np.ndarray | None) -> None:
        large, nan = x.copy(), x.copy()
        large[0], nan[0] = LARGE, np.nan
        with np.errstate(all="ignore"):
            left = self._send(large, add)[2][0] != 0 and np.isnan(self._send(nan, add)[1]).any()
        if left:
            text = f"must not leave a NaN in x, which stays there for ever; it sends {LARGE:g} in its place"
            self._refuse("compress", text)

    def _expected_bytes(self) -> int | None:
        try:
            nbytes = payload_nbytes(self._compressor, self._layout.extent, self._layout.dtype.itemsize, self._layout)
        except Exception as error:
            raise ValueError(str(error)) from error
        return None if self._compressor.traits.ragged else nbytes

    def _call(self, method: str, *arguments: Any, **given: Any) -> Any:
        try:
            return getattr(self._compressor, method)(*arguments, **given)
        except Exception as error:
            self._refuse(method, f"raised {type(error).__name__}: {error}", error)

    def _refuse(self, method: str, text: str, cause: Exception | None = None) -> NoReturn:
        place = f"(n = {self._layout.extent}, {self._layout.dtype})"
        raise ValueError(f"{self._compressor!r}.{method} {text} {place}") from cause
