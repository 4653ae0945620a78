"""Deep Gradient Compression: its recurrences, what is dense beside it, its warm-up, and what it refuses.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import tiers
from distopt import DistOpt, Parameter, device, run_ranks
from distopt.comm import Metered
from distopt.compress import (
    BucketContext,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    ExchangeContext,
    Packed,
    Threshold,
    TopK,
)
from distopt.compress import top_k as sparse
from distopt.compress.warmup import BELOW_ONE, Stages, geometric
from distopt.kernels.layout import CHUNK, BucketLayout
from distopt.optim import LARS, SGD, Adam, BatchGradients, ExponentialDecay, LarsWrapper
from laws import texts_of

REALS = ["float32", "float64"]
MOXING = (0.75, 0.9375, 0.984375, 0.996, 0.999)


def largest(v, k):
    """Positions of the k largest in magnitude, ties to the lowest index."""
    return np.argsort(-abs(v), kind="stable")[:k]


class Reference:
    """One tensor on N ranks in float64, by the equations of docs/guides/dgc.md: gradients in, the applied mean out."""

    def __init__(self, ranks, n, momentum=0.9, nesterov=False, masking=True, clip=None, decay=0.0, in_gradient=False):
        self.u, self.v, self.p = np.zeros((ranks, n)), np.zeros((ranks, n)), np.zeros(n)
        self.momentum, self.nesterov, self.masking, self.clip = momentum, nesterov, masking, clip
        self.decay, self.in_gradient = decay, in_gradient

    def correct(self, u, g):
        """(the next u, what v grows by)."""
        if self.nesterov:
            return self.momentum * (u + g), self.momentum * (u + g) + g
        return self.momentum * u + g, self.momentum * u + g

    def step(self, gradients, w, k):
        """``k`` is None for a tensor that is summed as it is."""
        total = np.zeros(w.size)
        for r, g in enumerate(gradients):
            if self.clip is not None:
                g = g * min(1, self.clip / np.sqrt(len(gradients)) / (np.linalg.norm(g) + 1e-6))
            if self.in_gradient:
                g = g + self.decay * w
            self.u[r], growth = self.correct(self.u[r], g)
            self.v[r] += growth
            sent = np.arange(w.size) if k is None else largest(self.v[r], k)
            total[sent] += self.v[r][sent]
            self.v[r][sent] = 0
            if self.masking and k is not None:
                self.u[r][sent] = 0
        self.p, growth = self.correct(self.p, self.decay * w) if not self.in_gradient else (self.p, 0)
        return total / len(gradients) + growth


def in_float64(ranks, steps, density, shapes=laws.SHAPES, exclude_1d=True, lr=0.05, **options):
    """Parameters by the reference."""
    params = laws.parameters(shapes)
    values = [p.data.astype(np.float64).ravel() for p in params]
    tensors = [Reference(ranks, w.size, **options) for w in values]
    for step in range(steps):
        grads = [laws.gradients(params, step, r) for r in range(ranks)]
        for i, (p, tensor) in enumerate(zip(params, tensors, strict=True)):
            k = TopK(density).count(p.data.size)
            k = None if k >= p.data.size or (exclude_1d and p.data.ndim <= 1) else k
            mine = [grads[r][i].astype(np.float64).ravel() for r in range(ranks)]
            values[i] = values[i] - lr * tensor.step(mine, values[i], k)
    return [w.reshape(p.data.shape) for w, p in zip(values, params, strict=True)]


def trained(ranks, steps, compressor, make=lambda: SGD(0.05), shapes=laws.SHAPES, dtype="float32", **options):
    """(parameters, state) of rank 0."""

    def main(comm):
        params = laws.parameters(shapes, dtype, comm.rank)
        opt = DistOpt(make(), comm, **{"threshold": 60} | options)
        for step in range(steps):
            opt.step(laws.pairs(comm, params, step), compressor)
        laws.same_on_all_ranks(comm, laws.digest(params))
        return [p.data for p in params], opt.state_dict()

    return run_ranks(ranks, main)[0]


# ----------------------------------------------------------------------------------------------- the recurrences


@pytest.mark.sampled(7)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"nesterov": True, "momentum": 0.8}, {"nesterov": True, "momentum": 0.8}),
        ({"factor_masking": False}, {"masking": False}),
        ({"clip_norm": 2.0}, {"clip": 2.0}),
        ({"weight_decay": 0.02}, {"decay": 0.02}),
        ({"weight_decay": 0.02, "nesterov": True}, {"decay": 0.02, "nesterov": True}),
        (
            {"weight_decay": 0.02, "decay_in_gradient": True, "clip_norm": 1.0},
            {"decay": 0.02, "in_gradient": True, "clip": 1.0},
        ),
        ({"exclude_1d": False}, {"exclude_1d": False}),
        ({"momentum": 0.0}, {"momentum": 0.0}),
    ],
    ids=str,
)
def test_dgc_equals_the_papers_recurrences_in_float64(ranks, options, reference):
    """Ten steps against float64 numpy, tensors of any shape in buckets of several."""
    weights, _ = trained(ranks, 10, DeepGradientCompression(TopK(0.1), **options))
    for w, expected in zip(weights, in_float64(ranks, 10, 0.1, **reference), strict=True):
        np.testing.assert_allclose(w, expected, rtol=0, atol=5e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("in_gradient", [False, True])
@pytest.mark.parametrize("ranks", tiers.one_by_default(2, of=(1, 2, 4)))
def test_density_1_is_dense_momentum_sgd(ranks, nesterov, in_gradient):
    """Over 100 steps, weight decay included (Paddle lost 2 % where it came after the exchange)."""
    options = {"weight_decay": 0.01, "nesterov": nesterov}
    compressor = DeepGradientCompression(TopK(1.0), decay_in_gradient=in_gradient, **options)
    weights, _ = trained(ranks, 100, compressor)
    dense, _ = trained(ranks, 100, Dense(), lambda: SGD(0.05, momentum=0.9, **options))
    for w, expected in zip(weights, dense, strict=True):
        np.testing.assert_allclose(w, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda opt: opt, lambda opt: BatchGradients(opt, 1)])
def test_multipliers_of_the_optimizer_hold_for_the_decay(wrap):
    """From the first step on, whatever is around it."""
    compressor = DeepGradientCompression(TopK(1.0), weight_decay=0.1)
    mult = {"p1": 0.0, "p5": 3.0}
    weights, _ = trained(2, 5, compressor, lambda: wrap(SGD(0.05, wd_mult=mult)))
    dense, _ = trained(2, 5, Dense(), lambda: SGD(0.05, momentum=0.9, weight_decay=0.1, wd_mult=mult))
    for w, expected in zip(weights, dense, strict=True):
        np.testing.assert_allclose(w, expected, rtol=0, atol=1e-5)


def test_multipliers_that_change_hold_at_once():
    """Not only for the step after the next."""

    def main(comm):
        w, sgd = Parameter("w", np.ones((4, 5), np.float32)), SGD(1.0)
        opt = DistOpt(sgd, comm)
        compressor = DeepGradientCompression(TopK(1.0), 0.0, weight_decay=0.5)
        for sgd.wd_mult in ({"w": 1.0}, {"w": 0.0}, {"w": 0.5}):
            opt.step([(w, np.zeros_like(w.data))], compressor)
        np.testing.assert_array_equal(w.data, 0.5 * 0.75)

    run_ranks(2, main)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda: SGD(0.05), lambda: SGD(0.05, multi_precision=True), None],
    ids=["without masters", "with masters", "a custom one"],
)
def test_decay_of_parameters_of_16_bits(stored, nesterov, make):
    """Their values are widened, whether the optimizer has masters, or is a custom one without."""

    class ForeignOptimizer:
        def apply(self, name, value, grad):
            value -= (0.05 * grad).astype(value.dtype)

    compressor = DeepGradientCompression(TopK(0.1), weight_decay=0.1, nesterov=nesterov)
    weights, _ = trained(2, 4, compressor, make or ForeignOptimizer, dtype=stored)
    expected = in_float64(2, 4, 0.1, decay=0.1, nesterov=nesterov)
    for w, e in zip(weights, expected, strict=True):
        np.testing.assert_allclose(w.astype(np.float64), e, rtol=0, atol=0.02 if stored == "float16" else 0.2)


@given(
    n=st.integers(2, 60),
    m=st.integers(1, 60),
    density=st.floats(0.01, 1),
    momentum=st.floats(0, 1),
    nesterov=st.booleans(),
    masking=st.booleans(),
    dtype=st.sampled_from(REALS),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_sent_and_what_stays_are_what_there_was(n, m, density, momentum, nesterov, masking, dtype, seed):
    """Law 1 for v: v + its growth == what is sent + what stays, to the bit; u is 0 where v was sent."""
    compressor = DeepGradientCompression(TopK(density), momentum, nesterov, masking, exclude_1d=False)
    rng, real = np.random.default_rng(seed), np.dtype(dtype).type
    members = BucketLayout(["a", "b"], [(n, 1), (m,)], [0, 64], dtype)
    context = ExchangeContext(bucket=BucketContext(members))
    x, u, v = (rng.standard_normal(members.extent).astype(dtype) for _ in range(3))
    x[n:64] = u[n:64] = v[n:64] = 0
    g, u0, v0, state = x.copy(), u.copy(), v.copy(), {"velocity": u, "residual": v}
    u1 = real(momentum) * (u0 + g) if nesterov else real(momentum) * u0 + g
    growth = u1 + g if nesterov else u1
    payload = compressor.compress(x, state, context)
    dense = compressor.uncompressed(members, context).host
    out = np.zeros_like(x)
    if not dense.all():
        compressor.decompress_all([payload], out, context)
    for row, left_whole in enumerate(dense):
        before, kept, sent = (members.view(a, row).ravel() for a in (v0 + growth, v, out))
        if left_whole:
            np.testing.assert_array_equal(members.view(x, row).ravel(), before)
            assert not kept.any()
            np.testing.assert_array_equal(members.view(u, row), members.view(u1, row))
            continue
        np.testing.assert_array_equal(sent + kept, before)
        chosen = np.zeros(before.size, bool)
        chosen[largest(before, TopK(density).count(before.size))] = True
        np.testing.assert_array_equal(sent[~chosen], 0)
        expected = members.view(u1, row).ravel().copy()
        expected[chosen] = 0 if masking else expected[chosen]
        np.testing.assert_array_equal(members.view(u, row).ravel(), expected)
    assert payload.nbytes + x.itemsize * members.records["size"][dense == 1].sum() == compressor.payload_bytes(
        x.size, x.itemsize, members
    )


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_applied_updates_and_residuals_add_up_to_all_velocities(ranks, dtype):
    """Law 2: N times what was applied, and all residuals, are the sum of all velocities (without masking)."""
    compressor = DeepGradientCompression(TopK(0.1), factor_masking=False)

    def main(comm):
        params = laws.parameters(dtype=dtype)
        before = [p.data.astype(np.float64) for p in params]
        opt = DistOpt(SGD(1.0), comm, threshold=60)
        velocity, total = ([np.zeros(b.shape) for b in before] for _ in range(2))
        for step in range(6):
            for i, g in enumerate(laws.gradients(params, step, comm.rank)):
                velocity[i] = 0.9 * velocity[i] + g
                total[i] = total[i] + velocity[i]
            opt.step(laws.pairs(comm, params, step), compressor)
        kept = opt.state_dict()["states"]["residual"]
        for p, b, t in zip(params, before, total, strict=True):
            residual, t = (laws.summed(comm, np.asarray(a, np.float64)) for a in (kept[p.name], t))
            tolerance = 100 * comm.size * laws.TOLERANCE[dtype]
            np.testing.assert_allclose(comm.size * (b - p.data) + residual, t, rtol=0, atol=tolerance)

    run_ranks(ranks, main)


def test_a_tensor_that_becomes_whole_takes_its_residual_along():
    """Such as 1-D tensors that were compressed before, or all of them in a dense epoch."""

    def main(comm):
        params, opt = laws.parameters(rank=comm.rank), DistOpt(SGD(0.05), comm, threshold=60)
        for step, compressor in enumerate(
            [
                DeepGradientCompression(TopK(0.1), exclude_1d=False),
                ErrorFeedback(TopK(0.1)),
                DeepGradientCompression(TopK(0.1)),
            ]
        ):
            opt.step(laws.pairs(comm, params, step), compressor)
        kept = opt.state_dict()["states"]["residual"]
        assert {p.name for p in params if kept[p.name].any()} == {p.name for p in params if p.data.ndim > 1}
        opt.step(laws.pairs(comm, params, 3), DeepGradientCompression(TopK(1.0)))
        assert not any(r.any() for r in opt.state_dict()["states"]["residual"].values())

    run_ranks(2, main)


# ----------------------------------------------------------------------------------------------- the wire


def test_whole_members_are_summed_in_the_same_step():
    """Payload by meter: a value and an index for each entry, and a float for each element of a 1-D tensor."""
    shapes = [(40, 50), (100,), (30, 100), (7,), ()]

    def main(comm):
        metered = Metered(comm)
        params = laws.parameters(shapes)
        opt = DistOpt(SGD(0.05), metered, broadcast=False, threshold=10**6)
        opt.step(laws.pairs(comm, params, 0), DeepGradientCompression(TopK(0.01)))
        assert opt.plan.payload == (8 * (20 + 30) + 4 * 108,)
        report = metered.report()
        assert {verb: found["payload"] for verb, found in report.items()} == {"all_gather": 400, "all_reduce": 432}
        metered.reset()
        opt.step(laws.pairs(comm, params, 1), DeepGradientCompression(TopK(0.01), exclude_1d=False, min_numel=100))
        assert opt.plan.payload == (8 * (20 + 30 + 1) + 4 * 8,)
        metered.reset()
        opt.step(laws.pairs(comm, params, 2), DeepGradientCompression(TopK(0.01), exclude_1d=False))
        assert set(metered.report()) == {"all_gather", "all_reduce"}  # a scalar is sent whole
        metered.reset()
        opt.step(laws.pairs(comm, params, 3), DeepGradientCompression(TopK(1.0)))
        assert set(metered.report()) == {"all_reduce"}
        return True

    assert all(run_ranks(2, main))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_never_more_bytes_than_dense(ranks):
    """``break_even``; the results do not depend on it."""

    def main(comm):
        found = []
        for density in (0.01, 0.3, 0.9):
            for break_even in (True, False):
                metered = Metered(comm)
                params = laws.parameters([(40, 50), (100,)])
                opt = DistOpt(SGD(0.05), metered, broadcast=False, threshold=10**6)
                compressor = DeepGradientCompression(TopK(density), weight_decay=0.1)
                for step in range(3):
                    opt.step(laws.pairs(comm, params, step), compressor, break_even, exchange="gather")
                wire = sum(map(int, comm.control.gather(str(metered.ledger.total()["sent"]))))
                found.append((wire, [p.data for p in params]))
            (least, one), (most, other) = found[-2:]
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
            dense = 3 * 2 * (comm.size - 1) * 4 * 2100
            assert least <= min(most, dense)
            if density == 0.9:
                assert least == dense < most
        return True

    assert all(run_ranks(ranks, main))


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8),
    ranks=st.integers(1, 4),
    threshold=st.integers(0, 100),
    density=st.floats(0.001, 1),
    options=st.fixed_dictionaries(
        {
            "nesterov": st.booleans(),
            "exclude_1d": st.booleans(),
            "min_numel": st.integers(0, 50),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "clip_norm": st.sampled_from([None, 0.5]),
        }
    ),
)
def test_any_shapes_have_the_same_bits_for_any_bucketing(shapes, ranks, threshold, density, options):
    """Law 5 and law 6: the same bits on every rank, and for any bucketing in deterministic mode."""
    compressor = DeepGradientCompression(TopK(density), **options)
    alone, _ = trained(ranks, 3, compressor, shapes=shapes, threshold=threshold, deterministic=True)
    other, _ = trained(ranks, 3, compressor, shapes=shapes, threshold=10**6, deterministic=True)
    for a, b in zip(alone, other, strict=True):
        np.testing.assert_array_equal(a, b)


# ----------------------------------------------------------------------------------------------- the warm-up


def test_warm_up_stages_are_those_of_moxing():
    """MoXing's strategy: a stage per epoch, the last from then on."""
    stages = Stages(MOXING, 3)
    assert [stages(k) for k in range(18)] == [s for s in MOXING for _ in range(3)] + [0.999] * 3
    shares = [geometric(0.001, 4, 10)(10 * epoch) for epoch in range(6)]
    np.testing.assert_allclose(1 - np.array(shares), [10**-0.6, 10**-1.2, 10**-1.8, 10**-2.4, 0.001, 0.001])


