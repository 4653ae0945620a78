"""The exchange in two phases: laws in exact arithmetic, its choice, its bytes, and what may go wrong."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
import training
from distopt import DistOpt, Parameter, device, run_ranks, simulate
from distopt.comm import Metered
from distopt.comm.communicator import Wrapper
from distopt.compress import (
    DeepGradientCompression,
    ErrorFeedback,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.exchange import two_phases
from distopt.exchange.choice import reason
from distopt.kernels.layout import BucketLayout
from distopt.optim import SGD
from launch import needs_mpi, run_mpi
from training import SHAPES, integers, zeros

LOSING_NOTHING = [
    TopK(0.05),
    TopK(0.05, per_tensor=True),
    TopK(0.05, reselect=False),
    Threshold(3.0),
    Packed(TopK(0.05)),
    Packed(TopK(0.05), value="int8"),
    Packed(Threshold(3.0), value="bfloat16"),
    TwoBit(2.0),
    OneBit(scale="unit"),
    Int8(64),
    Int4(),
    Int8(32, "stochastic"),
]


trained = functools.partial(training.trained, exchanges=("two_phase",), seed=(0,))


@settings(max_examples=3, deadline=None)
@given(st.integers(2, 9), st.integers(0, 99))
@pytest.mark.sampled(4)
@pytest.mark.parametrize("compressor", LOSING_NOTHING, ids=repr)
def test_what_is_applied_and_what_ranks_and_owners_keep_add_up_exactly(compressor, size, seed):
    """In integers, to the last one: P x applied + residuals + what owners owe == the sum of all gradients.

    The mean is divided by P, so that a rate of 1 makes multiples of 1 / P: they are compared after rounding.
    """

    def main(comm):
        values, states, _ = trained(comm, ErrorFeedback(compressor), 4, seed=(seed,))
        return values, states

    ranks = run_ranks(size, main)
    for k, shape in enumerate(SHAPES):
        kept = np.zeros(shape)
        for _, states in ranks:
            for arrays in states.values():
                kept += arrays.get(f"p{k}", np.zeros(shape)).astype(np.float64)
        applied = -np.float64(ranks[0][0][k]) * size
        total = sum(integers(seed, rank, step)[k].astype(np.float64) for rank in range(size) for step in range(4))
        np.testing.assert_allclose(applied + kept, total, rtol=0, atol=1e-3)
        assert (np.round(applied + kept) == total).all()
        assert all(values[k].tobytes() == ranks[0][0][k].tobytes() for values, _ in ranks)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("compressor", [TopK(1.0), Threshold(0.0, reselect=False), ErrorFeedback(TopK(1.0))], ids=repr)
def test_all_entries_are_the_dense_sum_in_rank_order_to_the_bit(compressor, size):
    def main(comm):
        found = []
        for use in (compressor, None):
            params = laws.parameters(SHAPES, rank=0)
            opt = DistOpt(SGD(0.1), comm, threshold=300, deterministic=True)
            for step in range(3):
                opt.step(laws.pairs(comm, params, step), use, False, "two_phase")
            found.append(laws.digest(params))
        return found

    assert all(one == dense for one, dense in run_ranks(size, main))


@pytest.mark.parametrize("compressor", [*LOSING_NOTHING, OneBit()], ids=repr)
def test_one_rank_is_the_same_as_by_gather(compressor):
    """Two phases of one rank would send nothing to anybody."""

    def main(comm):
        return [trained(comm, ErrorFeedback(compressor), 3, exchanges=(e,))[0] for e in ("two_phase", "gather")]

    ((one, other),) = run_ranks(1, main)
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


def test_identical_gradients_are_what_a_gather_makes_of_them():
    """Where all ranks send the same entries, an owner has room for all of them: even if they are in one shard."""

    def main(comm):
        found = []
        for exchange in ("two_phase", "gather"):
            p = Parameter("w", np.zeros(10000, np.float32))
            opt = DistOpt(SGD(1.0), comm)
            for step in range(3):
                g = np.zeros(10000, np.float32)
                g[: 100 * (step + 1)] = np.random.default_rng(step).standard_normal(100 * (step + 1))
                opt.step([(p, g)], ErrorFeedback(TopK(0.01)), exchange=exchange)
            found.append((p.data, opt.state_dict()["states"]))
        return found

    for (one, states), (other, _) in run_ranks(8, main):
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert not any(a.any() for a in states.get("owed", {}).values())


# ----------------------------------------------------------------------------------------------------- the choice


def plan_of(*sizes):
    return [BucketLayout([f"p{k}"], [(n,)], [0], np.float32) for k, n in enumerate(sizes)]


@pytest.mark.parametrize(
    ("exchange", "compressor", "ranks", "chosen"),
    [
        ("auto", TopK(0.01), 1, False),
        ("auto", TopK(0.01), 2, False),  # a gather sends as many bytes, and sums are exact
        ("auto", TopK(0.01), 3, True),
        ("auto", TopK(0.0001), 3, False),  # 2 x 808 bytes
        ("auto", TopK(0.0001), 128, True),
        ("auto", Threshold(1.0), 3, True),
        ("gather", TopK(0.01), 3, False),
        ("two_phase", TopK(0.0001), 2, True),
        ("two_phase", TopK(0.0001), 1, False),
        ("auto", DeepGradientCompression(TopK(0.01), exclude_1d=False), 3, True),
        ("auto", DeepGradientCompression(TopK(0.01)), 1000, False),  # all of it is summed as it is
    ],
)
def test_the_choice_follows_from_the_plan_the_compressor_and_the_ranks(exchange, compressor, ranks, chosen):
    found = two_phases(exchange, compressor, plan_of(1_000_000, 10_000), ranks)
    assert (found is not None) == chosen
    assert found is None or found.buckets == (0, 1)


def test_a_bucket_that_is_no_fewer_bytes_than_dense_is_summed_as_one():
    for compressor in (TopK(1.0), DeepGradientCompression(TopK(0.99), exclude_1d=False)):
        assert two_phases("two_phase", compressor, plan_of(100_000), 8) is None
        assert two_phases("two_phase", compressor, plan_of(100_000), 8, break_even=False) is not None

    def main(comm):
        metered, p = Metered(comm), Parameter("w", np.zeros((100, 100), np.float32))
        opt = DistOpt(SGD(1.0), metered)
        opt.step([(p, np.ones((100, 100), np.float32))], TopK(1.0), exchange="two_phase")
        return metered.report()["all_reduce"]["wire"], opt.plan.exchange

    assert run_ranks(4, main)[0] == (2 * 3 * 10000, "gather")


def test_the_plan_says_which_exchange_a_step_took():
    """And, where it was not asked to, why."""

    def main(comm):
        values = []
        for exchange, compressor in (
            ("two_phase", ErrorFeedback(TopK(0.1))),
            ("two_phase", TopK(0.1, reselect=False)),
            ("auto", ErrorFeedback(TopK(0.1))),
            ("auto", None),
        ):
            p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm)
            opt.step([(p, np.ones(1000, np.float32))], compressor, exchange=exchange)
            values.append(str(opt.plan).splitlines()[2:])
        return values

    first, exact, gathered, dense = run_ranks(3, main)[0]
    assert first[-1] == "exchange: two-phase, 3 shards of 320 to 360 elements"
    assert exact[-1].endswith("elements; sums are exact, and their bytes grow with the ranks")
    assert gathered[-1] == "exchange: gather (auto: payloads of all other ranks are below 64 KiB)"
    assert len(dense) == 1


class Whole(TopK):
    """One of a user's own, which has no shards."""

    def sharded(self):
        return None


