"""Local steps of logical ranks: the same bits on any number of processes, as of one process for each rank."""

import logging

import numpy as np
import pytest

from distopt import LocalSteps, LossScaler, Parameter, run_ranks
from distopt.comm import LocalCommunicator, Logical
from distopt.compress import ErrorFeedback, Half, Int8, Packed, TopK
from distopt.data import GlobalBatches
from distopt.engine.local_ranks import from_bytes, to_bytes
from distopt.optim import SGD, Adam

V, EVERY = 6, 3
TOP = ErrorFeedback(Packed(TopK(0.1)))
WINDOWS = {
    "dense": {},
    "half": {"compressor": Half()},
    "int8": {"compressor": ErrorFeedback(Int8())},
    "top-K gathered": {"compressor": ErrorFeedback(TopK(0.1)), "exchange": "gather"},
    "packed top-K in two phases": {"compressor": TOP, "exchange": "two_phase"},
    "fragments, later": {"fragments": 2, "delay": 2, "alpha": 0.3},
    "fragments, later, packed": {"fragments": 3, "delay": 1, "compressor": TOP},
    "two batches": {"num_batches": 2, "clip_norm": 0.5},
    "the mean of parameters": {"outer": SGD(1.0)},
    "over senders": {"compressor": TOP, "over": "senders"},
}


def made(comm, dtype=np.float32, **options):
    rng = np.random.default_rng(0)
    params = [Parameter(f"p{k}", rng.standard_normal(n).astype(dtype)) for k, n in enumerate((50, 7, 300))]
    options = {"deterministic": True, "threshold": 100} | options
    return params, LocalSteps(Adam(0.01, multi_precision=dtype == np.float16), comm, every=EVERY, **options)


def losses(params, step):
    """The loss of each rank in a step: other gradients for each, which depend on its parameters."""

    def of(rank):
        rng = np.random.default_rng((rank, step))
        return [(p, (p.data / 10 + rng.standard_normal(p.data.shape)).astype(p.data.dtype)) for p in params]

    return of


def learned(opt):
    return b"".join(x.tobytes() for x in opt.global_parameters.values())


def of_rank(own):
    """What a rank has of its own: its parameters and the inner optimizer's state."""
    return to_bytes(own).tobytes()


def trained(comm, calls, **options):
    """What ``calls`` calls have learned, and what each rank has of its own then."""
    params, opt = made(Logical(comm, V), **options)
    for call in range(calls):
        opt(losses(params, call))
    return learned(opt), {rank: of_rank(own) for rank, own in opt.state_dict()["inner"].items()}


def on(processes, main):
    """What all processes have learned, which is the same, and what each rank has."""
    found, own = zip(*run_ranks(processes, main), strict=True)
    assert len(set(found)) == 1
    return found[0], dict(sorted(item for of in own for item in of.items()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WINDOWS)
def test_any_number_of_processes_learns_what_as_many_ranks_do(name):
    calls = 8 * WINDOWS[name].get("num_batches", 1)

    def one_each(comm):
        params, opt = made(comm, **WINDOWS[name])
        for call in range(calls):
            opt(losses(params, call)(comm.rank))
        return learned(opt)

    (expected,) = set(run_ranks(V, one_each))
    found = [on(processes, lambda comm: trained(comm, calls, **WINDOWS[name])) for processes in (1, 2, 4, V)]
    assert len(found[0][1]) == V
    assert all(each == found[0] for each in found)
    assert found[0][0] == expected


def test_masters_of_16_bit_parameters_are_each_ranks_own():
    found = [on(processes, lambda comm: trained(comm, 7, dtype=np.float16)) for processes in (1, 4, V)]
    assert found[1] == found[0] == found[2]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [2, 3, 5])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (V, 1), (1, 4)])
def test_a_job_goes_on_with_other_processes_where_it_was_saved(tmp_path, before, after, at):
    options = WINDOWS["fragments, later, packed"]

    def first(comm):
        params, opt = made(Logical(comm, V), **options)
        for step in range(at):
            opt(losses(params, step))
        opt.save(tmp_path, params)
        opt.close()

    def then(comm):
        params, opt = made(Logical(comm, V), **options)
        opt.load(tmp_path, params)
        for step in range(opt.step_counter, 8):
            opt(losses(params, step))
        return learned(opt), {rank: of_rank(own) for rank, own in opt.state_dict()["inner"].items()}

    run_ranks(before, first)
    assert on(after, then) == on(1, lambda comm: trained(comm, 8, **options))


