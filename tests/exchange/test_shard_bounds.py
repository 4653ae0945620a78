"""Borders of shards that move to where entries are: laws, bits, checkpoints, and what may go wrong."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.compress import DeepGradientCompression, ErrorFeedback, OneBit, Packed, Threshold, TopK
from distopt.exchange.sharding import LONGEST, ShardBounds, Sharding, balanced
from distopt.kernels.layout import BucketLayout
from distopt.optim import SGD
from training import SHAPES, zeros

COMPRESSORS = [
    ErrorFeedback(TopK(0.05)),
    ErrorFeedback(TopK(0.05, per_tensor=True)),
    ErrorFeedback(TopK(0.05, reselect=False)),
    ErrorFeedback(Threshold(40.0)),
    ErrorFeedback(Packed(TopK(0.05), value="int8")),
    DeepGradientCompression(Packed(TopK(0.05)), exclude_1d=False),
    TopK(0.05),
]
LOSING_NOTHING = COMPRESSORS[:-2]
WHERE = (0, 300), (2100, 2500)  # large gradients, of all elements in order; they change places between two moves


def crowded(step, rank, shapes=SHAPES):
    """Gradients of small integers, whose sums are exact in float32, but for larger ones that lie together."""
    rng, ends = np.random.default_rng([step, rank]), np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    flat = rng.integers(-3, 4, ends[-1]).astype(np.float32)
    flat[slice(*WHERE[step.bit_length() % 2])] *= 32
    return [flat[a:b].reshape(shape) for a, b, shape in zip(ends[:-1], ends[1:], shapes, strict=True)]


def go_on(comm, opt, params, compressor, steps):
    """Make these steps; return the borders after each."""
    params, found = laws.move_to_device(comm, params), []
    for step in steps:
        gradients = laws.to_device(comm, crowded(step, comm.rank))
        opt.step(list(zip(params, gradients, strict=True)), compressor, False, "two_phase")
        found.append(opt.state_dict()["borders"])
    return found


def train(comm, compressor, steps, **options):
    """Train from the start; return the parameters, the borders after each step, and the optimizer."""
    params = laws.move_to_device(comm, zeros())
    opt = DistOpt(SGD(1.0), comm, threshold=300, **options)
    return params, go_on(comm, opt, params, compressor, range(steps)), opt


def kept(states):
    """The sum over states of what is kept of each parameter, in float64."""
    found = [np.zeros(shape) for shape in SHAPES]
    for arrays in states.values():
        for name, a in arrays.items():
            found[int(name[1:])] += a
    return found


def bits(states):
    return {(state, name): a.tobytes() for state, arrays in states.items() for name, a in arrays.items() if a.any()}


# ----------------------------------------------------------------------------------------------------- where they are


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300)), min_size=1, max_size=40),
    st.integers(1, 70),
)
def test_shards_have_few_more_entries_than_the_mean_and_are_not_too_long(stretches, ranks):
    """Entries spread evenly over each stretch: at most 9 / 8 of the mean, one more for each place that was rounded."""
    sizes, entries = [n for n, _ in stretches], [min(n, k) for n, k in stretches]
    if not sum(entries):
        return
    starts = balanced(sizes, entries, ranks)
    assert starts == balanced(sizes, entries, ranks)
    assert (starts[0], starts[-1], len(starts)) == (0, sum(sizes), ranks + 1)
    assert list(starts) == sorted(starts)
    assert np.diff(starts).max() <= LONGEST * sum(sizes) / ranks + 1
    below = np.interp(starts, np.cumsum([0, *sizes]), np.cumsum([0, *entries]))
    assert np.diff(below).max() <= LONGEST / (LONGEST - 1) * sum(entries) / ranks + 1


def test_borders_move_after_updates_that_are_powers_of_two():
    def main(comm):
        return train(comm, ErrorFeedback(TopK(0.05)), 9)[1]

    ranks = run_ranks(3, main)
    assert ranks[1:] == ranks[:1] * 2, "all ranks have the same"
    moved = [k + 1 for k, (a, b) in enumerate(itertools.pairwise([[], *ranks[0]])) if a != b]
    assert moved == [1, 2, 4, 8]


def test_the_fullest_shard_has_about_the_mean_afterwards(monkeypatch):
    """By what owners send, which every rank sees; entries lie in a tenth of the plan."""
    seen, see = [], ShardBounds.see

    def watch(self, shards, entries, step):
        counts = iter(entries)
        seen.append([sum(itertools.islice(counts, len(pieces))) for pieces in shards.of_owner])
        see(self, shards, entries, step)

    monkeypatch.setattr(ShardBounds, "see", watch)
    p, sim = Parameter("w", np.zeros(64 * 1600, np.float32)), simulate(8, SGD(1.0))
    g = np.random.default_rng(0).standard_normal(64 * 1600).astype(np.float32)
    g[64 * 820 : 64 * 980] *= 100
    for _ in range(5):
        sim.step(lambda rank: [(p, g * (1 + rank % 2))], TopK(0.02), exchange="two_phase")
    ratios = [max(counts) / np.mean(counts) for counts in seen]
    assert ratios[0] > 6
    assert ratios[4] < 1.3
    assert [sum(counts) for counts in seen] == [sum(seen[0])] * 5, "there are as many of them"


@pytest.mark.parametrize("compressor", [OneBit(), ErrorFeedback(Threshold(1e9)), TopK(0.05)], ids=repr)
def test_borders_stay_where_there_is_nothing_to_gain(compressor):
    """All elements are sent, or none at all, or as many everywhere."""

    def main(comm):
        p, opt = Parameter("w", np.zeros(64 * 30, np.float32)), DistOpt(SGD(1.0), comm)
        g = np.tile(np.arange(64, dtype=np.float32), 30)
        for _ in range(2):
            opt.step([(p, g)], compressor, exchange="two_phase")
        return opt.state_dict()["borders"]

    assert run_ranks(3, main) == [[]] * 3


def test_starts_of_another_plan_or_other_ranks_are_left_out():
    layouts = [BucketLayout(["a"], [(640,)], [0], np.float32)]
    assert Sharding(layouts, 2, 64, (0, 128, 640)).sizes == [128, 512]
    assert Sharding(layouts, 2, 64, (0, 0, 640)).sizes == [0, 640]
    for starts in ((0, 128, 1000), (0, 128, 256, 640)):
        assert Sharding(layouts, 2, 64, starts).sizes == [320, 320]


def test_codes_have_even_shards_also_after_a_step_that_has_moved_borders():
    """All elements are sent, so that a long shard would be a long message."""

    def main(comm):
        params, _, opt = train(comm, ErrorFeedback(TopK(0.05)), 1)
        go_on(comm, opt, params, ErrorFeedback(OneBit()), [1])
        even = opt.plan.exchange
        go_on(comm, opt, params, ErrorFeedback(TopK(0.05)), [2])
        return even, opt.plan.exchange

    for even, moved in run_ranks(3, main):
        assert even == "two-phase, 3 shards of 1,024 to 1,079 elements"
        assert moved != even


# ----------------------------------------------------------------------------------------------------- laws of training


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("compressor", LOSING_NOTHING, ids=repr)
def test_what_is_applied_and_what_is_kept_add_up_exactly_across_moves(compressor, size):
    """In integers: P x applied + residuals + what owners owe == the sum of all gradients."""

    def main(comm):
        params, borders, opt = train(comm, compressor, 5)
        return [p.data for p in params], borders, opt.state_dict()["states"]

    ranks = run_ranks(size, main)
    assert ranks[0][1][-1], "borders have moved"
    pending = [sum(parts) for parts in zip(*(kept(states) for _, _, states in ranks), strict=True)]
    for k in range(len(SHAPES)):
        total = sum(crowded(step, rank)[k].astype(np.float64) for rank in range(size) for step in range(5))
        applied = -ranks[0][0][k].astype(np.float64) * size
        np.testing.assert_allclose(applied + pending[k], total, rtol=0, atol=1e-2)
        assert (np.round(applied + pending[k]) == total).all()
        assert all(values[k].tobytes() == ranks[0][0][k].tobytes() for values, _, _ in ranks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_virtual_ranks_have_the_bits_of_threads(compressor):
    def main(comm):
        params, borders, opt = train(comm, compressor, 5, deterministic=True)
        assert borders[-1]
        return [p.data.tobytes() for p in params], opt.plan.exchange

    params, sim = zeros(), simulate(3, SGD(1.0), threshold=300)
    for step in range(5):

        def loss(rank, step=step):
            return zip(params, crowded(step, rank), strict=True)

        sim.step(loss, compressor, False, "two_phase")
    assert run_ranks(3, main) == [([p.data.tobytes() for p in params], sim.plan.exchange)] * 3


def test_a_step_that_is_refused_does_not_move_borders():
    """Sums that are not finite are found after the exchange, which has seen entries."""

    def main(comm):
        params, (first,), opt = train(comm, ErrorFeedback(TopK(0.05)), 1, nonfinite="skip")
        with np.errstate(over="ignore"):
            huge = [np.full_like(p.data, 3e38) for p in params]
            opt.step(list(zip(params, huge, strict=True)), TopK(0.05), False, "two_phase")
        assert (opt.skipped, opt.state_dict()["borders"]) == (1, first)
        opt.step(list(zip(params, crowded(1, comm.rank), strict=True)), TopK(0.05), False, "gather")
        assert (opt.step_counter, opt.state_dict()["borders"]) == (2, first)
        return first

    first, *others = run_ranks(3, main)
    assert first
    assert others == [first] * 2


def test_between_nodes_shards_stay_of_as_many_elements(monkeypatch):
    """Each rank of a node has buckets of its own, and what is saved must be the same on all."""
    monkeypatch.setattr("distopt.exchange.choice.GATHER_BELOW", 0)

    def main(comm):
        comm._hosts = [rank // 2 for rank in range(6)]
        params, opt = zeros(), DistOpt(SGD(1.0), comm, threshold=300)
        for step in range(2):
            opt.step(list(zip(params, crowded(step, comm.rank), strict=True)), TopK(0.02), False, "nodes")
        return opt.plan.exchange, opt.state_dict()["borders"]

    for plan, borders in run_ranks(6, main):
        assert "two-phase" in plan
        assert borders == []


# ----------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.sampled(3)
@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("compressor", [COMPRESSORS[k] for k in (0, 3, 5)], ids=repr)
def test_a_checkpoint_goes_on_with_the_same_bits(compressor, saved, tmp_path):
    """Saved where borders have moved just before, where they will after the next step, and in between."""

    def main(comm):
        params, _, opt = train(comm, compressor, saved)
        opt.save(tmp_path, params)
        found = []
        for resumes in (False, True):
            if resumes:
                params = zeros()
                opt = DistOpt(SGD(1.0), comm, threshold=300)
                opt.load(tmp_path, params)
            borders = go_on(comm, opt, params, compressor, range(saved, 5))
            found.append(([p.data.tobytes() for p in params], borders, bits(opt.state_dict()["states"])))
        return found

    for lives_on, resumed in run_ranks(3, main):
        assert resumed == lives_on


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 5])
def test_other_ranks_begin_with_even_shards_and_keep_the_mean(size, tmp_path):
    def save(comm):
        _, borders, opt = train(comm, ErrorFeedback(TopK(0.05)), 3)
        opt.save(tmp_path)
        return borders[-1], kept(opt.state_dict()["states"])

    saved = run_ranks(3, save)
    assert len(saved[0][0]) == 4

    def main(comm):
        params, opt = zeros(), DistOpt(SGD(1.0), comm, threshold=300)
        opt.load(tmp_path, None)
        before = kept(opt.state_dict()["states"])
        nothing = [(p, np.zeros_like(p.data)) for p in params]
        opt.step(nothing, ErrorFeedback(TopK(0.05)), False, "two_phase")
        return before, [-p.data for p in params], kept(opt.state_dict()["states"]), opt.plan.exchange

    ranks = run_ranks(size, main)
    fewest, most = (int(n.replace(",", "")) for n in ranks[0][3].split(" of ")[1].split(" elements")[0].split(" to "))
    assert most - fewest <= 2 * 64
    for k in range(len(SHAPES)):
        mean = sum(pending[k] for _, pending in saved) / 3
        np.testing.assert_allclose(sum(before[k] for before, *_ in ranks) / size, mean, atol=1e-3)
        after = sum(pending[k] for _, _, pending, _ in ranks) / size + ranks[0][1][k]
        np.testing.assert_allclose(after, mean, atol=1e-3)


def test_a_state_without_borders_has_even_shards():
    def main(comm):
        _, _, opt = train(comm, ErrorFeedback(TopK(0.05)), 1)
        state = opt.state_dict()
        assert state.pop("borders")
        opt.load_state_dict(state)
        return opt.state_dict()["borders"]

    assert run_ranks(2, main) == [[], []]


@pytest.mark.parametrize("damaged", [[0, 9, 5, 10], [5, 10], [0, -1, 10], (0, 5, 10), {"0": 5}])
def test_damaged_borders_are_refused(damaged):
    opt = DistOpt(SGD(1.0))
    state = opt.state_dict() | {"borders": damaged}
    with pytest.raises(ValueError, match="borders must"):
        opt.load_state_dict(state)
    assert opt.state_dict()["borders"] == []


def test_ranks_that_have_loaded_different_borders_are_told_so():
    def main(comm):
        params, _, opt = train(comm, ErrorFeedback(TopK(0.05)), 1)
        if comm.rank == 1:
            opt.load_state_dict(opt.state_dict() | {"borders": []})
        go_on(comm, opt, params, ErrorFeedback(TopK(0.05)), [1])

    with pytest.raises(ValueError, match="borders of shards"):
        run_ranks(2, main)