@pytest.mark.parametrize(
    ("taken", "compressor", "ranks", "why"),
    [
        ("gather", TopK(0.1), 1, "there is one rank"),
        ("gather", TopK(0.1), 2, "two ranks send each other one payload"),
        ("gather", TopK(0.001), 3, "payloads of all other ranks are below 64 KiB"),
        ("gather", TopK(1.0), 3, "two phases would send no less than dense sums"),
        ("gather", Whole(0.1), 3, "its payloads can only be gathered"),
        ("two_phase", TopK(0.1), 8, "less than the payloads of 7 other ranks"),
        ("nodes", Int8(), 8, "what leaves a node does not grow with its ranks"),
    ],
    ids=str,
)
def test_a_choice_has_a_reason(taken, compressor, ranks, why):
    plan = plan_of(1_000_000)
    assert reason(taken, compressor, plan, ranks) == why
    assert taken == "nodes" or (two_phases("auto", compressor, plan, ranks) is not None) == (taken == "two_phase")


def test_ranks_that_ask_for_different_exchanges_are_told_so():
    def main(comm):
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm)
        exchange = "two_phase" if comm.rank else "gather"
        opt.step([(p, np.ones(1000, np.float32))], ErrorFeedback(TopK(0.1)), exchange=exchange)

    with pytest.raises(ValueError, match="two-phase"):
        run_ranks(3, main)


