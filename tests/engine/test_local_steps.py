"""Local steps: the laws of DiLoCo and of its streaming form, on ranks whose gradients differ."""

import copy
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import DistOpt, LocalSteps, Parameter, run_ranks, simulate_local
from distopt.comm import Metered
from distopt.compress import Chunks, DeepGradientCompression, Dense, ErrorFeedback, Half, Int8, Packed, TopK
from distopt.engine.outer_loop import Windows, cut
from distopt.lab.tape.join import join
from distopt.optim import SGD, Adam, AdamW
from launch import needs_mpi, run_mpi

SHAPES = {"w": (7, 5), "b": (5,), "v": (300,), "s": ()}


def parameters(dtype=np.float32, shapes=SHAPES):
    rng = np.random.default_rng(5)
    return [Parameter(name, np.asarray(rng.normal(size=shape), dtype)) for name, shape in shapes.items()]


def loss(params, rank, step, away=0.3):
    """The gradient of a convex quadratic whose lowest point is another one on each rank, with noise of its own."""
    rng = np.random.default_rng((rank, step))
    for p in params:
        x = p.data.astype(np.float64)
        yield p, np.asarray(away * (x - rank) + 0.01 * rng.normal(size=x.shape), p.data.dtype)


def train(comm, steps, make=lambda: SGD(0.1), dtype=np.float32, start=0, **options):
    params = parameters(dtype)
    opt = LocalSteps(make(), comm, **options)
    for step in range(start, steps):
        opt(list(loss(params, comm.rank, step)))
    return opt, params


def data(params):
    return [p.data.copy() for p in params]


def reference(ranks, steps, every, lr=0.7, momentum=0.9, inner=0.1):
    """DiLoCo in float64: plain SGD inside, Nesterov's momentum outside."""
    start = [p.data.astype(np.float64) for p in parameters(np.float64)]
    local = [copy.deepcopy(start) for _ in range(ranks)]
    velocity = [np.zeros_like(x) for x in start]
    for step in range(steps):
        for rank, mine in enumerate(local):
            holders = [Parameter(name, x) for name, x in zip(SHAPES, mine, strict=True)]
            for k, (_, gradient) in enumerate(loss(holders, rank, step)):
                mine[k] = mine[k] - inner * gradient
        if (step + 1) % every:
            continue
        for k, x in enumerate(start):
            gradient = np.mean([x - mine[k] for mine in local], axis=0)
            velocity[k] = momentum * velocity[k] + gradient
            start[k] = x - lr * (gradient + momentum * velocity[k])
        local = [copy.deepcopy(start) for _ in range(ranks)]
    return local


@pytest.mark.parametrize("every", [1, 3, 8])
def test_local_steps_are_diloco(every):
    ranks, steps = 3, 2 * every + 2
    found = run_ranks(ranks, lambda comm: data(train(comm, steps, dtype=np.float64, every=every)[1]))
    for mine, expected in zip(found, reference(ranks, steps, every), strict=True):
        for x, wanted in zip(mine, expected, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-13)


def test_windows_of_one_step_are_dense_steps():
    def main(comm):
        params = parameters()
        opt = LocalSteps(SGD(0.1), comm, every=1, outer=SGD(1.0))
        others, dense = parameters(), DistOpt(SGD(0.1), comm, deterministic=True)
        for step in range(5):
            before = data(params)
            gradients = [[g for _, g in loss(params, rank, step)] for rank in range(3)]
            local = [[x - np.float32(0.1) * g for x, g in zip(before, mine, strict=True)] for mine in gradients]
            for p, other in zip(params, others, strict=True):
                other.data[...] = p.data
            opt(list(loss(params, comm.rank, step)))
            dense(list(loss(others, comm.rank, step)))
            for p, other, *passed in zip(params, others, before, *local, strict=True):
                ulp = np.spacing(np.max(np.abs(passed), axis=0))  # of the largest number on the way
                assert (np.abs(p.data - other.data) <= ulp).all()

    run_ranks(3, main)


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01), lambda: AdamW(0.01)])
@pytest.mark.parametrize("every", [1, 4])
def test_one_rank_has_its_own_optimizers_steps(make, every):
    def main(comm):
        _, params = train(comm, 8, make, every=every, outer=SGD(1.0))
        alone = parameters()
        rule = make()
        for step in range(8):
            rule(list(loss(alone, 0, step)))
        for p, expected in zip(params, alone, strict=True):
            np.testing.assert_allclose(p.data, expected.data, rtol=4e-6, atol=1e-7)

    run_ranks(1, main)