def test_logical_ranks_go_on_where_as_many_processes_have_saved(tmp_path):
    def first(comm):
        params, opt = made(comm)
        for step in range(4):
            opt(losses(params, step)(comm.rank))
        opt.save(tmp_path, params)
        opt.close()

    def then(comm):
        params, opt = made(Logical(comm, V))
        opt.load(tmp_path, params)
        for step in range(opt.step_counter, 6):
            opt(losses(params, step))
        return learned(opt)

    run_ranks(V, first)
    assert set(run_ranks(2, then)) == {on(1, lambda comm: trained(comm, 6))[0]}


def test_each_rank_has_its_own_random_numbers_and_samples():
    def main(comm):
        params, opt = made(Logical(comm, V))
        data, asked = GlobalBatches(60, batch=30, seed=0, ranks=V), {}

        def loss(rank):
            drawn = np.random.standard_normal()  # noqa: NPY002  scripts use this
            asked[opt.step_counter, rank] = drawn, *data.ids(rank)
            return [(p, p.data * np.float32(drawn)) for p in params]

        for _ in range(4):
            opt(loss)
        return asked

    alone, *others = run_ranks(1, main) + run_ranks(3, main)
    assert len(set(alone.values())) == 4 * V
    assert {key: numbers for of in others for key, numbers in of.items()} == alone
    assert {id for (step, _), (_, *ids) in alone.items() if step < 2 for id in ids} == set(range(60))


def test_a_call_that_failed_in_one_rank_is_made_again_by_that_one():
    def main(comm):
        params, opt = made(Logical(comm, V))
        called = []

        def loss(rank):
            called.append(rank)
            if len(called) == 7:
                raise RuntimeError("no batch")
            return losses(params, opt.step_counter)(rank)

        while opt.step_counter < 2:
            try:
                opt(loss)
            except RuntimeError:
                called.append("failed")
                # Which ranks have made the call is in a state, too.
                opt.load_state_dict(opt.state_dict())
        return called[:9], learned(opt)

    ((called, found),) = run_ranks(1, main)
    # The loss of the first rank is called before parameters are known, too.
    assert called == [0, 0, 1, 2, 3, 4, 5, "failed", 5]
    assert found == on(1, lambda comm: trained(comm, 2))[0]


def test_a_rank_whose_gradients_are_not_finite_leaves_its_step_out():
    def main(comm, logical):
        params, opt = made(Logical(comm, V) if logical else comm, nonfinite="skip")

        def loss(rank):
            bad = np.float32(np.nan if (rank, opt.step_counter) == (3, 1) else 1)
            return [(p, g * bad) for p, g in losses(params, opt.step_counter)(rank)]

        applied = [opt(loss if logical else loss(comm.rank)) for _ in range(EVERY)]
        return learned(opt), applied

    expected = run_ranks(V, lambda comm: main(comm, False))
    found = run_ranks(2, lambda comm: main(comm, True))
    assert {bits for bits, _ in found} == {bits for bits, _ in expected}
    assert [applied for _, applied in found] == [[True] * 3, [True, False, True]]


def test_each_rank_has_its_own_loss_scale():
    def main(comm):
        params, opt = made(Logical(comm, 2), nonfinite=LossScaler(16.0))

        def loss(rank):
            return [(p, np.full_like(p.data, np.inf if rank else 1)) for p in params]

        opt(loss)
        return {rank: own["inner"]["engine"]["loss_scale"]["scale"] for rank, own in opt.state_dict()["inner"].items()}

    assert run_ranks(1, main) == [{"0": 16.0, "1": 8.0}]


def test_what_logical_ranks_cannot_do_is_refused():
    params, opt = made(Logical(LocalCommunicator(), 2))
    with pytest.raises(TypeError, match="loss must be a callable of the rank"):
        opt(losses(params, 0)(0))
    opt(losses(params, 0))
    with pytest.raises(ValueError, match="join must be of processes that are one rank each"):
        opt.join()


def test_a_rank_whose_own_parameters_are_lost_goes_on_from_the_global_ones(caplog):
    params, opt = made(Logical(LocalCommunicator(), 2))
    opt(losses(params, 0))
    ranks = opt._training.ranks
    ranks._kept[0].clear()
    with caplog.at_level(logging.WARNING, "distopt"):
        ranks.enter(0)
    assert b"".join(p.data.tobytes() for p in params) == learned(opt)
    assert "logical rank 0 goes on from the global parameters: its own are lost" in caplog.text


def test_trees_are_as_many_bytes_whatever_their_numbers():
    def tree(step):
        return {"step": step, "p": [np.array([step, -step]).astype(np.float32), np.array(step)], "scale": None}

    flats = [to_bytes(tree(step)) for step in (1, 12345678)]
    assert flats[0].size == flats[1].size
    found = from_bytes(flats[1])
    assert found["step"] == 12345678
    assert [(x.tolist(), x.dtype.name) for x in found["p"]] == [([12345678, -12345678], "float32"), (12345678, "int64")]


