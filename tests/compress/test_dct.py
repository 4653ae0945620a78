"""Frequencies in the place of entries: the transform, its laws, and the states of coefficients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.compress import (
    DCT,
    BucketContext,
    Chunks,
    DeepGradientCompression,
    ErrorFeedback,
    ExchangeContext,
    Packed,
    TopK,
)
from distopt.compress.dct import bases, parts_of
from distopt.compress.state import prefixed
from distopt.kernels.layout import BucketLayout
from distopt.optim import SGD

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 150)),
        st.tuples(st.integers(1, 150), st.integers(1, 150)),
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)),
        st.just(()),
    ),
    min_size=1,
    max_size=4,
)
DEMO = DCT(ErrorFeedback(Packed(Chunks(8, 64)), decay=0.999))


def bucket(shapes, dtype="float32"):
    room = np.array([-(-int(np.prod(s)) // 16) * 16 for s in shapes])
    return BucketLayout([f"p{k}" for k in range(len(shapes))], shapes, np.cumsum(room) - room, dtype)


def filled(layout, seed):
    rng, x = np.random.default_rng(seed), np.zeros(layout.extent, layout.dtype)
    for row, shape in enumerate(layout.shapes):
        layout.view(x, row)[...] = rng.standard_normal(shape)
    return x


def basis(side):
    """DCT-II by its definition, in float64."""
    u, i = np.arange(side)[:, None], np.arange(side)
    return np.sqrt(np.where(u > 0, 2, 1) / side) * np.cos(np.pi * u * (i + 0.5) / side)


def transformed(x, tile):
    """The coefficients of a tensor, tile by tile, in float64."""
    matrix = x.astype(np.float64).reshape(len(x) if x.ndim > 1 else 1, -1) if x.size else np.zeros((0, 0))
    found = [np.zeros(0)]
    for r, rows in parts_of(matrix.shape[0], tile):
        for c, columns in parts_of(matrix.shape[1], tile):
            found.append((basis(rows) @ matrix[r : r + rows, c : c + columns] @ basis(columns).T).ravel())
    return np.concatenate(found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_basis_is_orthonormal(dtype):
    close = 1e-6 if dtype == "float32" else 1e-13
    for side in range(1, 65):
        b = bases(64, dtype)[side].astype(np.float64)
        np.testing.assert_allclose(b[:side, :side] @ b[:side, :side].T, np.eye(side), rtol=0, atol=close)
        np.testing.assert_allclose(b[:side, :side], basis(side), rtol=0, atol=close)
        assert not b[side:].any()
        assert not b[:, side:].any()


@given(side=st.integers(1, 10**4), tile=st.integers(1, 64))
def test_parts_of_a_side_are_few_and_equal(side, tile):
    lengths = [length for _, length in parts_of(side, tile)]
    assert (sum(lengths), len(lengths)) == (side, -(-side // tile))
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= tile


@settings(max_examples=30, deadline=None)
@given(shapes=SHAPES, tile=st.integers(1, 64), dtype=st.sampled_from(["float32", "float64"]), seed=st.integers(0, 999))
def test_coefficients_are_those_of_the_definition_and_come_back(shapes, tile, dtype, seed):
    layout = bucket(shapes, dtype)
    x, context = filled(layout, seed), ExchangeContext(bucket=BucketContext(layout))
    close = 5e-6 if dtype == "float32" else 1e-13
    dct = DCT(TopK(0.5), tile)
    found = dct.coefficients(x, context).copy()
    for row in range(len(shapes)):
        expected = transformed(layout.view(x, row), tile)
        np.testing.assert_allclose(layout.view(found, row).ravel(), expected, rtol=0, atol=close)
    wide = [a.astype(np.float64) for a in (x, found)]
    assert np.isclose(*(np.sum(a * a) for a in wide), rtol=1e-5)  # Parseval
    dct.finish(found, {}, context)
    np.testing.assert_allclose(found, x, rtol=0, atol=close)


@settings(max_examples=20, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 999))
def test_what_is_sent_and_what_stays_add_up_in_both_domains(shapes, seed):
    layout = bucket(shapes)
    x, context, state = filled(layout, seed), ExchangeContext(bucket=BucketContext(layout)), {}
    sent = np.zeros_like(x)
    before = DEMO.coefficients(x, context).copy()
    DEMO.decompress(DEMO.compress(x, prefixed(state, DEMO.traits), context), sent, context)
    assert list(state) == ["frequencies of residual"]
    residual = state["frequencies of residual"]
    np.testing.assert_array_equal(residual + sent, before)
    for domain in (sent, residual):
        DEMO.finish(domain, {}, context)
    np.testing.assert_allclose(sent + residual, x, rtol=0, atol=5e-6)


MODEL = [(70, 40), (90,), (5, 3, 3, 3), ()]


def gradients(step, rank):
    rng = np.random.default_rng([step, rank])
    return [rng.standard_normal(shape).astype(np.float32) for shape in MODEL]


def run(comm, compressor, steps=3, exchange="gather"):
    """Train by SGD of rate 1."""
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(MODEL)]
    opt = DistOpt(SGD(1.0), comm, threshold=2000)
    for step in range(steps):
        use = compressor[step] if isinstance(compressor, list) else compressor
        opt.step(list(zip(params, gradients(step, comm.rank), strict=True)), use, False, exchange)
    return [p.data for p in params], opt.state_dict()["states"]


@pytest.mark.parametrize("exchange", ["gather", "two_phase", "nodes"])
def test_all_frequencies_are_all_gradients(exchange):
    found = run_ranks(2, lambda comm: run(comm, DCT(Chunks(64, 64)), 3, exchange)[0])
    for k in range(len(MODEL)):
        expected = -sum(gradients(step, rank)[k].astype(np.float64) for step in range(3) for rank in range(2)) / 2
        np.testing.assert_allclose(found[0][k], expected, rtol=0, atol=2e-5)
        assert found[0][k].tobytes() == found[1][k].tobytes()


@pytest.mark.parametrize("exchange", ["gather", "two_phase", "nodes"])
def test_nothing_is_lost_over_many_steps(exchange):
    """P x applied + the inverse of all that waits, with ranks and owners, == all gradients."""
    dct = DCT(ErrorFeedback(Chunks(4, 64)))
    ranks = run_ranks(3, lambda comm: run(comm, dct, 4, exchange))
    for k, shape in enumerate(MODEL):
        layout = bucket([shape])
        waits = np.zeros(layout.extent)
        for _, states in ranks:
            assert not {"residual", "owed"} & set(states)
            for arrays in states.values():
                waits += np.asarray(arrays.get(f"p{k}", np.zeros(shape))).ravel()
        waits = waits.astype(np.float32)
        dct.finish(waits, {}, ExchangeContext(bucket=BucketContext(layout)))
        applied = -3 * ranks[0][0][k].astype(np.float64)
        total = sum(gradients(step, rank)[k].astype(np.float64) for step in range(4) for rank in range(3))
        np.testing.assert_allclose(applied + waits.reshape(shape), total, rtol=0, atol=5e-5)


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_virtual_ranks_have_the_bits_of_ranks(exchange):
    real = run_ranks(3, lambda comm: run(comm, DEMO, 3, exchange))
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(MODEL)]
    sim = simulate(3, SGD(1.0), threshold=2000)
    for step in range(3):
        sim.step(lambda r, step=step: list(zip(params, gradients(step, r), strict=True)), DEMO, False, exchange)
    assert all(p.data.tobytes() == x.tobytes() for p, x in zip(params, real[0][0], strict=True))


def test_another_compressor_in_between_takes_no_coefficients_for_gradients():
    top = ErrorFeedback(TopK(0.1))
    states = run_ranks(1, lambda comm: run(comm, [DEMO, top, DEMO], 3)[1])[0]
    assert {"residual", "frequencies of residual"} <= set(states)
    alone = run_ranks(1, lambda comm: run(comm, [DEMO, DEMO], 1)[1])[0]
    between = run_ranks(1, lambda comm: run(comm, [DEMO, top], 2)[1])[0]
    for name, array in alone["frequencies of residual"].items():
        np.testing.assert_array_equal(between["frequencies of residual"][name], array)


def test_what_cannot_be_transformed_is_refused():
    assert repr(DCT(TopK(0.5), 8).at_density(0.1)) == "DCT(TopK(0.1, per_tensor=False), tile=8)"
    for make in (
        lambda: DCT(DeepGradientCompression(TopK(0.1))),
        lambda: DCT(DCT(TopK(0.1))),
        lambda: DCT(TopK(0.1), 65),
        lambda: DCT(TopK(0.1), 0),
        lambda: ErrorFeedback(DCT(TopK(0.1))),
        lambda: ErrorFeedback(DEMO),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
    with pytest.raises(TypeError):
        DCT(7)


def test_frequencies_cannot_be_observed_beside_gradients():
    def main(comm):
        w, opt = Parameter("w", np.zeros((8, 8), np.float32)), DistOpt(SGD(1.0), comm)
        loss, demo = [(w, np.ones((8, 8), np.float32))], DCT(ErrorFeedback(TopK(0.1)))
        opt.observe(None, every=2)
        assert opt.step(loss, demo)
        with pytest.raises(ValueError, match="compressor must send entries of gradients where it is observed"):
            opt.step(loss, demo)
        assert opt.step(loss, TopK(0.1))

    run_ranks(2, main)