@given(every=st.integers(1, 6), lr=st.floats(0.05, 1.0), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_each_exchange_lowers_a_convex_loss(every, lr, ranks, seed):
    rng = np.random.default_rng(seed)
    curvature, lowest, start = rng.uniform(0.2, 1.0, 6), rng.normal(size=(4, 6)), 10 * rng.normal(size=6)

    def main(comm):
        p = Parameter("w", start.copy())
        opt, losses = LocalSteps(SGD(0.5), comm, every=every, outer=SGD(lr)), []
        for step in range(4 * every):
            if step % every == 0:
                losses.append(sum(float(curvature @ (p.data - lowest[r]) ** 2) for r in range(ranks)))
            opt([(p, curvature * (p.data - lowest[comm.rank]))])
        return losses

    for losses in run_ranks(ranks, main):
        floor = sum(float(curvature @ (lowest[:ranks].mean(0) - lowest[r]) ** 2) for r in range(ranks))
        above = np.array(losses) - floor
        assert (np.diff(above) < 1e-9 * above[0]).all()


COMPRESSORS = {
    "dense": lambda: Dense(),
    "half": lambda: Half(),
    "int8": lambda: ErrorFeedback(Int8()),
    "top-K": lambda: ErrorFeedback(Packed(TopK(0.05))),
    "dgc": lambda: DeepGradientCompression(TopK(0.05), momentum=0.5),
    "chunks": lambda: ErrorFeedback(Packed(Chunks(4, 64), value="2bit"), decay=0.95),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_all_ranks_have_the_same_bits_after_an_exchange(name, exchange):
    def main(comm):
        make = COMPRESSORS[name]
        outer = SGD(0.7) if name == "dgc" else None
        opt, params = train(comm, 6, every=3, compressor=make(), outer=outer, exchange=exchange, break_even=False)
        after = data(params)
        opt(list(loss(params, comm.rank, 6)))
        return after, data(params)

    found = run_ranks(3, main)
    for after, inside in found[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(after, found[0][0], strict=True))
        assert not np.array_equal(inside[2], found[0][1][2])


def test_over_senders_is_the_mean_of_those_that_sent():
    """SparseLoCo without rounding: entries of which one rank of two has sent anything."""

    def main(comm):
        p = Parameter("w", np.zeros(128))
        opt = LocalSteps(
            *(SGD(1.0), comm), every=2, outer=SGD(1.0), compressor=Chunks(1, 64), over="senders", exchange="two_phase"
        )
        g = np.zeros(128)
        g[[3, 70 + comm.rank]] = 1.0, 2.0
        for _ in range(2):
            opt([(p, g)])
        return p.data

    for x in run_ranks(2, main):
        assert dict(zip(np.flatnonzero(x).tolist(), x[x != 0].tolist(), strict=True)) == {3: -2.0, 70: -4.0}


def entries(comm):
    return [e for e in comm.ledger.entries if e.phase == "gradients"]


@pytest.mark.parametrize("name", ["dense", "half", "int8"])
def test_a_window_sends_what_one_step_sends(name):
    def main(comm):
        one = Metered(comm)
        opt, params = DistOpt(SGD(0.1), one, threshold=40), parameters()
        opt.step(list(loss(params, comm.rank, 0)), COMPRESSORS[name]())
        many = Metered(comm)
        train(many, 7, every=7, compressor=COMPRESSORS[name](), threshold=40)
        assert entries(one)
        return [[(e.verb, e.payload, e.sent, e.received) for e in entries(m)] for m in (one, many)]

    for one, many in run_ranks(3, main):
        assert many == one


@given(every=st.integers(1, 40), data=st.data())
def test_each_fragment_is_sent_once_in_a_window(every, data):
    fragments = data.draw(st.integers(1, every))
    windows = Windows.checked(every, fragments, 0)
    sent = [windows.sent_after(step) for step in range(1, 2 * every + 1)]
    assert sent[:every] == sent[every:]
    assert [f for f in sent[:every] if f is not None] == list(range(fragments))
    assert sent[every - 1] == fragments - 1
    gaps = np.diff([0] + [k + 1 for k, f in enumerate(sent[:every]) if f is not None])
    assert gaps.max() - gaps.min() <= 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_fragments_are_balanced(sizes, fragments):
    runs = cut(sizes, fragments)
    assert [k for run in runs for k in run] == list(range(len(sizes)))
    assert max(sum(sizes[k] for k in run) for run in runs) <= sum(sizes) / fragments + max(sizes, default=0)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_the_bytes_of_a_step_are_those_of_its_fragment(fragments, delay):
    def main(comm):
        metered = Metered(comm)
        sent = []
        params = parameters()
        opt = LocalSteps(SGD(0.1), metered, every=4, fragments=fragments, delay=delay)
        for step in range(8):
            opt(list(loss(params, comm.rank, step)))
            _ = opt.global_parameters
            sent.append(sum(e.payload for e in entries(metered)))
        return np.diff([0, *sent])

    nbytes = [p.data.nbytes for p in parameters()]
    for sent in run_ranks(2, main):
        assert sent[:4].tolist() == sent[4:].tolist()
        assert sum(nbytes) <= sum(sent[:4]) <= sum(nbytes) + 64 * len(nbytes)  # members begin at multiples of 64 bytes
        assert max(sent) <= sum(nbytes) / fragments + max(nbytes) + 64 * len(nbytes)


def streaming(ranks, steps, every, fragments, delay, alpha, lr=0.4, inner=0.1):
    """Streaming DiLoCo in float64, with plain SGD inside and outside."""
    names = list(SHAPES)
    runs = cut([p.data.nbytes for p in parameters(np.float64)], fragments)
    whole = [p.data.astype(np.float64) for p in parameters(np.float64)]
    local, landing = [copy.deepcopy(whole) for _ in range(ranks)], {}
    for step in range(1, steps + 1):
        for rank, mine in enumerate(local):
            holders = [Parameter(name, x) for name, x in zip(names, mine, strict=True)]
            for k, (_, gradient) in enumerate(loss(holders, rank, step - 1)):
                mine[k] = mine[k] - inner * gradient
        number = next((f for f in range(fragments) if (step - 1) % every + 1 == (f + 1) * every // fragments), None)
        if number is not None:
            for k in runs[number]:
                whole[k] = whole[k] - lr * np.mean([whole[k] - mine[k] for mine in local], axis=0)
            landing.setdefault(step + delay, []).extend(runs[number])
        for k in landing.pop(step, []):
            for mine in local:
                mine[k] = alpha * mine[k] + (1 - alpha) * whole[k]
    return local


@pytest.mark.parametrize(("fragments", "delay", "alpha"), [(1, 2, 0.0), (2, 1, 0.5), (3, 4, 0.25), (5, 0, 0.5)])
def test_fragments_are_streaming_diloco(fragments, delay, alpha):
    def main(comm):
        options = {"every": 5, "fragments": fragments, "delay": delay, "alpha": alpha, "outer": SGD(0.4)}
        return data(train(comm, 13, dtype=np.float64, **options)[1])

    for mine, expected in zip(run_ranks(3, main), streaming(3, 13, 5, fragments, delay, alpha), strict=True):
        for x, wanted in zip(mine, expected, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("streams", [{}, {"fragments": 2, "delay": 2, "alpha": 0.5}])
@pytest.mark.parametrize("name", ["dense", "top-K"])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_training_goes_on_to_the_bit_from_any_step(streams, name, at, tmp_path):
    options = {"every": 3, "compressor": COMPRESSORS[name](), "num_batches": 2, **streams}

    def whole(comm):
        return data(train(comm, 13, lambda: Adam(0.01), **options)[1])

    def saved(comm):
        opt, params = train(comm, at, lambda: Adam(0.01), **options)
        opt.save(tmp_path, params, extra={"at": at})

    def resumed(comm):
        opt, params = LocalSteps(Adam(0.01), comm, **options), parameters()
        start = opt.load(tmp_path, params)["at"]
        for step in range(start, 13):
            opt(list(loss(params, comm.rank, step)))
        return data(params)

    expected = run_ranks(2, whole)
    run_ranks(2, saved)
    for mine, wanted in zip(run_ranks(2, resumed), expected, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(mine, wanted, strict=True))


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("local", [True, False])
def test_other_ranks_go_on_in_the_middle_of_a_window_of_batches(local, before, after, tmp_path):
    """Each rank with the mean of the saved windows, for a step of its own: here all of them had the same one."""

    def trained(comm, steps, start=0):
        params = parameters()
        if local:
            step = opt = LocalSteps(Adam(0.01), comm, every=3, num_batches=2)
        else:
            opt = DistOpt(Adam(0.01), comm, num_batches=2)
            step = opt.backward_and_partial_update
        if start:
            opt.load(tmp_path, params)
        for number in range(start, steps):
            step(list(loss(params, 0, number)))
        return opt, params

    def saved(comm):
        opt, params = trained(comm, 3)
        opt.save(tmp_path, params)

    run_ranks(before, saved)
    expected = data(run_ranks(1, lambda comm: trained(comm, 5))[0][1])
    for mine in run_ranks(after, lambda comm: data(trained(comm, 5, 3)[1])):
        for x, wanted in zip(mine, expected, strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-6)


@pytest.mark.parametrize("streams", [{}, {"fragments": 2, "delay": 1}, {"fragments": 3, "delay": 3, "alpha": 0.5}])
def test_ranks_without_batches_join(streams):
    def main(comm):
        opt, params = train(comm, 5 + 4 * comm.rank, every=4, **streams)
        opt.join()
        joined = data(params), opt.step_counter
        for step in range(4):
            opt(list(loss(params, comm.rank, step)))
        return joined, opt.step_counter

    found = run_ranks(3, main)
    for (params, count), after in found:
        assert all(np.array_equal(x, y) for x, y in zip(params, found[0][0][0], strict=True))
        assert count == found[0][0][1]
        assert after == count + 4


def test_what_a_rank_has_done_before_it_joins_counts():
    def main(comm):
        p = Parameter("w", np.zeros(3))
        opt = LocalSteps(SGD(1.0), comm, every=10, outer=SGD(1.0))
        for _ in range([4, 14, 7][comm.rank]):
            opt([(p, np.ones(3))])
        opt.join()
        return p.data.tolist()

    # after step 10 the mean of 4, 10 and 7 steps; then 4 steps of the only rank that has batches
    assert run_ranks(3, main) == [[-11.0] * 3] * 3


def test_sixteen_bits_follow_their_masters():
    def main(comm):
        opt, params = train(comm, 9, lambda: SGD(0.01, multi_precision=True), np.float16, every=3, outer=SGD(1.0))
        wide = data(train(comm, 9, lambda: SGD(0.01), every=3, outer=SGD(1.0))[1])
        masters = opt.opt.get_states()["master"]
        return data(params), wide, masters

    for narrow, wide, masters in run_ranks(2, main):
        for x, y, name in zip(narrow, wide, SHAPES, strict=True):
            assert np.array_equal(x, masters[name].astype(np.float16))
            np.testing.assert_allclose(masters[name], y, rtol=2e-2, atol=2e-3)


def test_rounding_of_global_values_is_no_step():
    def main(comm):
        p = Parameter("w", np.array([1.0, 1.0], np.float16))
        opt = LocalSteps(SGD(0.25), comm, every=1, outer=SGD(0.0004))
        opt([(p, np.array([1.0, 0.0], np.float16))])  # a step of 0.0001, below the resolution
        first = opt.global_parameters["w"].copy()
        for _ in range(3):
            opt([(p, np.zeros(2, np.float16))])
        assert p.data.tolist() == [1.0, 1.0]
        assert np.array_equal(opt.global_parameters["w"], first)
        assert 0.99985 < first[0] < 0.99995

    run_ranks(2, main)


def test_a_refused_step_counts_in_the_window():
    def main(comm):
        p = Parameter("w", np.zeros(2, np.float32))
        opt = LocalSteps(SGD(1.0), comm, every=3, outer=SGD(1.0), nonfinite="skip")
        applied = [opt([(p, np.full(2, np.nan if comm.rank and step == 1 else 1.0, np.float32))]) for step in range(3)]
        return applied, p.data.tolist(), opt.skipped

    found = run_ranks(2, main)
    assert found[0] == ([True] * 3, [-2.5, -2.5], 0)
    assert found[1] == ([True, False, True], [-2.5, -2.5], 1)


MISTAKES = [
    ({"every": 0}, ValueError, "every must be at least 1, got 0"),
    ({"every": 2.5}, TypeError, "every must be an integer"),
    ({"every": 3, "fragments": 4}, ValueError, "fragments must be at most every=3, got 4"),
    ({"every": 3, "delay": 3}, ValueError, "delay must be below every=3, got 3"),
    ({"every": 3, "alpha": 1.5}, ValueError, "alpha must be"),
    ({"every": 3, "compressor": 1}, TypeError, "compressor must derive from"),
    ({"every": 3, "compressor": DeepGradientCompression(TopK(0.1))}, ValueError, "optimizer must be without momentum"),
    ({"every": 3, "check_every": -1}, ValueError, "check_every must be at least 0"),
    ({"every": 3, "exchange": "ring"}, ValueError, "exchange must be one of"),
    ({"every": 3, "over": "senders"}, ValueError, "over must be 'ranks' for Dense"),
    ({"every": 3, "over": "all"}, ValueError, "over must be one of ranks, senders"),
]


@pytest.mark.parametrize(("options", "kind", "text"), MISTAKES)
def test_bad_arguments_are_refused_at_once(options, kind, text):
    with pytest.raises(kind, match=text):
        LocalSteps(SGD(0.1), **options)


@pytest.mark.parametrize("delay", [0, 1])
def test_an_exchange_that_is_refused_is_refused_on_all_ranks_and_training_can_be_saved(delay, tmp_path):
    """The inner optimizer has run away on one rank, without a gradient that is not finite."""

    class Jump:
        def update(self, param, grad):
            param.data -= grad * np.float32(np.inf if grad[0] == 7 else 1)

    def main(comm):
        p = Parameter("w", np.zeros(2, np.float32))
        opt = LocalSteps(Jump(), comm, every=2, delay=delay, outer=SGD(1.0))
        for step in range(2 + delay):
            g = np.full(2, 7 if comm.rank and step == 1 else 1, np.float32)
            if step < 1 + delay:
                opt([(p, g)])
            else:
                with pytest.raises(FloatingPointError, match="gradients of exchange 1 are not finite: rank 1: w"):
                    opt([(p, g)])
        assert opt.global_parameters["w"].tolist() == [0, 0]
        path = opt.save(tmp_path, [p])
        LocalSteps(Jump(), comm, every=2, delay=delay, outer=SGD(1.0)).load(path, [p])

    run_ranks(2, main)


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_ranks_of_which_some_have_a_delay_all_raise(in_flight):
    """At once, though what travels needs another communicator, which all ranks make together."""

    def main(comm):
        text = "ranks differ: rank 0 has an exchange every 4 steps.*, rank . has an exchange every 4 steps"
        with pytest.raises(ValueError, match=text):
            LocalSteps(SGD(0.1), comm, every=4, delay=2 * (comm.rank == in_flight))
        opt, _ = train(comm, 4, every=2, delay=1)  # and can go on
        return opt.step_counter

    assert run_ranks(3, main) == [4, 4, 4]


def test_ranks_that_differ_all_raise():
    def main(comm):
        with pytest.raises(ValueError, match=r"ranks differ: .*every 3 steps"):
            train(comm, 3, every=3 if comm.rank else 4)

    run_ranks(2, main)


def test_a_mistake_in_the_first_step_is_raised_on_all_ranks():
    def main(comm):
        params = parameters()
        opt = LocalSteps(SGD(0.1), comm, every=2)
        with pytest.raises(TypeError, match="rank 1: loss must be an iterable"):
            opt(3 if comm.rank else list(loss(params, comm.rank, 0)))
        return [opt(list(loss(params, comm.rank, step))) for step in range(2)]

    assert run_ranks(2, main) == [[True, True]] * 2


def test_parameters_that_threads_share_are_refused():
    shared = parameters()

    def main(comm):
        with pytest.raises(ValueError, match="w of rank 0 and w of rank 1 are in one memory"):
            LocalSteps(SGD(0.1), comm, every=2)(list(loss(shared, comm.rank, 0)))

    run_ranks(2, main)


STREAMS = {
    "windows": {},
    "fragments": {"fragments": 2, "delay": 2, "alpha": 0.5},
    "senders": {"over": "senders"},
    "gathered, senders": {"over": "senders", "exchange": "gather"},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_virtual_ranks_have_the_bits_and_bytes_of_ranks(name, streams):
    if "senders" in streams and not COMPRESSORS[name]().traits.counts_senders:
        sim = simulate_local(3, every=1, outer=SGD(1.0), compressor=COMPRESSORS[name](), over="senders")
        with pytest.raises(ValueError, match="over must be 'ranks'"):
            sim(lambda rank: [(Parameter("w", np.ones(3)), np.ones(3))])
        return
    options = {"every": 3, "outer": SGD(0.7), "exchange": "two_phase", **STREAMS[streams]}

    def main(comm):
        metered = Metered(comm)
        make = {"compressor": COMPRESSORS[name](), "deterministic": True}
        opt, params = train(metered, 10, lambda: Adam(0.01), **options, **make)
        _ = opt.global_parameters
        return data(params), [(e.verb, e.payload, e.sent, e.received) for e in entries(metered)]

    params, sim = parameters(), simulate_local(3, Adam(0.01), compressor=COMPRESSORS[name](), **options)
    for step in range(10):
        sim(lambda rank, step=step: list(loss(params, rank, step)))
    ranks = run_ranks(3, main)
    virtual = [(e.verb, e.payload, e.sent, e.received) for e in entries(sim)]
    assert virtual == ranks[0][1]
    assert all(np.array_equal(x, y) for x, y in zip(data(params), ranks[0][0], strict=True))
    for rank, (mine, _) in enumerate(ranks):
        assert all(np.array_equal(x, y) for x, y in zip(sim._local[rank].values(), mine, strict=True))


def test_virtual_ranks_keep_masters_of_their_own():
    def main(comm):
        options = {"every": 3, "outer": SGD(1.0), "deterministic": True}
        return data(train(comm, 8, lambda: SGD(0.01, multi_precision=True), np.float16, **options)[1])

    params = parameters(np.float16)
    sim = simulate_local(2, SGD(0.01, multi_precision=True), every=3, outer=SGD(1.0))
    for step in range(8):
        sim(lambda rank, step=step: list(loss(params, rank, step)))
    for rank, mine in enumerate(run_ranks(2, main)):
        assert all(np.array_equal(x, y) for x, y in zip(sim._local[rank].values(), mine, strict=True))


def test_what_is_sent_can_be_observed_and_advised_on():
    def main(comm):
        seen = []
        opt = LocalSteps(SGD(0.1), comm, every=3, compressor=ErrorFeedback(TopK(0.1)))
        opt.observe(lambda exchange, numbers: seen.append((exchange, numbers["density"])), every=1)
        params = parameters()
        for step in range(6):
            opt(list(loss(params, comm.rank, step)))
        advice = opt.advise("1GbE", ranks=8, measure=False)
        return seen, advice.best.name, str(opt.plan)

    for seen, best, plan in run_ranks(2, main):
        assert [exchange for exchange, _ in seen] == [1, 2]
        assert all(0.08 < density < 0.12 for _, density in seen)
        assert best.startswith("local=3/1+")
        assert "exchange: every 3 steps; gather" in plan


def test_its_text_has_all_ranks_and_what_was_chosen():
    def main(comm):
        opt = LocalSteps(SGD(0.5), comm, every=7, fragments=2)
        return repr(opt)

    for rank, text in enumerate(run_ranks(2, main)):
        assert text.startswith("LocalSteps(SGD(lr=0.5")
        assert text.endswith(f", rank {rank} of 2, 0 steps, every=7, fragments=2)")


def test_pseudo_gradients_can_be_recorded(tmp_path, monkeypatch):
    """And sent again in other modes, as gradients of a training."""
    monkeypatch.setenv("DISTOPT_RECORD", f"2:1:{tmp_path}")
    main = functools.partial(train, steps=6, every=3, outer=SGD(1.0))
    start = data(parameters())
    _, params = run_ranks(1, lambda comm: main(comm))[0]
    tape = join(tmp_path, tmp_path / "tape", "train.py")
    assert [entry.name for entry in tape.order] == list(SHAPES)
    found = [dict((p.name, g) for p, g in tape.losses(step)(0)) for step in tape.steps]
    for name, x, p in zip(SHAPES, start, params, strict=True):
        np.testing.assert_allclose(sum(step[name] for step in found), x - p.data, rtol=1e-4, atol=1e-6)


def trained_in_every_way(comm):
    """{compressor and way: parameters}, of which a transport must not change a bit."""
    found = {}
    for name, make in COMPRESSORS.items():
        for way in ("windows", "fragments"):
            options = {"compressor": make(), "outer": SGD(0.7), "exchange": "two_phase", "deterministic": True}
            opt, params = train(comm, 7 + comm.rank, lambda: Adam(0.01), every=3, **options, **STREAMS[way])
            opt.join()
            opt.close()
            found[f"{name} {way}"] = np.concatenate([x.ravel() for x in data(params)])
    return found


@needs_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_processes_have_the_bits_of_threads(size, tmp_path):
    for mine, threads in zip(
        run_mpi(size, trained_in_every_way, tmp_path), run_ranks(size, trained_in_every_way), strict=True
    ):
        assert mine.keys() == threads.keys()
        assert [name for name in mine if not np.array_equal(mine[name], threads[name])] == []
