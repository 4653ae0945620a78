"""Trainings of logical ranks: what is learned depends on how many there are, and not on the number of processes."""

import hashlib
import math
import random
import threading

import numpy as np
import pytest
from test_half_in_shared_memory import Apart, Counting

from distopt import DistOpt, LossScaler, Parameter, Trainer, run_ranks, simulate
from distopt.buckets import plan
from distopt.comm import Elastic, LocalCommunicator, Logical, Metered
from distopt.compress import (
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.data import GlobalBatches
from distopt.engine import spec
from distopt.optim import SGD, Adam

V = 6
SHAPES = [(30, 40), (7,), (1000,), (64, 9), ()]
MODES = {
    "dense": (Dense(), "auto"),
    "half": (Half(), "auto"),
    "bfloat16": (Half("bfloat16"), "auto"),
    "int8": (ErrorFeedback(Int8()), "auto"),
    "int4 gathered": (ErrorFeedback(Int4()), "gather"),
    "top-K gathered": (ErrorFeedback(TopK(0.05)), "gather"),
    "packed top-K in two phases": (ErrorFeedback(Packed(TopK(0.05))), "two_phase"),
    "threshold": (ErrorFeedback(Threshold(1.0)), "auto"),
    "two bits": (ErrorFeedback(TwoBit(0.5)), "auto"),
    "one bit": (ErrorFeedback(OneBit()), "two_phase"),
    "dgc": (DeepGradientCompression(TopK(0.05), weight_decay=1e-3), "gather"),
    "dgc in two phases": (DeepGradientCompression(TopK(0.05), weight_decay=1e-3), "two_phase"),
}


def parameters():
    rng = np.random.default_rng(1)
    return [Parameter(f"p{k}", rng.standard_normal(shape).astype(np.float32)) for k, shape in enumerate(SHAPES)]


def losses(params, step):
    """The loss of each rank in a step: other gradients for each, which depend on the parameters."""

    def of(rank):
        rng = np.random.default_rng((rank, step))
        return [(p, ((rank + 1) * rng.standard_normal(p.data.shape) + p.data).astype(np.float32)) for p in params]

    return of


def made(comm, mode, logical=V, optimizer=None, **options):
    params = parameters()
    usual = SGD(0.1) if "dgc" in mode else Adam(0.01)
    opt = DistOpt(optimizer or usual, Logical(comm, logical), threshold=900, **options)
    return params, opt


def digest(params, opt):
    """The bits of the parameters, and those of what each rank here keeps."""
    kept = {
        rank: hashlib.sha256(
            b"".join(name.encode() + x.tobytes() for _, xs in sorted(of.items()) for name, x in sorted(xs.items()))
        )
        for rank, of in opt.state_dict()["states"].items()
    }
    return b"".join(p.data.tobytes() for p in params), {rank: found.hexdigest() for rank, found in kept.items()}


def trained(comm, mode, steps=5, **options):
    params, opt = made(comm, mode, **options)
    compressor, exchange = MODES[mode]
    for step in range(steps * options.get("num_batches", 1)):
        opt.step(losses(params, step), compressor, exchange=exchange)
    return digest(params, opt)


def on(processes, main):
    """What all processes have learned, which is the same, and what each rank keeps."""
    learned, kept = zip(*run_ranks(processes, main), strict=True)
    assert len(set(learned)) == 1
    return learned[0], dict(sorted(item for of in kept for item in of.items()))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_processes_learns_the_same(mode):
    found = [on(processes, lambda comm: trained(comm, mode)) for processes in (1, 2, 4, V)]
    assert len(found[0][1]) == V
    assert all(each == found[0] for each in found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
def test_they_learn_what_as_many_virtual_ranks_do(mode):
    compressor, exchange = MODES[mode]
    params, step = parameters(), 0
    sim = simulate(V, SGD(0.1) if "dgc" in mode else Adam(0.01), threshold=900)
    for step in range(5):
        sim.step(losses(params, step), compressor, exchange=exchange)
    learned, _ = on(2, lambda comm: trained(comm, mode))
    assert learned == b"".join(p.data.tobytes() for p in params)


def test_dense_steps_are_those_of_the_mean_over_ranks():
    params = parameters()
    values = [p.data.astype(np.float64) for p in params]
    for step in range(5):
        fakes = [Parameter(p.name, x.astype(np.float32)) for p, x in zip(params, values, strict=True)]
        grads = [losses(fakes, step)(rank) for rank in range(V)]
        values = [x - 0.1 * np.mean([g[k][1] for g in grads], axis=0) for k, x in enumerate(values)]
    learned, _ = on(4, lambda comm: trained(comm, "dense", optimizer=SGD(0.1)))
    found = np.frombuffer(learned, np.float32)
    np.testing.assert_allclose(found, np.concatenate([x.reshape(-1) for x in values]), rtol=2e-5, atol=2e-6)


def take_signs(pairs):
    for _, grad in pairs:
        np.sign(grad, out=grad)


@pytest.mark.parametrize("deterministic", [True, "exact"])
@pytest.mark.parametrize(("logical", "processes"), [(4, 2), (5, 2), (5, 3), (3, 3), (3, 1)])
def test_sums_in_shared_memory_have_the_bits_of_messages(logical, processes, deterministic):
    """Of dense gradients, uneven numbers of ranks, empty tensors, and an optimizer that takes whole means."""
    options = {"logical": logical, "deterministic": deterministic}

    def main(comm):
        apart, shared, elastic = Counting(Apart(comm)), Counting(comm), Counting(Elastic(comm))
        by_messages = trained(apart, "dense", **options)
        assert apart.count == 0
        assert trained(shared, "dense", **options) == by_messages
        assert shared.count == 5 * buckets() * len(Logical(comm, logical).ranks.here)
        clipped = trained(shared, "dense", clip_norm=0.5, **options)
        assert clipped == trained(apart, "dense", clip_norm=0.5, **options)
        assert trained(elastic, "dense", **options) == by_messages
        assert elastic.count == 0
        return by_messages

    on(processes, main)


def buckets():
    """How many buckets the model has."""
    return len(plan([str(k) for k in range(5)], [math.prod(s) for s in SHAPES], [np.float32] * 5, 900).buckets)


@pytest.mark.parametrize("deterministic", [True, "exact"])
def test_what_is_not_finite_is_told_as_by_messages(deterministic):
    def main(comm):
        def told(comm, nonfinite):
            params, opt = made(comm, "dense", 5, deterministic=deterministic, nonfinite=nonfinite, optimizer=SGD(0.1))
            opt(losses(params, 0))

            def loss(rank):
                pairs = losses(params, 1)(rank)
                pairs[3][1][5, 5:] = np.inf if rank == 1 else 1
                return pairs

            try:
                opt(loss)
            except FloatingPointError as error:
                return str(error)
            return digest(params, opt)

        found = [told(comm, policy) for policy in ("raise", "propagate")]
        assert found == [told(Apart(comm), policy) for policy in ("raise", "propagate")]
        assert "rank 1: p3 (4 of 576 entries)" in found[0]

    run_ranks(2, main)


OPTIONS = {
    "three batches": {"num_batches": 3},
    "three sums": {"num_batches": 3, "sync_on_apply": False},
    "clipped": {"clip_norm": 0.5},
    "a hook": {"gradient_hook": take_signs},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["dense", "packed top-K in two phases"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_do_not_depend_on_processes(name, mode):
    found = [on(processes, lambda comm: trained(comm, mode, steps=3, **OPTIONS[name])) for processes in (1, 3, V)]
    assert found[1] == found[0] == found[2]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["dense", "packed top-K in two phases", "dgc"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (V, 1), (1, 4)])
def test_a_job_goes_on_with_other_processes_where_it_was_saved(tmp_path, before, after, mode):
    compressor, exchange = MODES[mode]

    def first(comm):
        params, opt = made(comm, mode)
        for step in range(3):
            opt.step(losses(params, step), compressor, exchange=exchange)
        opt.save(tmp_path, params)
        opt.close()
        return digest(params, opt)

    def then(comm):
        params, opt = made(comm, mode)
        opt.load(tmp_path, params)
        for step in range(opt.step_counter, 5):
            opt.step(losses(params, step), compressor, exchange=exchange)
        return digest(params, opt)

    on(before, first)
    assert on(after, then) == on(1, lambda comm: trained(comm, mode))


def test_other_ranks_than_saved_it_share_out_what_waits(tmp_path):
    mode = "top-K gathered"

    def first(comm):
        params, opt = made(comm, mode, logical=6)
        opt.step(losses(params, 0), *MODES[mode][:1])
        opt.save(tmp_path, params)
        opt.close()
        return [sum(np.sum([x["p2"] for x in of.values()], axis=0) for of in opt.state_dict()["states"].values())]

    def then(comm):
        params, opt = made(comm, mode, logical=4)
        opt.load(tmp_path, params)
        opt.step(losses(params, 1), ErrorFeedback(TopK(1.0)))
        return opt.step_counter

    assert sum(of[0] for of in run_ranks(2, first)).any()
    assert run_ranks(3, then) == [2] * 3


# -- the loss


@pytest.mark.parametrize("lazy", [False, True], ids=["a list", "a generator"])
def test_each_rank_has_its_own_random_numbers(lazy):
    def main(comm):
        params, opt = made(comm, "dense")
        drawn = {}
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002  as scripts do
        before = random.getstate()

        def pairs(rank):
            for p in params:
                drawn.setdefault(rank, []).append((random.random(), np.random.random()))  # noqa: NPY002
                yield p, np.full_like(p.data, drawn[rank][-1][0] + drawn[rank][-1][1])

        for _ in range(2):
            opt(pairs if lazy else lambda rank: list(pairs(rank)))
        assert random.getstate() == before
        return drawn

    found = [{r: x for of in run_ranks(processes, main) for r, x in of.items()} for processes in (1, 2, V)]
    assert found[0] == found[1] == found[2]
    numbers = [pair for of in found[0].values() for pair in of]
    assert len(found[0]) == V
    assert len(set(numbers)) == len(numbers) == V * 2 * len(SHAPES)


def test_other_seeds_of_the_script_give_other_numbers():
    def drawn(seed):
        def main(comm):
            params, opt = made(comm, "dense")
            np.random.seed(seed)  # noqa: NPY002
            found = []
            opt(lambda rank: [(p, found.append(np.random.random()) or np.ones_like(p.data)) for p in params])  # noqa: NPY002
            return found

        return run_ranks(1, main)[0]

    assert drawn(1) == drawn(1)
    assert set(drawn(1)).isdisjoint(drawn(2))


def test_batches_know_the_step_of_the_loss_that_asks():
    def main(comm):
        params, opt = made(comm, "dense")
        data, seen = GlobalBatches(30, batch=12, seed=3, ranks=V), []

        def loss(rank):
            seen.append((rank, data.ids(rank).tolist(), data.weight(rank)))
            return [(p, np.ones_like(p.data)) for p in params]

        for _ in range(data.steps):
            opt(loss)
        with pytest.raises(ValueError, match="step must be given but in the loss of a logical rank, got None"):
            data.ids(0)
        return seen

    data = GlobalBatches(30, batch=12, seed=3, ranks=V)
    for processes in (1, 4):
        seen = [each for of in run_ranks(processes, main) for each in of]
        expected = [(r, data.ids(r, k).tolist(), data.weight(r, k)) for k in range(data.steps) for r in range(V)]
        assert sorted(map(str, seen)) == sorted(map(str, expected))
        assert sorted(i for _, ids, _ in seen for i in ids) == list(range(30))


def test_ranks_of_a_process_bring_their_gradients_in_order():
    def main(comm):
        params, opt = made(comm, "dense")
        called = []
        opt(lambda rank: called.append(rank) or [(p, np.ones_like(p.data)) for p in params])
        assert f"ranks {', '.join(map(str, called))} of {V}, process {comm.rank} of 4, 1 steps" in repr(opt)
        assert f"payloads are of one of {V} logical ranks, 2 or 1 in each of 4 processes" in str(opt.plan)
        assert str(opt.advise("1GbE", measure=False)).startswith(f"{V} logical ranks, 2 or 1 in each of 4 processes")
        return called, opt.world_size, opt.global_rank

    assert run_ranks(4, main) == [([0, 1], V, 0), ([2, 3], V, 1), ([4], V, 2), ([5], V, 3)]


def test_gradients_may_lie_where_they_are_reduced():
    def main(comm, views):
        params, opt = made(comm, "dense")
        places = opt.gradient_views(params) if views else [np.empty_like(p.data) for p in params]

        def loss(rank):
            for place, (_, grad) in zip(places, losses(params, 0)(rank), strict=True):
                place[...] = grad
            return list(zip(params, places, strict=True))

        for _ in range(3):
            opt(loss)
        return digest(params, opt)

    assert on(2, lambda comm: main(comm, True)) == on(1, lambda comm: main(comm, False))


# -- what goes wrong


def failing(comm, wrong):
    params, opt = made(comm, "dense")
    opt(losses(params, 0))
    before = digest(params, opt)
    with pytest.raises((ValueError, TypeError, FloatingPointError)) as found:
        opt.step(lambda rank: wrong(rank, params) or losses(params, 1)(rank), MODES["top-K gathered"][0])
    assert digest(params, opt)[0] == before[0]
    opt(losses(params, 1))
    return str(found.value)


WRONG = {
    "not finite: rank 4: p0 (1200 of 1200 entries)": lambda rank, params: (
        [(p, np.full_like(p.data, np.nan if (rank, p.name) == (4, "p0") else 1)) for p in params]
    ),
    "no gradient for p4": lambda rank, params: [(p, p.data.copy()) for p in params[: 4 if rank == 3 else 5]],
    "p0 must be the first rank's array, got another one": lambda rank, params: (
        [(Parameter(p.name, p.data.copy()), p.data.copy()) for p in params] if rank == 4 else None
    ),
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("processes", [1, 3])
def test_all_processes_refuse_what_one_rank_brings(processes, text):
    found = run_ranks(processes, lambda comm: failing(comm, WRONG[text]))
    assert len(set(found)) == 1
    assert text in found[0]


def test_a_scaled_step_is_skipped_by_all():
    def main(comm):
        params, opt = made(comm, "dense", nonfinite=LossScaler(init_scale=4.0))
        for step in range(4):
            scale = opt.engine.nonfinite.policy.divisor

            def loss(rank, step=step, scale=scale):
                bad = np.inf if (rank, step) == (5, 1) else 1
                return [(p, (scale * bad * g).astype(np.float32)) for p, g in losses(params, step)(rank)]

            opt(loss)
        return digest(params, opt), opt.skipped

    (one, skipped), *_ = run_ranks(1, main)
    assert skipped == 1
    assert all(found == one[0] for (found, _), _ in run_ranks(3, main))


def test_a_missing_gradient_counts_where_no_rank_has_one():
    def main(comm):
        params, opt = made(comm, "top-K gathered", allow_missing=True)

        def loss(rank):
            return [(p, g) for p, g in losses(params, 0)(rank) if p.name != "p0" and (p.name, rank) != ("p2", 1)]

        opt(losses(params, 0))
        before = params[0].data.copy()
        opt.step(loss, MODES["top-K gathered"][0])
        assert (params[0].data == before).all()
        return digest(params, opt)

    assert on(1, main) == on(4, main)


def test_ranks_that_differ_in_their_number_are_told():
    def main(comm):
        params, opt = made(comm, "dense", logical=4 + comm.rank)
        with pytest.raises(ValueError, match="ranks differ"):
            opt(losses(params, 0))

    run_ranks(2, main)


def test_other_threads_are_told(monkeypatch):
    def main(comm):
        params, opt = made(comm, "dense")
        with pytest.raises(ValueError, match=r"ranks differ: rank 0 has logical=6, 0 threads, rank 1 has logical=6, 1"):
            opt(losses(params, 0))
        comm.barrier()

    monkeypatch.setattr(spec, "_threads", lambda: threading.current_thread().name.removeprefix("rank "))
    run_ranks(2, main)


REFUSED = {
    "loss must be a callable of the rank": lambda opt, params: opt([(p, p.data.copy()) for p in params]),
    "exchange must be one of auto, gather, two_phase with logical": lambda opt, params: opt.step(
        losses(params, 0), exchange="nodes"
    ),
    "exchange must be one of auto, gather, two_phase, nodes with deterministic=True": lambda opt, params: opt.step(
        losses(params, 0), exchange="measure"
    ),
    "a partial step must be of processes that are one rank each": lambda opt, params: opt.backward_and_partial_update(
        losses(params, 0)
    ),
    "join must be of processes": lambda opt, params: opt.join(),
    "update must be of processes": lambda opt, params: opt.update(params[0], params[0].data.copy()),
    "parameter_views must be of processes": lambda opt, params: opt.parameter_views(params),
    "observe must be of processes": lambda opt, params: opt.observe(lambda *_: None),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_process_does_as_one_rank_is_refused(text):
    def main(comm):
        params, opt = made(comm, "dense")
        opt(losses(params, 0))
        with pytest.raises((ValueError, TypeError), match=text):
            REFUSED[text](opt, params)

    run_ranks(2, main)


def test_other_trainings_than_a_dist_opt_are_refused():
    def main(comm):
        with pytest.raises(ValueError, match=r"logical ranks must be those of a DistOpt .* for a Trainer"):
            Trainer(parameters(), "sgd", communicator=Logical(comm, 4))

    run_ranks(2, main)


def test_a_loss_that_ignores_its_rank_is_told(caplog):
    def main(comm):
        params, opt = made(comm, "dense")
        opt(lambda rank: [(p, np.ones_like(p.data)) for p in params])

    run_ranks(2, main)
    assert [f"the same on all {V} ranks" in r.getMessage() for r in caplog.records] == [True]


# -- bytes


@pytest.mark.parametrize("mode", ["dense", "int4 gathered", "packed top-K in two phases"])
def test_fewer_processes_send_more_bytes_each(mode):
    compressor, exchange = MODES[mode]

    def sent(processes):
        def main(comm):
            params = parameters()
            metered = Metered(Logical(comm, V))
            opt = DistOpt(SGD(0.1), metered, threshold=900)
            for step in range(2):
                metered.reset()
                opt.step(losses(params, step), compressor, exchange=exchange)
            return sum(row["payload"] for verb, row in metered.report().items())

        return max(run_ranks(processes, main))

    alone, all_apart = sent(2), sent(V)
    assert all_apart < alone < 1.2 * V * all_apart


@pytest.mark.parametrize(
    ("processes", "error", "text"),
    [
        (0, ValueError, "processes must be at least 1, got 0"),
        (2.0, TypeError, "processes must be an integer, got 2.0"),
        (4, ValueError, "processes must be at most 3, the number of logical ranks, got 4"),
        (2, RuntimeError, "resize must be in a job of distopt run --elastic, got Logical"),
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(processes, error, text):
    with pytest.raises(error, match=text):
        DistOpt(SGD(0.1), Logical(LocalCommunicator(), 3)).resize(processes)


def test_processes_of_higher_rank_leave_and_the_others_learn_the_same():
    def main(comm):
        params, opt = made(Elastic(comm), "dense")
        for step in range(6):
            if step == 3:
                try:
                    opt.resize(2)
                except SystemExit as end:
                    return end.code
            opt.step(losses(params, step), MODES["dense"][0])
        return digest(params, opt)[0]

    alone, _ = on(1, lambda comm: trained(comm, "dense", 6))
    assert run_ranks(4, main) == [alone, alone, 0, 0]


def test_nobody_but_a_launcher_can_start_processes_and_all_must_want_as_many():
    def main(comm):
        _, opt = made(Elastic(comm), "dense")
        with pytest.raises(RuntimeError, match=r"processes must be at most 2 but over torch .*, got 3"):
            opt.resize(3)
        with pytest.raises(ValueError, match="resize to"):
            opt.resize(1 + comm.rank)

    run_ranks(2, main)