@pytest.mark.parametrize("exchange", ["ring", None, ["gather"]])
def test_an_unknown_exchange_is_refused_on_every_rank(exchange):
    def main(comm):
        p, opt = Parameter("w", np.zeros(10, np.float32)), DistOpt(SGD(1.0), comm)
        with pytest.raises(ValueError, match="exchange must be one of auto, gather, two_phase, nodes, measure, got"):
            opt.step([(p, np.ones(10, np.float32))], TopK(0.1), exchange=exchange if comm.rank else "auto")
        return p.data.any()

    assert run_ranks(2, main) == [False, False]


def test_a_compressor_of_ones_own_is_gathered():
    class Signs(TwoBit):
        def sharded(self):
            return None

    assert two_phases("auto", Signs(), plan_of(1_000_000), 8) is None
    with pytest.raises(ValueError, match="exchange must be 'auto' or 'gather' for TwoBit"):
        two_phases("two_phase", Signs(), plan_of(1_000_000), 8)


# ----------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        (TwoBit(0.5), 2),
        (OneBit(), 1),
        (OneBit(scale="unit"), 1),
    ],
    ids=repr,
)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [2, 3, 8, 32, 64])
def test_codes_are_so_many_bits_an_element_at_any_number_of_ranks(compressor, bits, size):
    """To the byte, of every rank: its elements but for its own shard, and its shard to all others."""
    n = 64 * 640
    p, sim = Parameter("w", np.zeros(n, np.float32)), simulate(size, SGD(1.0))
    sim.step(lambda rank: [(p, np.ones(n, np.float32))], ErrorFeedback(compressor), False, "two_phase")
    headers = {"TwoBit(0.5)": (0, 0), "OneBit(0.0, scale='unit')": (0, 4)}.get(repr(compressor), (4, 4))
    borders = [(n * r // size + 32) // 64 * 64 for r in range(size + 1)]
    mine = borders[1]
    rows = {row["verb"]: row for row in sim.ledger.by("phase", "verb") if row["phase"] == "gradients"}
    assert rows["all_to_all"]["sent"] == (n - mine) * bits // 8 + headers[0] * (size - 1)
    assert rows["all_gather"]["sent"] == (mine * bits // 8 + headers[1]) * (size - 1)
    assert rows["all_to_all"]["values"] == n * bits // 8


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 64])
def test_the_bytes_of_entries_are_those_that_their_numbers_say(size):
    """Each message is a section of a shard's entries; an owner sends the mean number of what it got, rounded up."""
    n, k, rng = 64 * 200, 128, np.random.default_rng(size)
    grads = [rng.standard_normal(n).astype(np.float32) for _ in range(size)]
    p, sim = Parameter("w", np.zeros(n, np.float32)), simulate(size, SGD(1.0))
    sim.step(lambda rank: [(p, grads[rank].copy())], Packed(TopK(0.01)), False, "two_phase")
    if size == 1:
        return
    from distopt.compress import sections

    borders = [(n * r // size + 32) // 64 * 64 for r in range(size)] + [n]
    sent = np.array(
        [np.diff(np.searchsorted(np.sort(np.argsort(-np.abs(g), kind="stable")[:k]), borders)) for g in grads]
    )
    sizes = np.diff(borders)
    bytes_of = [sections.section_bytes(int(m), int(c), "float16", 4) for m, c in zip(sizes, sent[0], strict=True)]
    rows = {row["verb"]: row for row in sim.ledger.by("phase", "verb") if row["phase"] == "gradients"}
    assert rows["all_to_all"]["sent"] == sum(bytes_of[1:])
    quota = -(-int(sent[:, 0].sum()) // size)
    assert rows["all_gather"]["payload"] == sections.section_bytes(int(sizes[0]), quota, "float16", 4)


@pytest.mark.parametrize("compressor", [Packed(TopK(0.01)), Packed(Threshold(2.5)), TopK(0.02, True)], ids=repr)
def test_the_ledger_shares_entries_out_among_tensors(compressor):
    """Payload, values and indices per tensor; threads count what virtual ranks do."""

    def main(comm):
        metered = Metered(comm)
        trained(metered, ErrorFeedback(compressor), 2)
        return metered.ledger

    ledger = run_ranks(3, main)[0]
    rows = [row for row in ledger.by("phase", "verb") if row["phase"] == "gradients"]
    assert [row["verb"] for row in rows] == ["all_to_all", "all_gather"]
    assert all(0 < row["values"] + row["indices"] < row["payload"] for row in rows)
    tensors = ledger.tensors()
    assert sum(tensors.values()) == sum(row["payload"] for row in rows)
    assert sum(n for name, n in tensors.items() if name[0] == "p") == sum(r["values"] + r["indices"] for r in rows)


# ----------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compressor", [*LOSING_NOTHING, OneBit()], ids=repr)
def test_other_ranks_go_on_with_the_same_pending_mean(compressor, tmp_path):
    """P = 4 to 3, and to 6: the mean over ranks of all that is kept stays, and moves to where it is owned."""

    def save(comm):
        _, states, opt = trained(comm, ErrorFeedback(compressor), 3)
        opt.save(tmp_path)
        return states

    def total(ranks):
        found = [np.zeros(shape) for shape in SHAPES]
        for states in ranks:
            for arrays in states.values():
                for name, a in arrays.items():
                    found[int(name[1:])] += a
        return found

    pending = [a / 4 for a in total(run_ranks(4, save))]
    for size in (3, 6):

        def go_on(comm):
            params = zeros()
            opt = DistOpt(SGD(1.0), comm, threshold=300)
            opt.load(tmp_path, None)
            before = opt.state_dict()["states"]
            nothing = [(p, np.zeros_like(p.data)) for p in params]
            opt.step(nothing, ErrorFeedback(compressor), False, "two_phase")
            return before, [-p.data for p in params], opt.state_dict()["states"]

        ranks = run_ranks(size, go_on)
        for a, b in zip(total([r[0] for r in ranks]), pending, strict=True):
            np.testing.assert_allclose(a / size, b, atol=1e-4)
        for a, x, b in zip(total([r[2] for r in ranks]), ranks[0][1], pending, strict=True):
            np.testing.assert_allclose(a / size + x, b, atol=1e-4)


def test_what_an_owner_owes_is_sent_by_a_gather_too():
    """A change of the exchange, or of the compressor, loses nothing."""

    def main(comm):
        params = zeros()
        opt, found = DistOpt(SGD(1.0), comm, threshold=300), []
        for step, exchange in enumerate(("two_phase", "gather", "two_phase", "two_phase")):
            compressor = ErrorFeedback(TwoBit(2.0) if step == 3 else TopK(0.05))
            opt.step(list(zip(params, integers(0, comm.rank, step), strict=True)), compressor, False, exchange)
            found.append(set(opt.state_dict()["states"]))
        return [p.data for p in params], opt.state_dict()["states"], found

    ranks = run_ranks(3, main)
    assert ranks[0][2] == [{"residual", "owed"}, {"residual"}, {"residual", "owed"}, {"residual", "owed"}]
    for k, shape in enumerate(SHAPES):
        kept = sum(a.get(f"p{k}", np.zeros(shape)).astype(float) for _, states, _ in ranks for a in states.values())
        total = sum(integers(0, rank, step)[k].astype(float) for rank in range(3) for step in range(4))
        np.testing.assert_allclose(kept - 3 * ranks[0][0][k], total, atol=1e-3)


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.sampled(12)
@pytest.mark.parametrize("compressor", [*LOSING_NOTHING, OneBit()], ids=repr)
@pytest.mark.parametrize("n", [0, 1, 5, 65])
def test_shards_may_be_empty(compressor, n):
    """A model of fewer blocks than ranks, and of fewer entries."""

    def main(comm):
        p, opt = Parameter("w", np.zeros(n, np.float32)), DistOpt(SGD(1.0), comm)
        for _ in range(2):
            opt.step([(p, np.full(n, 4.0, np.float32))], ErrorFeedback(compressor), False, "two_phase")
        return p.data

    first, *others = run_ranks(8, main)
    assert all(first.tobytes() == x.tobytes() for x in others)
    assert np.isfinite(first).all()


def test_a_rank_that_has_joined_still_owns_its_shard():
    def main(comm):
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm)
        for _ in range(1 + comm.rank):
            opt.step([(p, np.ones(1000, np.float32))], TopK(1.0), False, "two_phase")
        opt.join()
        return p.data

    for x in run_ranks(3, main):
        np.testing.assert_allclose(x, -3.0)


def test_nan_and_infinity_reach_every_rank():
    def main(comm):
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm, nonfinite="propagate")
        g = np.zeros(1000, np.float32)
        if comm.rank == 1:
            g[[3, 500]] = np.nan, np.inf
        opt.step([(p, g)], ErrorFeedback(Packed(TopK(0.01))), exchange="two_phase")
        return p.data

    for x in run_ranks(3, main):
        assert np.isnan(x[3])
        assert np.isinf(x[500])


class Damaging(Wrapper):
    """Change a byte of what rank 1 sends to rank 0."""

    def all_to_all(self, parts, ragged=False):
        if self.rank == 1 and parts[0].size:
            parts = [parts[0].copy(), *parts[1:]]
            parts[0][0] ^= 64
        return super().all_to_all(parts, ragged)


def test_a_damaged_header_is_refused_where_it_arrives():
    def main(comm):
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), Damaging(comm))
        opt.step([(p, np.ones(1000, np.float32))], Packed(TopK(0.1)), False, "two_phase")

    with pytest.raises(ValueError, match="damaged on its way"):
        run_ranks(3, main)