@pytest.mark.parametrize("logical", [True, False])
@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_an_older_state_goes_on_in_a_training_that_has_gone_on(options, logical):
    def main(comm):
        params, opt = made(Logical(comm, V) if logical else comm, **options)
        found = []

        def step(k):
            opt(losses(params, k) if logical else losses(params, k)(comm.rank))

        step(0)
        state, values = opt.state_dict(), [p.data.copy() for p in params]
        for _ in range(2):
            for k in range(1, 8):
                step(k)
            found.append(learned(opt))
            opt.load_state_dict(state)
            for p, value in zip(params, values, strict=True):
                p.data[:] = value
        return found

    for first, again in run_ranks(2, main):
        assert again == first


def test_another_delay_takes_no_values_again_that_were_taken(tmp_path):
    def main(comm):
        params, opt = made(comm)
        for k in range(4):
            opt(losses(params, k)(comm.rank))
        opt.save(tmp_path, params)
        opt(losses(params, 4)(comm.rank))
        expected = [p.data.copy() for p in params]
        opt.close()
        params, opt = made(comm, delay=2)
        opt.load(tmp_path, params)
        opt(losses(params, 4)(comm.rank))
        assert all(np.array_equal(p.data, x) for p, x in zip(params, expected, strict=True))

    run_ranks(2, main)


def test_what_was_loaded_can_be_saved_before_the_first_step(tmp_path):
    def main(comm):
        params, opt = made(Logical(comm, V))
        assert sorted(opt.state_dict()["inner"]) == [str(r) for r in opt.communicator.ranks.here]
        for k in range(4):
            opt(losses(params, k))
        opt.save(tmp_path / "a", params)
        opt.close()
        for before, after in (("a", "b"), ("b", "c")):
            params, opt = made(Logical(comm, V))
            opt.load(tmp_path / before, params)
            opt.save(tmp_path / after, params)
            opt.close()
        params, opt = made(Logical(comm, V))
        opt.load(tmp_path / "c", params)
        for k in range(4, 7):
            opt(losses(params, k))
        return learned(opt)

    expected = on(1, lambda comm: trained(comm, 7))[0]
    assert {*run_ranks(1, main), *run_ranks(2, main), *run_ranks(V, main)} == {expected}


def test_states_that_are_not_those_of_the_ranks_here_are_refused():
    params, opt = made(Logical(LocalCommunicator(), 2))
    opt(losses(params, 0))
    state = opt.state_dict()
    own = state["inner"]["0"]
    for inner in ({}, {"0": own}, own["inner"], 3):
        with pytest.raises(ValueError, match="the inner state must be that of the logical ranks 0, 1, got"):
            opt.load_state_dict(state | {"inner": inner})
    with pytest.raises(ValueError, match="the inner state of rank 1 must have inner, parameters and others, got"):
        opt.load_state_dict(state | {"inner": {"0": own, "1": {}}})


def test_a_state_is_not_asked_for_in_a_loss():
    params, opt = made(Logical(LocalCommunicator(), 2))
    opt(losses(params, 0))

    def loss(rank):
        opt.state_dict()

    with pytest.raises(RuntimeError, match="the state must be asked for between steps"):
        opt(loss)


@pytest.mark.parametrize("call", [0, 1])
def test_a_rank_whose_window_of_batches_is_lost_counts_as_the_others(call):
    params, opt = made(Logical(LocalCommunicator(), 3), num_batches=2)
    for k in range(call + 2):
        opt(losses(params, k))
    # As in a process that adopts it: of another machine, whose memory it does not see.
    opt._training.ranks._kept[1].clear()
    for k in range(call + 2, 8):
        opt(losses(params, k))
    inner = opt.state_dict()["inner"].values()
    assert opt.step_counter == 4
    assert {(own["inner"]["calls"], own["made"], own["inner"]["engine"]["step_counter"]) for own in inner} == {
        (0, 8, 4)
    }


@pytest.mark.parametrize("away", [0, 1])
def test_a_rank_that_comes_back_is_not_what_it_was_when_it_left(away):
    comm = Logical(LocalCommunicator(), 2)
    params, opt = made(comm)
    opt(losses(params, 0))
    ranks, both = opt._training.ranks, comm._ranks
    comm._ranks, comm.comm.epoch = both._replace(here=(1 - away,)), 1
    assert list(ranks.turns()) == [1 - away]
    comm._ranks, comm.comm.epoch = both, 2
    assert list(ranks.turns()) == [away]
    ranks.enter(away)
    # What it had lay in another process, and is not to be found.
    assert b"".join(p.data.tobytes() for p in params) == learned(opt)
