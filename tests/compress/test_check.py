"""``distopt.compress.check`` finds what a step would be silent about, and has nothing to say of distopt's own."""

import numpy as np
import pytest

from distopt import compress
from distopt.comm.communicator import NUMBERS
from distopt.compress import DCT, Compressor, Dense, ErrorFeedback, Int4, OneBit, Threshold, TopK, Traits, check
from distopt.compress.checking import SUMMED
from distopt.lab.laws.modes import CAPTURED, EXACT, ROUNDED, TRIES

OTHERS = (
    TRIES["dgc"].compressor,
    TopK(0.1, per_tensor=True),
    TopK(0.1, reselect=False),
    TopK(bytes=1000),
    OneBit(scale="unit"),
    Int4(32, "stochastic", seed=1),
    DCT(Threshold(0.7)),
)


class Half(Compressor):
    """Sends every other entry; a part of it is wrong in each class below."""

    traits = Traits(summable=True)

    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * (n // 2)

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        payload = x[1::2].copy()
        x[1::2] = 0
        return payload

    def decompress(self, payload, out, context):
        out[...] = 0
        out[1::2] = payload


class Gathered(Half):
    traits = Traits()

    def decompress(self, payload, out, context):
        out[1::2] += payload


class Longer(Half):
    def compress(self, *arguments, **given):
        return np.append(super().compress(*arguments, **given), np.float32(0))


class Wider(Half):
    def compress(self, *arguments, **given):
        return super().compress(*arguments, **given).astype(np.float64)


class Unsure(Half):
    def payload_bytes(self, n, itemsize=4, layout=None):
        return None


class Fractional(Half):
    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * n / 2


class Adds(Half):
    def decompress(self, payload, out, context):
        out[1::2] += payload


class LeavesRest(Half):
    def decompress(self, payload, out, context):
        out[1::2] = payload


class Overwrites(Gathered):
    def decompress(self, payload, out, context):
        out[...] = 0
        out[1::2] = payload


class WrongSum(Gathered):
    def decompress_all(self, payloads, out, context):
        for payload in payloads:
            self.decompress(payload, out, context)


class Inexact(Half):
    def decompress(self, payload, out, context):
        super().decompress(payload * np.float32(1.01), out, context)


class Loses(Half):
    def compress(self, x, *arguments, **given):
        payload = super().compress(x, *arguments, **given)
        x[...] = 0
        return payload


class IgnoresAdd(Half):
    def compress(self, x, state, context, add=None):
        return super().compress(x, state, context)


class TakesNoAdd(Half):
    def compress(self, x, state, context):
        return super().compress(x, state, context)


class Keeps(Half):
    def compress(self, x, state, context):
        return super().compress(x.copy(), state, context)


class KeepsAll(Half):
    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        return x[1::2].copy()


class Signs(Compressor):
    """Sends the sign of each entry, one byte each; what a NaN leaves behind is NaN."""

    def payload_bytes(self, n, itemsize=4, layout=None):
        return n

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        payload = np.sign(x).astype(np.int8)
        x -= payload
        return payload

    def decompress(self, payload, out, context):
        out += payload.view(np.int8)


class SignsOfGaps(Signs):
    """Counts a gap as positive, which grows from step to step."""

    def payload_bytes(self, n, itemsize=4, layout=None):
        return 2 * n

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        payload = np.where(x >= 0, 1, -1).astype(np.float16)
        x -= np.where(np.isfinite(x), payload, x)
        return payload

    def decompress(self, payload, out, context):
        out += payload


class List(Half):
    def compress(self, *arguments, **given):
        return super().compress(*arguments, **given).tolist()


class Table(Half):
    def compress(self, *arguments, **given):
        return super().compress(*arguments, **given)[None]


class Strided(Half):
    def compress(self, x, *arguments, **given):
        return super().compress(x, *arguments, **given).repeat(2)[::2]


class Codes(Half):
    def payload_bytes(self, n, itemsize=4, layout=None):
        return n // 2

    def compress(self, x, *arguments, **given):
        return super().compress(x, *arguments, **given).astype(np.int8)


class FailsIfEmpty(Half):
    def compress(self, x, state, context, add=None):
        x -= 0 * x.max()
        return super().compress(x, state, context, add)


class Even(Half):
    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * n // 2


class OnlySingle(Half):
    def decompress(self, payload, out, context):
        super().decompress(payload.view(np.float32), out, context)


class Random(Half):
    def __init__(self):
        self._rng = np.random.default_rng(0)

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        payload = (x[1::2] * self._rng.integers(0, 2, x.size // 2)).astype(x.dtype)
        x[1::2] -= payload
        return payload


class PartOfX(Half):
    """A view that is zero when it is read; the entries that stay are those that were sent."""

    traits = Traits()

    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * n

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        return x.view(np.uint8)

    def decompress(self, payload, out, context):
        out += payload.view(out.dtype)


WRONG = [
    (Longer(), r"Longer\(\).compress returned 4 bytes, payload_bytes says 0 \(n = 0, float32\)"),
    (Wider(), r"Wider\(\).compress returned 24 bytes, payload_bytes says 12 \(n = 7, float32\)"),
    (Unsure(), r"Unsure\(\).payload_bytes\(0, 4\) must be an integer unless ragged, got None"),
    (Fractional(), r"Fractional\(\).payload_bytes\(0, 4\) must be an integer, got 0.0"),
    (Adds(), r"Adds\(\).decompress must overwrite out if summable: out\[0\] must be 0, got 1 \(n = 1, float32\)"),
    (LeavesRest(), r"LeavesRest\(\).decompress must overwrite out if summable: out\[0\] must be 0, got 1"),
    (Overwrites(), r"Overwrites\(\).decompress must add to out if not summable: out\[0\] must be 1, got 0"),
    (WrongSum(), r"WrongSum\(\).decompress_all must overwrite out by the sum of payloads: out\[0\] must be 0, got 1"),
    (
        Inexact(),
        r"Inexact\(\).compress must leave in x what it does not send: entry 1 of x was .*, 0 stays and .* arrive",
    ),
    (Loses(), r"Loses\(\).compress must leave in x what it does not send: entry 0 of x was .*, 0 stays and 0 arrives"),
    (IgnoresAdd(), r"IgnoresAdd\(\).compress must add add to x, what stays and what arrives are x alone"),
    (ErrorFeedback(IgnoresAdd()), r"IgnoresAdd\(\).compress must add add to x"),
    (ErrorFeedback(TakesNoAdd()), r"TakesNoAdd\(\).compress must take add=None, by which ErrorFeedback gives it"),
    (DCT(ErrorFeedback(TakesNoAdd())), r"TakesNoAdd\(\).compress must take add=None"),
    (Keeps(), r"Keeps\(\).compress must take out of x what it sends, x is as it was \(n = 7, float32\)"),
    (KeepsAll(), r"KeepsAll\(\).compress must take out of x what it sends, x is as it was"),
    (ErrorFeedback(KeepsAll()), r"KeepsAll\(\).compress must take out of x what it sends, x \+ add is as it was"),
    (Signs(), r"Signs\(\).compress must not leave a NaN in x, which stays there for ever; it sends 100 in its place"),
    (
        List(),
        r"List\(\).compress must return a contiguous numpy array of one dimension, got list \[\] \(n = 0, float32\)",
    ),
    (Table(), r"Table\(\).compress must return a contiguous numpy array of one dimension, got ndarray"),
    (Strided(), r"Strided\(\).compress must return a contiguous numpy array of one dimension, got ndarray"),
    (Codes(), r"Codes\(\).compress must return numbers that are summed on the wire \(float32, .*\), got int8"),
    (FailsIfEmpty(), r"FailsIfEmpty\(\).compress raised ValueError: zero-size array .* \(n = 0, float32\)"),
    (Even(), r"Even\(\).compress returned 0 bytes, payload_bytes says 2 \(n = 1, float32\)"),
    (OnlySingle(), r"OnlySingle\(\).decompress raised ValueError: could not broadcast .* \(n = 7, float64\)"),
    (Random(), r"Random\(\).compress must return the same payload for the same x, state and context, got another one"),
    (
        PartOfX(),
        r"PartOfX\(\).compress must not return a part of x, which decompress_all overwrites before it has read",
    ),
]


@pytest.mark.parametrize(("compressor", "text"), WRONG, ids=[repr(c) for c, _ in WRONG])
def test_a_mistake_is_named_with_method_numbers_and_size(compressor, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        check(compressor)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("compressor", [*EXACT, *ROUNDED, *CAPTURED, *OTHERS], ids=repr)
def test_every_compressor_of_distopt_passes(compressor):
    assert check(compressor) is None


def test_the_list_of_those_has_every_class():
    tried = " ".join(map(repr, [*EXACT, *ROUNDED, *CAPTURED, *OTHERS]))
    assert [kind.__name__ for kind in compress.ALL if f"{kind.__name__}(" not in tried] == []


@pytest.mark.parametrize(
    "compressor", [Half(), ErrorFeedback(Half()), TakesNoAdd(), Gathered(), DCT(Gathered())], ids=repr
)
def test_a_right_one_passes(compressor):
    check(compressor)


def test_one_that_is_made_for_float32_is_tried_with_that():
    class Refuses(OnlySingle):
        def payload_bytes(self, n, itemsize=4, layout=None):
            if itemsize != 4:
                raise ValueError(f"arrays must be float32, got {itemsize} bytes each")
            return super().payload_bytes(n)

    check(Refuses())


def test_a_bound_on_rounding_may_be_given():
    class Rounds(Half):
        def decompress(self, payload, out, context):
            super().decompress(payload * (1 + 50 * np.finfo(payload.dtype).eps), out, context)

    with pytest.raises(ValueError, match="must leave in x what it does not send"):
        check(Rounds())
    check(Rounds(), ulps=200)


def test_the_dtypes_of_sums_are_those_of_communicators():
    assert sorted(SUMMED) == sorted(dtype.name for dtype in NUMBERS)


def test_what_is_no_compressor_is_refused():
    for wrong in (None, Dense, "topk"):
        with pytest.raises(TypeError, match=r"compressor must derive from distopt.compress.Compressor, got"):
            check(wrong)
