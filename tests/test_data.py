"""Global batches: every sample once per epoch, for any history of ranks."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distopt import run_ranks
from distopt.data import GlobalBatches

SEEDS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 300), st.integers(1, 80), SEEDS, st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_has_every_sample_once_and_is_cut_evenly(samples, batch, seed, ranks, epoch):
    steps = -(-samples // batch)
    assume(samples // steps >= ranks)
    data, seen = GlobalBatches(samples, batch, seed, ranks=ranks), []
    assert data.steps == steps
    for step in range(epoch * steps, (epoch + 1) * steps):
        parts = [data.ids(rank, step) for rank in range(ranks)]
        assert {len(part) for part in parts} <= {len(parts[0]), len(parts[0]) + 1, len(parts[0]) - 1}
        assert min(map(len, parts)) > 0
        seen.append(np.concatenate(parts))
        assert abs(len(seen[-1]) - samples / steps) < 1
        assert len(seen[-1]) <= batch
        weights = [data.weight(rank, step) for rank in range(ranks)]
        np.testing.assert_allclose(sum(weights), ranks)
        by_rank = [weights[rank] * np.mean(parts[rank]) for rank in range(ranks)]
        np.testing.assert_allclose(np.mean(by_rank), np.mean(seen[-1]))
    assert sorted(np.concatenate(seen).tolist()) == list(range(samples))


@given(SEEDS, st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=6))
def test_a_job_on_other_ranks_goes_on_with_the_samples_that_come_next(seed, history):
    """Each part of the history is a job of so many ranks that makes so many steps."""
    expected, step, seen = GlobalBatches(97, 24, seed, ranks=1), 0, []
    for ranks, steps in history:
        data = GlobalBatches(97, 24, seed, ranks=ranks)
        seen += [np.concatenate([data.ids(rank, step + k) for rank in range(ranks)]) for k in range(steps)]
        step += steps
    for k, batch in enumerate(seen):
        np.testing.assert_array_equal(batch, expected.ids(0, k))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(GlobalBatches(50, 50, seed, ranks=1).ids(0, epoch).tolist())
        for seed in (0, 1, 2**64 - 1)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert tuple(range(50)) not in orders


def test_the_order_is_the_one_of_every_version():
    """Numbers of a generator that numpy does not change: a checkpoint may be older than the numpy that goes on."""
    assert GlobalBatches(10, 5, 7, ranks=1).of_epoch(0, step=2) == [[2, 5, 7, 8, 1], [9, 3, 4, 0, 6]]


def test_ranks_are_those_of_the_world():
    data = GlobalBatches(8, 4)
    assert data.ranks == 1
    assert repr(data) == "GlobalBatches(8, batch=4, seed=0, ranks=1)"
    assert run_ranks(2, lambda comm: GlobalBatches(8, 4, ranks=comm.size).ids(comm.rank, 0).size) == [2, 2]


def test_what_a_script_gets_cannot_change_the_order():
    data = GlobalBatches(8, 4, ranks=2)
    before = data.ids(0, 0).tolist()
    data.ids(0, 0)[:] = 3
    assert data.ids(0, 0).tolist() == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"batch": 2.0}, TypeError, "batch must be an integer, got 2.0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**64}, ValueError, "seed must be below 2"),
        ({"ranks": 0}, ValueError, "ranks must be at least 1, got 0"),
        (
            {"ranks": 5},
            ValueError,
            "batch must leave a sample for each of 5 ranks, got 4, with which some of 3 batches",
        ),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        GlobalBatches(**({"samples": 10, "batch": 4, "ranks": 2} | arguments))


def test_ranks_may_change():
    data = GlobalBatches(8, 4, ranks=2)
    halves = [data.ids(rank, 1) for rank in range(2)]
    data.ranks = 4
    assert [data.ids(rank, 1).size for rank in range(4)] == [1] * 4
    np.testing.assert_array_equal(np.concatenate([data.ids(rank, 1) for rank in range(4)]), np.concatenate(halves))


@pytest.mark.torch
def test_torchs_loader_takes_the_samples_of_an_epoch():
    torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    data, x = GlobalBatches(10, 4, ranks=2), torch.arange(100, 110)
    loaders = [torch.utils.data.DataLoader(x, batch_sampler=data.of_epoch(rank, step=4)) for rank in range(2)]
    assert [batch.tolist() for batch in loaders[1]] == [[100 + k for k in data.ids(1, step)] for step in (4, 5)]
    assert sum(len(batch) for loader in loaders for batch in loader) == 7


def test_bad_ranks_and_steps():
    data = GlobalBatches(10, 5, ranks=2)
    with pytest.raises(ValueError, match="rank must be below 2, got 2"):
        data.ids(2, 0)
    with pytest.raises(ValueError, match="rank must be at least 0, got -1"):
        data.ids(-1, 0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        data.ids(0, -1)