@pytest.mark.parametrize(
    ("warmup", "densities"),
    [
        (np.int64(2), [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]),
        (np.array(MOXING), [0.25, 0.25, 0.0625]),
        (MOXING, [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.004, 0.004, 0.001, 0.001, 0.001]),
        (2, [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]),
        (lambda k: 0.0 if k < 2 else 0.5, [1, 1, 0.5]),
    ],
)
def test_density_falls_while_it_trains(warmup, densities):
    """By payload; what each rank has learned in one stage goes on in the next."""
    compressor = DeepGradientCompression(TopK(0.001), warmup=warmup, steps_per_epoch=2)

    def main(comm):
        params = [Parameter("w", np.zeros((100, 200), np.float32))]
        opt = DistOpt(SGD(0.1), comm)
        for density in densities:
            opt.step(laws.pairs(comm, params, opt.step_counter), compressor, break_even=False)
            k = TopK(density).count(20000)
            assert opt.plan.payload == ((4 if density == 1 else 8) * k,)
        return True

    assert all(run_ranks(2, main))


def test_the_compressor_of_a_stage_is_made_once():
    compressor = DeepGradientCompression(TopK(0.001), 0.5, True, False, 3.0, 0.1, [0.5, 0.999], 5, False, 7, True)
    first = compressor.at_step(0)
    assert compressor.at_step(4) is first
    last = compressor.at_step(5)
    assert repr(last) == (
        "DeepGradientCompression(TopK(0.001, per_tensor=True), momentum=0.5, nesterov=True, factor_masking=False, "
        "weight_decay=0.1, exclude_1d=False, min_numel=7, decay_in_gradient=True, clip_norm=3.0)"
    )
    assert compressor.at_step(1000) is last
    assert last.at_step(0) is last


