"""Partial steps that average a share of all entries, which a seed and the step choose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_half_in_shared_memory import Apart

import laws
import reference
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Metered
from distopt.optim import SGD, Adam
from launch import needs_mpi, run_mpi

DTYPES = ("float16", "float32", "float64")
SIZES = (7, 1, 0, 64, 1000)


def constants(comm, sizes, value=None, dtypes=DTYPES):
    """Parameters of several dtypes, full of this rank's number."""
    value = 2.0 * comm.rank if value is None else value
    return [Parameter(f"p{k}", np.full(n, value, dtypes[k % len(dtypes)])) for k, n in enumerate(sizes)]


def without_gradients(params):
    return [(p, np.zeros_like(p.data)) for p in params]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    every=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    ranks=st.integers(2, 4),
    before=st.integers(0, 20),
)
def test_each_entry_is_averaged_once_in_as_many_steps_as_a_block_has_entries(sizes, every, seed, ranks, before):
    """And in each step the entries that a formula of integers names, whatever the plan and the steps before.

    A cycle ends where the number of partial steps is a multiple of ``every``; tensors are counted by their dtype.
    """
    first = -(-before // every) * every
    chosen = [reference.chosen_by_seed(sizes, every, seed, first + turn) for turn in range(every)]

    def main(comm):
        params, times = constants(comm, sizes, dtypes=["float16", "float32"]), [np.zeros(n, int) for n in sizes]
        opt = DistOpt(SGD(0.0), comm, broadcast=False, threshold=40)
        for _ in range(first):
            opt.backward_and_partial_update(without_gradients(params))
        for turn, places in enumerate(chosen):
            for p in params:
                p.data[...] = 2 * comm.rank
            opt.backward_and_partial_update(without_gradients(params), turn % 3 * 20, share=1 / every, seed=seed)
            for p, count, averaged in zip(params, times, places, strict=True):
                expected = np.full(p.data.size, 2.0 * comm.rank)
                expected[averaged] = comm.size - 1
                np.testing.assert_allclose(p.data, expected, rtol=1e-3)
                count[averaged] += 1
        return all((count == 1).all() for count in times)

    assert all(run_ranks(ranks, main))


def test_neighbours_are_averaged_in_any_order_and_another_seed_and_cycle_choose_others():
    """Of a block of 8 in 1000 blocks, each place comes about as often: within six standard deviations."""
    size, every = 8000, 8
    found = [
        np.array(reference.chosen_by_seed([size, size], every, seed, step)) for seed, step in ((0, 0), (1, 0), (0, 8))
    ]
    for places in (*found[0], found[1][0], found[2][0]):
        counts = np.bincount(places % every, minlength=every)
        assert abs(counts - 125).max() < 6 * np.sqrt(1000 / 8 * 7 / 8)
    for other in (found[0][1], found[1][0], found[2][0]):
        same = np.count_nonzero(found[0][0] == other)
        assert abs(same - 125) < 6 * np.sqrt(1000 / 8 * 7 / 8)


def test_a_share_of_one_averages_everything_in_rank_order():
    def main(comm):
        params = laws.parameters(rank=comm.rank)
        opt = DistOpt(SGD(0.1), comm, broadcast=False)
        opt.backward_and_partial_update(laws.pairs(comm, params, 0), share=1)
        return [p.data for p in params]

    def alone(rank):
        params, opt = laws.parameters(rank=rank), SGD(0.1)
        opt(zip(params, laws.gradients(params, 0, rank), strict=True))
        return [p.data for p in params]

    mine = [alone(rank) for rank in range(3)]
    for found in run_ranks(3, main):
        for k, x in enumerate(found):
            total = (mine[0][k] + mine[1][k]) + mine[2][k]
            np.testing.assert_array_equal(x, total * np.float32(1 / 3))


def test_the_ledger_has_one_number_for_each_block():
    """One message for each dtype; 16-bit numbers are averaged in float32."""

    def main(comm):
        metered, params = Metered(comm), constants(comm, SIZES)
        opt = DistOpt(SGD(0.0), metered, threshold=100)
        for _ in range(5):
            opt.backward_and_partial_update(without_gradients(params), share=0.1)
        return metered.ledger

    blocks = {f"p{k}": -(-n // 10) for k, n in enumerate(SIZES)}
    nbytes = {name: n * (8 if name == "p2" else 4) for name, n in blocks.items()}
    for ledger in run_ranks(3, main):
        rows = [entry for entry in ledger.entries if entry.phase == "parameters"]
        assert [entry.step for entry in rows] == [1, 2, 3, 4, 5]
        assert {entry.verb for entry in rows} == {"all_reduce"}
        for entry in rows:
            assert entry.payload == entry.values == sum(nbytes.values())
            assert dict(zip(entry.names, entry.parts, strict=True)) == {n: b for n, b in nbytes.items() if n != "p2"}


def test_ranks_that_have_joined_give_nothing_and_receive_the_mean_of_others():
    def main(comm):
        w = Parameter("w", np.zeros(12))
        opt = DistOpt(SGD(1.0), comm)
        for _ in range(1 + comm.rank):
            opt.backward_and_partial_update([(w, np.full(12, 6.0 * (1 + comm.rank)))], share=1.0)
        opt.join()
        return w.data.tolist()

    # -6, -12, -18 -> -12; then rank 0 is done: -24 and -30 -> -27; then rank 2 alone: -45
    assert run_ranks(3, main) == [[-45.0] * 12] * 3


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ([{"share": 0.5}, {"share": 0.25}], ValueError, r"share=0.5, seed=0.*share=0.25, seed=0"),
        ([{"share": 0.5, "seed": 1}, {"share": 0.5, "seed": 2}], ValueError, r"seed=1.*seed=2"),
        ([{"share": 0.5}, {}], ValueError, "a partial step of share=0.5"),
        ([{"share": 0.5}, {"share": 0}], ValueError, r"share must be finite and in \[1e-09, 1.0\], got 0"),
        ([{"share": 1.01}] * 2, ValueError, "share must be finite and in"),
        ([{"share": "all"}] * 2, TypeError, "share must be a number, got 'all'"),
        ([{"share": 0.5, "seed": -1}] * 2, ValueError, "seed must be at least 0, got -1"),
        ([{"share": 0.5, "seed": 2**63}] * 2, ValueError, "seed must be below 2\\^63"),
        ([{"share": 0.5, "seed": 0.5}] * 2, TypeError, "seed must be an integer"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_by_all_and_nothing_changes(arguments, kind, words):
    def main(comm):
        (p,) = params = constants(comm, [50], dtypes=["float32"])
        opt, loss = DistOpt(SGD(1.0), comm, broadcast=False), [(p, np.ones(50, np.float32))]
        with pytest.raises(kind, match=words) as raised:
            opt.backward_and_partial_update(loss, **arguments[comm.rank])
        assert (p.data == 2 * comm.rank).all()
        opt.backward_and_partial_update(without_gradients(params), share=1)  # and training goes on
        assert (p.data == 1).all()
        return str(raised.value)

    first, second = run_ranks(2, main)
    assert first == second


def test_both_ways_of_averaging_and_other_shares_may_follow_each_other():
    """The memory of a smaller share is made again for a larger one."""

    def main(comm):
        params = constants(comm, SIZES)
        opt = DistOpt(SGD(0.0), comm, broadcast=False, threshold=100)
        for share in (0.01, None, 0.5, 0.3, None, 1.0):
            for p in params:
                p.data[...] = 2 * comm.rank
            opt.backward_and_partial_update(without_gradients(params), share=share)
        return [p.data.tolist() for p in params]

    assert run_ranks(2, main) == [[[1.0] * n for n in SIZES]] * 2


def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_and_counts_no_turn():
    def main(comm):
        params = laws.parameters(rank=comm.rank)
        opt = DistOpt(SGD(0.1), comm, nonfinite="skip")
        before = laws.digest(params)
        pairs = list(laws.pairs(comm, params, 0))
        if comm.rank:
            pairs[0][1][...] = np.nan
        applied = opt.backward_and_partial_update(pairs, share=0.5)
        return applied, opt.state_dict()["partial"], laws.digest(params) == before or comm.rank > 0

    assert run_ranks(2, main) == [(False, 0, True)] * 2


def digests(comm, **options):
    """Digests of this rank's parameters and states after steps of several shares."""
    found = []
    for dtype in ("float32", "float64"):
        params, opt = laws.train(comm, 0, dtype=dtype, make=lambda: Adam(0.01), **options)
        for step in range(6):
            opt.backward_and_partial_update(laws.pairs(comm, params, step), share=(0.3, 0.05)[step % 2], seed=step // 4)
        found.append(laws.digest(params))
    return found


def test_ranks_that_share_no_memory_have_the_same_bits():
    """All-reduces of threads add in rank order, as the sums in shared memory."""
    assert run_ranks(4, lambda comm: digests(Apart(comm))) == run_ranks(4, digests)


def digests_of_mpi(comm):
    apart = digests(Apart(comm), deterministic=True)
    return {"apart": np.array(apart), "shared": np.array(digests(comm))}


@needs_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_processes_have_the_bits_of_threads(size, tmp_path):
    """In shared memory sums are in rank order in any case, and without if they are asked for."""
    expected = run_ranks(size, digests)
    for name in ("apart", "shared"):
        assert [found[name].tolist() for found in run_mpi(size, digests_of_mpi, tmp_path)] == expected