class Cutting(Wrapper):
    """Leave out the last bytes of what rank 1 sends to rank 0."""

    def all_to_all(self, parts, ragged=False):
        if self.rank == 1:
            parts = [parts[0][:-4], *parts[1:]]
        return super().all_to_all(parts, ragged)


@pytest.mark.parametrize("compressor", [TopK(0.1), TwoBit(), Int8()], ids=repr)
def test_a_message_that_is_too_short_is_refused(compressor):
    def main(comm):
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), Cutting(comm))
        opt.step([(p, np.ones(1000, np.float32))], compressor, False, "two_phase")

    with pytest.raises(ValueError, match="bytes, as its headers say, got"):
        run_ranks(3, main)


def on_mpi(comm):
    found = {}
    for compressor in (*LOSING_NOTHING, OneBit(), DeepGradientCompression(Packed(TopK(0.05)), exclude_1d=False)):
        stateful = compressor if compressor.traits.stateful else ErrorFeedback(compressor)
        metered = Metered(comm)
        values, _, _ = trained(metered, stateful, 3, deterministic=True)
        total = metered.ledger.total()
        found |= {f"{compressor} {k}": x for k, x in enumerate(values)}
        found[f"{compressor} bytes"] = np.array([total["payload"], total["sent"], total["received"]])
    return found