# ----------------------------------------------------------------------------------------------- what outlives a job


@pytest.mark.parametrize(("saved", "size"), [(3, 2), (2, 4), (4, 1), (1, 3)])
def test_another_number_of_ranks_resumes_with_the_same_mean_states(saved, size, tmp_path):
    """The means of v and u stay, and the decay's momentum, which all ranks have alike, is what it was."""
    compressor = DeepGradientCompression(TopK(0.1), weight_decay=0.1)

    def save(comm):
        params, opt = laws.parameters(), DistOpt(SGD(0.1), comm, threshold=60)
        for step in range(4):
            opt.step(laws.pairs(comm, params, step), compressor)
        opt.save(tmp_path, params)
        return opt.state_dict()["states"]

    def load(comm):
        params, opt = laws.parameters(), DistOpt(SGD(0.1), comm, threshold=60)
        opt.load(tmp_path, params)
        states = opt.state_dict()["states"]
        for step in range(4, 8):
            opt.step(laws.pairs(comm, params, step), compressor)
        laws.same_on_all_ranks(comm, laws.digest(params))
        return states

    before, after = run_ranks(saved, save), run_ranks(size, load)
    for name in before[0]["residual"]:
        for state in ("residual", "velocity"):
            zeros = np.zeros(before[0][state][name].shape)  # of a rank that inherits from nobody
            means = [np.mean([s.get(state, {}).get(name, zeros) for s in ranks], 0) for ranks in (before, after)]
            np.testing.assert_allclose(*means, rtol=0, atol=1e-6)
        for mine in after:
            np.testing.assert_array_equal(mine["decay"][name], before[0]["decay"][name])


