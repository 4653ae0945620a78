"""Virtual ranks have the bits, and the bytes, of ranks that are threads and of ranks that are processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import Metered
from distopt.compress import (
    DCT,
    Compressor,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    OneBit,
    Packed,
    TopK,
    Traits,
)
from distopt.optim import LAMB, SGD, Adam
from launch import needs_mpi, run_mpi


class EveryThird(Compressor):
    """Another's compressor, whose payloads may be summed and have fewer elements than the bucket."""

    traits = Traits(summable=True)

    def payload_bytes(self, n, itemsize=4, layout=None):
        return itemsize * -(-n // 3)

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        payload = x[::3].copy()
        x[::3] = 0
        return payload

    def decompress(self, payload, out, context):
        out[...] = 0
        out[::3] = payload


SHAPES = [(40, 50), (7,), (3, 5, 9), (100,), (0,), ()]
MODES = {mode: step for mode, step in laws.MODES.items() if mode not in laws.APART} | {
    "half that may overflow": lambda opt, loss: opt.step(loss, Half(predivide=False)),
    "one bit, never dense": lambda opt, loss: opt.step(loss, ErrorFeedback(OneBit()), break_even=False),
    "dense top-K in two phases": lambda opt, loss: opt.step(loss, TopK(0.97, per_tensor=True), exchange="two_phase"),
    "every third": lambda opt, loss: opt.step(loss, ErrorFeedback(EveryThird())),
}
NESTEROV = DeepGradientCompression(Packed(TopK(0.1)), nesterov=True, weight_decay=0.01, exclude_1d=False, min_numel=8)
STEPS = 4


def train(comm, mode, make=lambda: SGD(0.05), dtype="float32", threshold=200):
    """The parameters of one rank of several, and its ledger."""
    metered = Metered(comm)
    params = laws.parameters(SHAPES, dtype)
    opt = DistOpt(make(), metered, threshold=threshold, deterministic=True)
    for step in range(STEPS):
        MODES[mode](opt, laws.pairs(comm, params, step))
    return [p.data for p in params], metered.ledger


def walk(size, mode, make=lambda: SGD(0.05), dtype="float32", threshold=200):
    params = laws.parameters(SHAPES, dtype)
    sim = simulate(size, make(), threshold=threshold)
    for step in range(STEPS):
        MODES[mode](sim, lambda rank, step=step: laws.pairs(laws.VirtualRank(rank, size), params, step))
    return [p.data for p in params], sim.ledger


def same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


def comparable(ledger):
    """Entry by entry, but for the order in which buckets and lengths come."""
    return sorted(tuple(map(str, entry)) for entry in ledger.entries)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_virtual_ranks_have_the_bits_and_bytes_of_threads(mode, size):
    params, ledger = walk(size, mode)
    expected, written = run_ranks(size, lambda comm: train(comm, mode))[0]
    same(params, expected)
    assert comparable(ledger) == comparable(written)
    assert ledger.tensors() == written.tensors()


@pytest.mark.parametrize("make", [lambda: Adam(0.01), lambda: LAMB(0.01), lambda: SGD(0.1, momentum=0.9)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_virtual_ranks_have_the_bits_of_threads_for_any_optimizer_and_dtype(make, dtype):
    params, _ = walk(3, "topk", make, dtype)
    expected, _ = run_ranks(3, lambda comm: train(comm, "topk", make, dtype))[0]
    same(params, expected)


@pytest.mark.thorough
@given(
    size=st.integers(1, 6),
    mode=st.sampled_from(sorted(MODES)),
    threshold=st.sampled_from([0, 50, 10**6]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_virtual_ranks_have_the_bits_and_bytes_of_threads_for_any_plan(size, mode, threshold, dtype):
    params, ledger = walk(size, mode, dtype=dtype, threshold=threshold)
    expected, written = run_ranks(size, lambda comm: train(comm, mode, dtype=dtype, threshold=threshold))[0]
    same(params, expected)
    assert comparable(ledger) == comparable(written)


def on_mpi(comm, modes):
    """Some modes; what processes send themselves is what ``deterministic`` makes of a sum."""
    found = {}
    for mode in modes:
        params, ledger = train(comm, mode)
        found |= {f"{mode} {k}": data for k, data in enumerate(params)} | {mode: np.array(comparable(ledger))}
    return found


@needs_mpi
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_virtual_ranks_have_the_bits_and_bytes_of_processes(size, every, tmp_path):
    """Each mode on one number of ranks, or on every one."""
    modes = list(MODES)[size % every :: every]
    ranks = run_mpi(size, on_mpi, tmp_path, modes)
    for mode in modes:
        params, ledger = walk(size, mode)
        same(params, [ranks[-1][f"{mode} {k}"] for k in range(len(SHAPES))])
        assert np.array(comparable(ledger)).tolist() == ranks[0][mode].tolist()


@pytest.mark.parametrize("exchange", ["gather", pytest.param("auto", marks=pytest.mark.thorough)])
def test_a_thousand_virtual_ranks_lose_nothing_and_count_their_bytes(exchange):
    """1024 ranks of a small model: only what a compressor keeps is there 1024 times."""
    w = laws.parameters([(100, 10)])[0]
    sim = simulate(1024, SGD(0.1))
    start, total = w.data.copy(), np.zeros((100, 10))
    for step in range(3):
        grads = [np.random.default_rng((step, r)).standard_normal((100, 10)).astype("f4") for r in range(1024)]
        total += np.sum(grads, 0, np.float64) / 1024
        sim.step(lambda rank: [(w, grads[rank])], ErrorFeedback(TopK(0.01)), False, exchange)  # noqa: B023
    kept = sum(flat.reshape(100, 10).astype(float) for (state,) in sim._losses.states for flat in state.values())
    np.testing.assert_allclose((start - w.data) / 0.1 + kept / 1024, total, atol=1e-4)
    rows = [row for row in sim.ledger.by("verb", "phase") if row["phase"] == "gradients"]
    if exchange == "gather":
        assert rows[0]["payload"] == 3 * 10 * 8
        assert rows[0]["sent"] == rows[0]["payload"] * 1023
    else:  # of the 16 blocks one is rank 0's
        assert sum(row["sent"] for row in rows) < 3 * (4 * 16 + 10 * 8 + 1023 * 100)


def test_state_that_all_ranks_have_alike_is_kept_once():
    """The momentum of DGC's weight decay; residual and velocity are each rank's own."""
    params = laws.parameters([(20,), (30,)])
    sim = simulate(3, SGD(0.1), threshold=0)
    sim.step(lambda rank: laws.pairs(laws.VirtualRank(rank, 3), params, 0), NESTEROV)
    own = {"residual", "velocity"}
    assert [set(state) for kept in sim._losses.states for state in kept] == 2 * [own | {"decay"}] + 4 * [own]


def test_bytes_between_hosts_are_counted_apart():
    """The second step too, of which ranks on several machines would send buckets before the last gradient comes."""
    params = laws.parameters([(100,)])
    sim = simulate(4, SGD(0.1), hosts=[0, 0, 1, 1])
    for step in range(2):
        sim(lambda rank: laws.pairs(laws.VirtualRank(rank, 4), params, step))  # noqa: B023
    (row,) = (row for row in sim.ledger.by("phase") if row["phase"] == "gradients")
    assert (row["sent"], row["sent_between"]) == (1200, 800)


def test_gradients_may_live_in_views():
    params = laws.parameters([(30,), (5,)])
    sim = simulate(3, SGD(0.1))
    views = sim.gradient_views(params)

    def losses(rank):
        for p, view in zip(params, views, strict=True):
            view[...] = rank
            yield p, view

    before = [p.data.copy() for p in params]
    sim(losses)
    for p, b in zip(params, before, strict=True):
        np.testing.assert_allclose(b - p.data, 0.1 * np.ones_like(b), rtol=1e-5, atol=1e-6)


def simulation(**options):
    params = laws.parameters([(20,), (30,)])
    return params, simulate(3, SGD(0.1), **options)


def losses_of(params, bad):
    def losses(rank):
        pairs = laws.pairs(laws.VirtualRank(rank, 3), params, 0)
        return bad(pairs) if rank == 2 else pairs

    return losses


GOES_ON = [
    Dense(),
    TopK(0.1),
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(Packed(TopK(0.1))),
    DCT(ErrorFeedback(TopK(0.1))),
    DeepGradientCompression(TopK(0.1), weight_decay=0.1, exclude_1d=False),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("exchange", ["auto", "two_phase", "nodes"])
@pytest.mark.parametrize("compressor", GOES_ON, ids=repr)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_step_that_raised_has_changed_nothing_and_training_goes_on(compressor, exchange, at):
    """As with threads, and to their bits: gradients of ranks 2 and 3 that are not finite, then a loss that raises."""

    def bad(pairs, rank, kind):
        if rank < 2:
            return pairs
        if kind == "raises":
            raise ZeroDivisionError("a loss")
        return [(p, grad / np.float32(0)) for p, grad in pairs]

    def trained(params, opt, loss_of):
        texts = []
        for step in range(4):
            for kind in ("not finite", "raises") if step == at else ():
                with pytest.raises((FloatingPointError, RuntimeError)) as caught:
                    opt.step(
                        loss_of(lambda r, step=step, kind=kind: bad(pairs_of(params, step, r), r, kind)),
                        compressor,
                        exchange=exchange,
                    )
                texts.append(str(caught.value))
            opt.step(loss_of(lambda r, step=step: pairs_of(params, step, r)), compressor, exchange=exchange)
        return texts, laws.digest(params)

    def pairs_of(params, step, rank):
        return list(laws.pairs(laws.VirtualRank(rank, 4), params, step))

    def main(comm):
        comm._hosts = hosts
        params = laws.parameters([(20,), (30, 4)])
        return trained(params, DistOpt(SGD(0.1), comm), lambda losses: lambda: losses(comm.rank))

    hosts, params = [0, 0, 1, 1], laws.parameters([(20,), (30, 4)])
    found = trained(params, simulate(4, SGD(0.1), hosts=hosts), lambda losses: losses)
    assert found == run_ranks(4, main)[0]
    assert "rank 2: " in found[0][0]
    assert "; rank 3: " in found[0][0], "all ranks are named"


def test_an_update_that_fails_ends_the_simulation():
    class Moody:
        def update(self, param, grad):
            raise OSError("mood")

    params, _ = simulation()
    sim = simulate(3, Moody())
    with pytest.raises(OSError, match="mood"):
        sim(losses_of(params, list))
    with pytest.raises(RuntimeError, match="the update of step 1 failed halfway with OSError: mood; start anew"):
        sim(losses_of(params, list))


WRONG = {
    "dtype": lambda pairs: [(pairs[0][0], pairs[0][1].astype("f8")), pairs[1]],
    "shape": lambda pairs: [(pairs[0][0], pairs[0][1][1:]), pairs[1]],
    "missing": lambda pairs: pairs[:1],
    "twice": lambda pairs: [*pairs, pairs[0]],
    "no pairs": lambda pairs: [1, 2],
    "none": lambda pairs: None,
    "what raises": lambda pairs: 1 / 0,
    "not finite": lambda pairs: [(p, grad / np.float32(0)) for p, grad in pairs],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_virtual_ranks_raise_the_errors_that_threads_raise(wrong, rank):
    """In the second step, since in the first one the others' plans differ."""

    def losses_of(params, step):
        def losses(r):
            pairs = list(laws.pairs(laws.VirtualRank(r, 3), params, 0))
            return WRONG[wrong](pairs) if (r, step) == (rank, 1) else pairs

        return losses

    def raised(params, opt, loss_of):
        opt(loss_of(losses_of(params, 0)))
        with pytest.raises((ValueError, TypeError, RuntimeError, FloatingPointError)) as caught:
            opt(loss_of(losses_of(params, 1)))
        return type(caught.value), str(caught.value)

    def main(comm):
        params = laws.parameters([(20,), (30,)])
        return raised(params, DistOpt(SGD(0.1), comm), lambda losses: lambda: losses(comm.rank))

    assert raised(*simulation(), lambda losses: losses) == run_ranks(3, main)[0]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_missing_gradient_of_any_rank_counts_as_zeros(who):
    """Of ranks with the same gradients two thirds of it are left, whichever has none."""
    p, q = laws.parameters([(20,), (30,)])
    before = q.data.copy()
    sim = simulate(3, SGD(1.0), allow_missing=True)
    sim(lambda rank: [(p, np.ones(20, p.data.dtype)), (q, None if rank == who else np.ones(30, q.data.dtype))])
    np.testing.assert_allclose(before - q.data, 2 / 3, rtol=1e-6)


def test_the_order_of_the_first_step_is_the_plan():
    """Not the later ones', nor that of a step after ``gradient_views``."""
    params, sim = simulation()

    def mixed(rank):
        return list(laws.pairs(laws.VirtualRank(rank, 3), params, 0))[:: 1 - 2 * (rank % 2)]

    sim.gradient_views(params)
    assert sim(mixed)
    params, sim = simulation()
    sim(losses_of(params, list))
    assert sim(mixed)
    params, sim = simulation()
    with pytest.raises(ValueError, match="rank 1: ranks differ: rank 0 has parameter 0 = p0, this one has p1"):
        sim(mixed)
    params, sim = simulation(allow_missing=True)
    with pytest.raises(ValueError, match="rank 2: ranks differ: rank 0 has parameter 1 = p1, this one has nothing"):
        sim(losses_of(params, lambda pairs: list(pairs)[:1]))


class Loss:
    def __init__(self, pairs):
        self.pairs = pairs

    def backward(self):
        yield from self.pairs


@pytest.mark.parametrize(
    "form", [iter, Loss, lambda pairs: lambda: pairs, lambda pairs: lambda: Loss(pairs).backward()]
)
def test_a_loss_of_virtual_ranks_may_have_any_form(form):
    params, sim = simulation()
    expected, other = simulation()
    sim(lambda rank: form(laws.pairs(laws.VirtualRank(rank, 3), params, 0)))
    other(lambda rank: laws.pairs(laws.VirtualRank(rank, 3), expected, 0))
    same([p.data for p in params], [p.data for p in expected])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_loss_that_makes_a_step_is_refused(rank):
    params, sim = simulation()

    def losses(r):
        if r == rank:
            sim(losses_of(params, list))
        return losses_of(params, list)(r)

    with pytest.raises(RuntimeError, match=f"rank {rank}: steps of virtual ranks must be outside of their losses"):
        sim(losses)


def test_a_step_refused_on_the_first_rank_can_be_tried_again():
    params, sim = simulation()
    with pytest.raises(ValueError, match="no gradient for p0"):
        sim(lambda rank: [(params[1], params[1].data), (params[0], None)])
    assert sim(losses_of(params, list))


def test_what_is_not_finite_names_the_rank():
    params, sim = simulation()
    nan = np.full(30, np.nan, np.float32)
    with pytest.raises(FloatingPointError, match=r"rank 2: p1 \(30 of 30 entries\)"):
        sim(losses_of(params, lambda pairs: [(params[0], np.zeros(20, "f4")), (params[1], nan)]))
    params, sim = simulation(nonfinite="propagate")
    sim(losses_of(params, lambda pairs: [(params[0], np.zeros(20, "f4")), (params[1], nan)]))
    assert np.isnan(params[1].data).all()


def test_a_sum_that_overflows_is_refused():
    """As by threads, which share memory; and nothing is applied."""
    large = np.full(20, 3e38, np.float32)

    def main(comm):
        p = Parameter("p", np.ones(20, np.float32))
        with pytest.raises(FloatingPointError, match=r"step 1 are not finite: the sum over ranks"):
            DistOpt(SGD(0.1), comm)([(p, large.copy())])
        return p.data

    params, sim = simulation()
    for data in run_ranks(3, main):
        assert (data == 1).all()
    before = params[0].data.copy()
    for compressor in (Dense(), ErrorFeedback(TopK(0.5))):
        with pytest.raises(FloatingPointError, match=r"step 1 are not finite: the sum over ranks \(\d+ entries\)"):
            sim.step(lambda rank: [(params[0], large.copy())], compressor)
        same([before], [params[0].data])
    with pytest.raises(RuntimeError, match=r"what the ranks sent in step 1 is lost: .*; start anew"):
        sim(lambda rank: [(params[0], large * 0)])


@pytest.mark.parametrize("copied", ["parameters", "data"])
def test_ranks_with_parameters_of_their_own_are_refused(copied):
    """A rank with parameters of its own, or that puts other arrays into them, would train them alone."""
    params, sim = simulation()
    own = [Parameter(p.name, p.data.copy()) for p in params]

    def losses(rank):
        if rank == 1 and copied == "data":
            params[1].data = params[1].data.copy()
        given = own if rank == 1 and copied == "parameters" else params
        return [(p, np.ones_like(p.data)) for p in given]

    with pytest.raises(
        ValueError,
        match=r"rank 1: p\d must be the first rank's array, got another one; the ranks of a process have one",
    ):
        sim(losses)


def test_parameters_may_be_made_anew_around_the_same_arrays():
    params, sim = simulation()
    before = [p.data.copy() for p in params]
    for _ in range(2):
        sim(lambda rank: [(Parameter(p.name, p.data[:]), np.full_like(p.data, rank)) for p in params])
    for p, b in zip(params, before, strict=True):
        np.testing.assert_allclose(b - p.data, np.full_like(b, 0.2), atol=1e-6)


@pytest.mark.parametrize("hosts", [5, None, "ab", {0: 1, 1: 2}, np.array(5), [0.5, 1], [True, 1], [0, [1]], [-1, 0]])
def test_hosts_must_be_one_number_per_rank(hosts):
    with pytest.raises((TypeError, ValueError), match=r"hosts(\[\d\])? must be"):
        simulate(2, hosts=hosts)
    assert simulate(2, hosts=np.array([0, 1])).communicator.hosts == [0, 1]


COLLECTIVES = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather of any lengths": lambda comm, x: comm.all_gather(x, ragged=True),
    "all_gather into": lambda comm, x: comm.all_gather(x, into=np.empty(3 * x.size, x.dtype)),
    "all_to_all": lambda comm, x: comm.all_to_all([x[:3], x[3:5], x[5:]], ragged=True),
    "broadcast": lambda comm, x: comm.broadcast(x, root=2),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.parametrize("verb", COLLECTIVES)
def test_a_collective_is_one_of_ranks_that_bring_the_same(verb, dtype):
    def main(comm):
        x = np.arange(7).astype(dtype)
        returned = COLLECTIVES[verb](comm, x)
        return [x, *(returned or [])], comm.ledger

    arrays, ledger = main(simulation()[1].communicator)
    expected, written = run_ranks(3, lambda comm: main(Metered(comm)))[0]
    same(arrays, expected)
    assert comparable(ledger) == comparable(written)


def test_other_verbs_are_those_of_ranks_that_bring_the_same():
    comm = simulation()[1].communicator
    assert comm.reduce_scatter(np.arange(7.0)).tolist() == [0, 3]
    assert comm.lengths(5) == [5, 5, 5]
    assert comm.broadcast_object([1, "a"], root=2) == [1, "a"]
    assert comm.control.gather_texts(["call"], lambda: "text") == ["text"] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_loss_exchanges_nothing(rank):
    params, sim = simulation()

    def losses(r):
        if r == rank:
            sim.communicator.all_reduce(np.ones(3))
        return losses_of(params, list)(r)

    with pytest.raises(RuntimeError, match=f"rank {rank}: collectives of virtual ranks must be outside of their loss"):
        sim(losses)


def test_virtual_ranks_refuse_wrong_arguments_and_have_no_state():
    params, sim = simulation()
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        simulate(0)
    with pytest.raises(TypeError, match=r"size must be an integer, got 2\.5"):
        simulate(2.5)
    with pytest.raises(ValueError, match="hosts must be one number per rank, 4 of them, got 2"):
        simulate(4, hosts=[0, 1])
    with pytest.raises(ValueError, match="nonfinite must be 'raise' or 'propagate' for virtual ranks, got 'skip'"):
        simulate(4, nonfinite="skip")
    with pytest.raises(TypeError, match="allow_missing must be True or False, got 'no'"):
        simulate(4, allow_missing="no")
    with pytest.raises(TypeError, match="the losses of virtual ranks must be a callable of the rank, got list"):
        sim([(params[0], params[0].data)])
    sim(losses_of(params, list))
    with pytest.raises(ValueError, match="threshold must stay 2097152 with virtual ranks, got 5"):
        sim.backward_and_update(losses_of(params, list), threshold=5)
    for name in (
        "state_dict",
        "save",
        "load",
        "save_when_stopped",
        "join",
        "all_reduce",
        "backward_and_partial_update",
    ):
        assert not hasattr(sim, name), "what compressors keep of all ranks is in no state, and none has its own"