@needs_mpi
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full), 8])
def test_processes_have_the_bits_and_bytes_of_threads(size, tmp_path):
    for processes, threads in zip(run_mpi(size, on_mpi, tmp_path), run_ranks(size, on_mpi), strict=True):
        for name, array in threads.items():
            assert processes[name].tobytes() == array.tobytes(), name


def in_two_dtypes(comm):
    """The bytes of parameters of float32 and of float64, and of 16 bits, after three steps."""
    shapes = {"a": ((3000,), "float32"), "b": ((2000,), "float64"), "c": ((50, 40), "float16")}
    params = [Parameter(name, np.zeros(shape, dtype)) for name, (shape, dtype) in shapes.items()]
    params = laws.move_to_device(comm, params)
    opt = DistOpt(SGD(1.0), comm, threshold=0)
    for step in range(3):
        rng = np.random.default_rng([step, comm.rank])
        grads = [rng.standard_normal(shape).astype(dtype) for shape, dtype in shapes.values()]
        loss = list(zip(params, laws.to_device(comm, grads), strict=True))
        opt.step(loss, ErrorFeedback(Packed(TopK(0.05))), exchange="two_phase")
    return laws.digest(params)


def test_buckets_of_several_dtypes_share_one_exchange():
    digests = run_ranks(3, in_two_dtypes)
    assert digests == digests[:1] * 3