# ----------------------------------------------------------------------------------------------- hard input


@pytest.mark.parametrize("values", [0.0, 3.0, -0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_equal_entries_are_sent_in_index_order_and_non_finite_ones_refused(values, density):
    """Zeros send zeros, ties go to the lowest index; what is not finite is refused before it can enter a state."""

    def main(comm):
        w = Parameter("w", np.zeros((10, 50), np.float32))
        opt = DistOpt(SGD(1.0), comm)
        compressor = DeepGradientCompression(TopK(density))
        opt.step([(w, np.zeros_like(w.data))], compressor)
        before = opt.state_dict()
        grad = np.full_like(w.data, values)
        if not np.isfinite(values):
            with pytest.raises(FloatingPointError, match=r"w \(500 of 500 entries\)"):
                opt.step([(w, grad)], compressor)
            laws.assert_equal_states(opt.state_dict(), before)
            assert not w.data.any()
            return
        opt.step([(w, grad)], compressor)
        k = 5 if density < 1 else 500
        np.testing.assert_array_equal(w.data.ravel(), np.where(np.arange(500) < k, -values, 0))

    run_ranks(2, main)


def test_one_nan_is_sent_with_nonfinite_propagate():
    """A NaN counts as larger than all numbers."""

    def main(comm):
        w = Parameter("w", np.zeros((10, 50), np.float32))
        opt = DistOpt(SGD(1.0), comm, nonfinite="propagate")
        grad = np.ones_like(w.data)
        grad[7, 3] = np.nan if comm.rank else 1
        opt.step([(w, grad)], DeepGradientCompression(TopK(0.01)))
        assert np.flatnonzero(np.isnan(w.data)).tolist() == [353]

    run_ranks(2, main)


@pytest.mark.parametrize("exclude_1d", [True, False])
def test_tensors_of_one_element_or_none_are_sent_whole(exclude_1d):
    """One element has nothing to choose from: it is summed as it is, and keeps its momentum."""
    shapes = [(0,), (1,), (), (0, 5), (1, 1), (3, 0, 2)]
    weights, state = trained(2, 5, DeepGradientCompression(TopK(0.001), exclude_1d=exclude_1d), shapes=shapes)
    dense, _ = trained(2, 5, Dense(), lambda: SGD(0.05, momentum=0.9), shapes=shapes)
    for a, b in zip(weights, dense, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert not any(r.any() for r in state["states"]["residual"].values())


def test_tensors_of_many_chunks_equal_the_float64_reference():
    """Against numpy's sort, with sizes on both sides of a chunk."""
    shapes = [(2, CHUNK), (CHUNK - 1, 1), (3, CHUNK + 1), (5,)]
    weights, _ = trained(2, 3, DeepGradientCompression(TopK(0.01)), shapes=shapes, threshold=10**6)
    for w, expected in zip(weights, in_float64(2, 3, 0.01, shapes), strict=True):
        np.testing.assert_allclose(w, expected, rtol=0, atol=5e-6)


# ----------------------------------------------------------------------------------------------- what it refuses


class Ragged(TopK):
    """What would be gathered as if all ranks sent as much."""

    ragged = True

    def __init__(self):
        super().__init__(0.1)

    def __repr__(self):
        return "Ragged()"


class Lacking:
    """A density alone, of which nothing can be selected in the middle of a step."""

    density = 0.1

    def with_density(self, density):
        return self


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DeepGradientCompression(Dense()), TypeError, r"selector must be one with a density.*got Dense\(\)"),
        (lambda: DeepGradientCompression(Threshold(0.1)), TypeError, "selector must be one with a density"),
        (lambda: DeepGradientCompression(ErrorFeedback(TopK(0.1))), TypeError, "selector must be one with a density"),
        (lambda: DeepGradientCompression(Packed(Threshold(0.1))), TypeError, "selector must be one with a density"),
        (
            lambda: Packed(DeepGradientCompression(TopK(0.1))),
            ValueError,
            r"without a memory.*; write DeepGradientCompression\(Packed\(TopK\(0.1, per_tensor=True\)\)\)",
        ),
        (lambda: DeepGradientCompression(0.001), TypeError, "selector must be one with a density.*got 0.001"),
        (lambda: DeepGradientCompression(Ragged()), TypeError, "selector must be one with a density.*got Ragged"),
        (lambda: DeepGradientCompression(Lacking()), TypeError, "selector must be one with a density.*got <.*Lacking"),
        (lambda: DeepGradientCompression(TopK(0.1), momentum=1.1), ValueError, r"momentum must be .* \[0.0, 1.0\]"),
        (lambda: DeepGradientCompression(TopK(0.1), momentum="0.9"), TypeError, "momentum must be a number"),
        (lambda: DeepGradientCompression(TopK(0.1), nesterov="nesterov"), TypeError, "nesterov must be True or False"),
        (lambda: DeepGradientCompression(TopK(0.1), factor_masking=1), TypeError, "factor_masking must be True or"),
        (lambda: DeepGradientCompression(TopK(0.1), clip_norm=0), ValueError, "clip_norm must be above 0, got 0"),
        (lambda: DeepGradientCompression(TopK(0.1), clip_norm=np.nan), ValueError, "clip_norm must be above 0"),
        (lambda: DeepGradientCompression(TopK(0.1), weight_decay=-1), ValueError, "weight_decay must be finite and in"),
        (lambda: DeepGradientCompression(TopK(0.1), min_numel=-1), ValueError, "min_numel must be at least 0, got -1"),
        (
            lambda: DeepGradientCompression(TopK(0.001), warmup=[0.75, 0.9], steps_per_epoch=3),
            ValueError,
            r"the last sparsity of warmup must be 1 - density = 0\.999, got 0\.9",
        ),
        (
            lambda: DeepGradientCompression(TopK(0.1), warmup=[0.9]),
            ValueError,
            "steps_per_epoch must be an integer with this warmup",
        ),
        (
            lambda: DeepGradientCompression(TopK(0.1), warmup=[], steps_per_epoch=3),
            ValueError,
            "warmup must be a sparsity per epoch",
        ),
        (
            lambda: DeepGradientCompression(TopK(0.1), warmup=[1.0, 0.9], steps_per_epoch=3),
            ValueError,
            "warmup must be finite and in",
        ),
        (
            lambda: DeepGradientCompression(TopK(0.1), warmup="0.75,0.9", steps_per_epoch=3),
            TypeError,
            "warmup must be a number",
        ),
        (
            lambda: DeepGradientCompression(TopK(0.1), warmup=[0.9], steps_per_epoch=0),
            ValueError,
            "steps_per_epoch must be at least 1, got 0",
        ),
        (lambda: DeepGradientCompression(TopK(0.1), warmup=0, steps_per_epoch=1), ValueError, "warmup must be at lea"),
        (lambda: DeepGradientCompression(TopK(0.1), warmup=0.9, steps_per_epoch=1), TypeError, "warmup must be an int"),
        (
            lambda: ErrorFeedback(DeepGradientCompression(TopK(0.1))),
            ValueError,
            "does not feed its error back already, got ",
        ),
    ],
)
def test_impossible_arguments_of_dgc_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


class Singas:
    """A foreign optimizer with a number for its momentum."""

    momentum = 0.9

    def apply(self, name, value, grad):
        value -= grad


@pytest.mark.parametrize(
    ("make", "whose"),
    [
        (lambda: SGD(0.1, momentum=0.9), "SGD's momentum=0.9"),
        (lambda: SGD(0.1, momentum=ExponentialDecay(0.5, 2, 0.5)), "SGD's momentum=0.5"),
        (lambda: Adam(0.1), "Adam's beta_1=0.9"),
        (lambda: LARS(0.1, momentum=0.8), "LARS's momentum=0.8"),
        (lambda: LarsWrapper(SGD(0.1, momentum=0.9)), "SGD's momentum=0.9"),
        (lambda: BatchGradients(LarsWrapper(SGD(0.1, 0.7)), 2), "SGD's momentum=0.7"),
        (Singas, "Singas's momentum=0.9"),
    ],
)
def test_an_optimizer_with_momentum_is_refused(make, whose):
    """Before data moves, on every rank, with what to do; and the DistOpt still works."""

    def main(comm):
        params, opt = laws.parameters(), DistOpt(make(), comm)
        before = laws.digest(params)
        with pytest.raises(ValueError, match=f"{whose}; give the momentum to the compressor"):
            opt.step(laws.pairs(comm, params, 0), DeepGradientCompression(TopK(0.1)))
        assert laws.digest(params) == before
        opt(laws.pairs(comm, params, 0))
        return True

    assert all(run_ranks(2, main))