@pytest.mark.parametrize("compressor", [TopK(0.01), Packed(TopK(0.01), value="int8"), Threshold(2.5, False)], ids=repr)
@pytest.mark.parametrize("dtypes", [("f4", "f8"), ("f8", "f4")])
def test_the_make_up_of_messages_counts_each_tensor_in_its_own_dtype(compressor, dtypes):
    """The first phase carries what a gather carries; every section has a header of 4 bytes and indices beside it."""
    n, ranks = 20000, 3

    def gradients(rank):
        rng = np.random.default_rng(rank)
        return [rng.standard_normal(n).astype(dtype) for dtype in dtypes]

    def main(comm):
        comm = Metered(comm)
        params = [Parameter(f"p{k}", np.zeros(n, dtype)) for k, dtype in enumerate(dtypes)]
        opt = DistOpt(SGD(1.0), comm)
        opt.step(list(zip(params, gradients(comm.rank), strict=True)), ErrorFeedback(compressor), False, "two_phase")
        return {row["verb"]: row for row in comm.ledger.by("phase", "verb")}, comm.ledger.tensors()

    rows, by_tensor = run_ranks(ranks, main)[0]
    sent = rows["all_to_all"]
    if isinstance(compressor, Threshold):
        counts = [int((abs(g) >= 2.5).sum()) for g in gradients(0)]
    else:
        counts = [200, 200]
    sizes = [np.dtype(dtype).itemsize for dtype in dtypes]
    if not isinstance(compressor, Packed):
        assert sent["values"] == sum(k * size for k, size in zip(counts, sizes, strict=True))
    for row in (sent, rows["all_gather"]):
        assert 0 < row["indices"] < row["payload"] - row["values"]  # a header is neither
        assert row["indices"] <= 2 * ranks * sum(counts)  # Elias-Fano: 7.6 bits each at a hundredth
    assert sum(by_tensor.values()) == sent["payload"] + rows["all_gather"]["payload"]
    assert all(nbytes >= 0 for nbytes in by_tensor.values())


class Watched(Wrapper):
    """A communicator that keeps what it is asked to send to the owners of shards."""

    def all_to_all(self, parts, ragged=False):
        self.parts = parts
        return self.comm.all_to_all(parts, ragged)


@pytest.mark.parametrize("compressor", [TopK(0.05), Packed(Threshold(1.5), value="bfloat16")], ids=repr)
def test_entries_are_packed_where_messages_have_them(compressor):
    """All buckets' messages to all owners are parts of one memory, which nobody copies once more."""

    def main(comm):
        watched = Watched(comm)
        trained(watched, compressor, 2)
        return len({id(part.base) for part in watched.parts if part.size}), len(watched.parts)

    assert run_ranks(3, main) == [(1, 3)] * 3


@pytest.mark.parametrize(("starts", "moved"), [([8, 24, 40], False), ([0, 8, 40], True), ([24, 8, 40], True)])
def test_arrays_that_lie_as_they_should_are_not_copied(starts, moved):
    memory = np.arange(64, dtype=np.uint8)
    parts = [memory[start : start + 13] for start in starts]
    whole = device.concatenated(parts, aligned=16)
    for k, part in enumerate(parts):
        np.testing.assert_array_equal(whole[16 * k : 16 * k + 13], part)
    assert whole.size == 45
    assert np.shares_memory(whole, memory) != moved