@pytest.mark.parametrize("make", [lambda: SGD(0.1), lambda: LARS(0.1, momentum=0.0), lambda: Adam(0.1, beta_1=0.0)])
def test_an_optimizer_without_momentum_is_accepted(make):
    trained(2, 2, DeepGradientCompression(TopK(0.1)), make)


def test_ranks_that_break_even_otherwise_all_raise():
    """What one would gather the other would all-reduce; before momentum or residuals have changed."""

    def main(comm):
        params, opt = laws.parameters(), DistOpt(SGD(0.1), comm)
        compressor = DeepGradientCompression(TopK(0.9))
        opt.step(laws.pairs(comm, params, 0), compressor)
        before = opt.state_dict()
        with pytest.raises(ValueError, match=r"rank 1 has a step with Deep.*, break_even=False$"):
            opt.step(laws.pairs(comm, params, 1), compressor, break_even=comm.rank == 0)
        laws.assert_equal_states(opt.state_dict(), before)
        return True

    assert all(run_ranks(2, main))


def test_ranks_with_other_options_all_raise():
    """Density, momentum, warm-up: the same text on every rank."""

    def refused(mine, theirs):
        def main(comm):
            params, opt = laws.parameters(), DistOpt(SGD(0.1), comm)
            opt.step(laws.pairs(comm, params, 0), theirs if comm.rank else mine)

        return texts_of(2, main)

    dgc = DeepGradientCompression
    for mine, theirs, named in [
        (dgc(TopK(0.1)), dgc(TopK(0.2)), "TopK(0.2, per_tensor=True)"),
        (dgc(TopK(0.1)), dgc(TopK(0.1), 0.8), "momentum=0.8"),
        (dgc(TopK(0.1)), ErrorFeedback(TopK(0.1)), "ErrorFeedback"),
        (
            dgc(TopK(0.1), warmup=[0.5, 0.9], steps_per_epoch=1),
            dgc(TopK(0.1), warmup=[0.4, 0.9], steps_per_epoch=1),
            "TopK(0.6",
        ),
    ]:
        assert named in refused(mine, theirs)


def test_a_window_whose_batches_are_exchanged_is_refused():
    def main(comm):
        params, opt = laws.parameters(), DistOpt(SGD(0.1), comm, num_batches=2, sync_on_apply=False)
        opt.step(laws.pairs(comm, params, 0), DeepGradientCompression(TopK(0.1)))

    text = "rank 0: sync_on_apply must be True, as DeepGradientCompression has one momentum per update, got False"
    assert texts_of(2, main) == text


@pytest.mark.parametrize("in_gradient", [False, True])
def test_an_accumulation_window_is_one_update(in_gradient):
    """Momentum acts once for two batches, and so does weight decay."""
    compressor = DeepGradientCompression(TopK(1.0), weight_decay=0.1, decay_in_gradient=in_gradient)
    weights, _ = trained(2, 8, compressor, num_batches=2)
    dense, _ = trained(2, 8, Dense(), lambda: SGD(0.05, momentum=0.9, weight_decay=0.1), num_batches=2)
    for a, b in zip(weights, dense, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_the_mean_of_a_window_is_clipped():
    """Two batches with the same gradients are as one."""
    compressor = DeepGradientCompression(TopK(0.1), clip_norm=0.5)

    def main(comm, num_batches):
        params, opt = laws.parameters(), DistOpt(SGD(0.05), comm, threshold=60, num_batches=num_batches)
        for call in range(3 * num_batches):
            opt.step(laws.pairs(comm, params, call // num_batches), compressor)
        return [p.data for p in params]

    for rank in zip(*(run_ranks(2, lambda comm, n=n: main(comm, n)) for n in (1, 2)), strict=True):
        for a, b in zip(*rank, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("in_gradient", [False, True])
def test_weight_decay_is_of_those_that_have_batches(in_gradient):
    """A rank that has joined has no loss, of which the decay would be a part."""
    compressor = DeepGradientCompression(TopK(1.0), 0.0, weight_decay=0.25, decay_in_gradient=in_gradient)

    def main(comm):
        w = Parameter("w", np.ones((4, 5), np.float32))
        opt = DistOpt(SGD(1.0), comm)
        for _ in range(1 if comm.rank else 3):
            opt.step([(w, np.zeros_like(w.data))], compressor)
        opt.join()
        np.testing.assert_array_equal(w.data, 0.75**3)

    run_ranks(3, main)


def test_a_bucket_beyond_what_an_index_can_tell_apart_is_refused(monkeypatch):
    """Before data moves, although another bucket would come first."""
    monkeypatch.setattr(sparse, "LIMIT", 1000)

    def main(comm):
        params = [Parameter("a", np.ones((10, 10), np.float32)), Parameter("b", np.ones((25, 40), np.float32))]
        opt = DistOpt(SGD(0.1), comm, threshold=50)
        opt.step([(p, p.data.copy()) for p in params], DeepGradientCompression(TopK(0.1)))

    assert (
        texts_of(2, main)
        == "rank 0: a bucket must be of less than 2^31 elements, for int32 indices, got 1000; lower the threshold"
    )


@pytest.mark.parametrize("sparsity", [1.0, 1.5])
def test_a_warm_up_out_of_range_is_refused_when_it_comes(sparsity):
    """A sparsity of 1 sends nothing."""

    def main(comm):
        params, opt = laws.parameters(), DistOpt(SGD(0.1), comm)
        compressor = DeepGradientCompression(TopK(0.1), warmup=lambda k: sparsity if k else 0.5)
        opt.step(laws.pairs(comm, params, 0), compressor)
        opt.step(laws.pairs(comm, params, 1), compressor)

    assert texts_of(2, main) == f"rank 0: warmup at update 1 must be finite and in [0.0, {BELOW_ONE}], got {sparsity}"


def test_a_density_that_always_changes_takes_no_more_memory():
    """What was made for earlier ones goes."""

    def main(comm):
        params, opt = laws.parameters(), DistOpt(SGD(0.1), comm)
        compressor = DeepGradientCompression(TopK(0.1), warmup=lambda k: 0.5 + 0.4 * 0.9**k)
        found = []
        for step in range(200):
            opt.step(laws.pairs(comm, params, step), compressor)
            if step in (99, 199):
                gc.collect()
                found.append(sum(isinstance(o, device.DeviceMirror) for o in gc.get_objects()))
        assert found[0] == found[1]
        return True

    assert run_ranks(1, main) == [True]


def test_decay_needs_parameters():
    """Which a call of one's own does not give."""
    x = np.zeros(5, np.float32)
    for in_gradient in (True, False):
        compressor = DeepGradientCompression(TopK(0.1), weight_decay=0.1, decay_in_gradient=in_gradient)
        with pytest.raises(ValueError, match="weight_decay must be 0 outside of a step"):
            (compressor.compress if in_gradient else compressor.begin)(x, {}, ExchangeContext())
