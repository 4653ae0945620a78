"""The GPU path without a GPU: real cupy arrays over host memory, the kernels' device text, a double of NCCL."""

import contextlib
import itertools
import pathlib

import numpy as np
import pytest
from test_mixed_precision import MODES, PARTIAL, RULES, partial_masters
from test_mixed_precision import train as train_narrow
from test_shard_bounds import COMPRESSORS, crowded, go_on
from test_shard_bounds import train as train_crowded
from test_two_phase import in_two_dtypes

import laws
from distopt import DistOpt, Parameter, device, kernels, run_ranks
from distopt.comm import LocalCommunicator, Metered, NcclCommunicator
from distopt.compress import (
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.device import streams
from distopt.exchange.hierarchical import nodes_of
from distopt.kernels import cubins
from distopt.kernels.signatures import CUDA_FLAGS, NATIVE
from distopt.optim import SGD
from doubles import shim
from doubles.ranks import on_gpus
from launch import needs_mpi, run_mpi
from tiers import every

cupy = pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu, nccl = (pytest.importorskip(f"doubles.{name}") for name in ("gpu", "nccl"))


pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param(mode, dtype, marks=[pytest.mark.full] * ((k + n) % 2))  # by turns
        for k, mode in enumerate(laws.MODES)
        for n, dtype in enumerate(laws.TOLERANCE)
    ],
)
def test_host_and_device_agree_in_every_mode(mode, dtype):
    host = laws.digest(laws.train(LocalCommunicator(), mode=mode, dtype=dtype)[0])
    assert laws.digest(laws.train(LocalCommunicator(gpu=0), mode=mode, dtype=dtype)[0]) == host


@pytest.mark.parametrize("name", [*laws.OPTIMIZERS, *laws.WRAPPERS])
def test_host_and_device_agree_with_every_optimizer(name, arithmetic):
    make = (laws.OPTIMIZERS | laws.WRAPPERS)[name]
    host = laws.digest(laws.train(LocalCommunicator(), make=make, shapes=[(10_003,), (7, 3)])[0])
    assert laws.digest(laws.train(LocalCommunicator(gpu=0), make=make, shapes=[(10_003,), (7, 3)])[0]) == host


@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_host_and_device_agree_on_parameters_of_16_bits(mode, multi_precision):
    def main(comm):
        return laws.digest(train_narrow(comm, np.float16, multi_precision, mode=mode, deterministic=True)[0])

    assert on_gpus(2, main) == run_ranks(2, main)


@pytest.mark.parametrize("rule", ["lamb", "lbsgd lars"])
def test_a_refused_first_step_leaves_masters_alone(rule):
    """They are zeros until the first update, on host and device alike."""

    def main(comm):
        [w, g] = laws.to_device(comm, [np.ones(3, np.float16), np.full(3, np.inf, np.float16)])
        opt = DistOpt(RULES[rule](multi_precision=True), comm, nonfinite="skip")
        opt([(Parameter("w", w), g)])
        return opt.state_dict()["optimizer"]["master"]["w"].tolist()

    assert on_gpus(2, main) == run_ranks(2, main) == [[0.0] * 3] * 2


def test_an_optimizer_moves_from_host_to_device():
    """Its states by name, and what 16-bit parameters are updated in."""
    opt, results = SGD(0.25, momentum=0.5), []
    for comm in (LocalCommunicator(), LocalCommunicator(gpu=0)):
        [w, g] = laws.to_device(comm, [np.ones(3, np.float16)] * 2)
        opt.apply("w", w, g)
        opt.set_states(opt.get_states())
        results.append(device.host_copy(w).tolist())
        assert device.gpu_of(opt._wide) == comm.gpu
    assert results == [[0.75] * 3, [0.625] * 3]


def test_masters_are_averaged_on_the_device():
    def main(comm):
        return [partial_masters(comm, PARTIAL["lamb"], np.dtype(np.float16), s).tolist() for s in (None, 0.5)]

    assert on_gpus(2, main) == run_ranks(2, main)


@pytest.mark.full  # five minutes
@pytest.mark.parametrize("size", [1, 2])
def test_all_laws_hold_on_doubles_of_gpus(size, one_warp, arithmetic):
    found = on_gpus(size, laws.all_of_them)
    expected = run_ranks(size, laws.independence)
    assert [r["digests"].tolist() for r in found] == [list(e) for e in expected]


def laws_in_turns(comm):
    """Every law, each with some of the optimizers and modes, by turns; `full` has all with all."""
    laws.sums(comm)
    laws.modes_agree(comm)
    for k, make in enumerate(laws.OPTIMIZERS.values()):
        (laws.ranks_agree_with_one, laws.resume, laws.sharding_changes_no_bit)[k % 3](comm, make=make)
    for k, mode in enumerate(laws.MODES):
        if k % 3 == 0:
            laws.same_bits(comm, mode)
        elif k % 3 == 1:
            laws.resume(comm, mode, stops=[1 + k % 4], num_batches=1 + k % 2)
        else:
            laws.overlap_changes_no_bit(comm, mode)
    laws.resume(comm, "topk", num_batches=3, sync_on_apply=False, deterministic=True)


def test_laws_and_modes_hold_on_doubles_of_gpus(one_warp, arithmetic):
    on_gpus(1, laws.each_once)
    on_gpus(2, laws_in_turns)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_ranks_have_the_bits_of_the_host(size, one_warp):
    """So do the three processes of the next test."""
    assert on_gpus(size, laws.independence) == run_ranks(size, laws.independence)


def over_mpi(comm):
    """A rank that is a process: digests of what must not depend on the transport, and of every other mode."""
    kernels.dispatch.THREADS = 32
    gpu.install()
    nccl.install(processes=True)
    there = NcclCommunicator.from_mpi()
    at_once = {"deterministic": True, "threshold": 60}  # threads have all thresholds
    digests = [laws.digest(laws.train(there, mode=mode, **at_once)[0]) for mode in laws.ELEMENTWISE]
    for mode in (m for m in laws.MODES if m not in laws.ELEMENTWISE):  # whose digests say it
        laws.same_bits(there, mode)
    laws.overlap_changes_no_bit(there)
    laws.capture_changes_no_bit(there, ErrorFeedback(TopK(0.1)))
    there.close()
    return {"digests": np.array(digests)}


@needs_mpi
@pytest.mark.parametrize("size", [3])
def test_processes_on_gpus_have_the_bits_of_threads(size, tmp_path):
    for real in ("float", "double"):
        shim.library(real)  # once for all processes
    found = run_mpi(size, over_mpi, tmp_path, timeout=500)
    assert [r["digests"].tolist() for r in found] == run_ranks(size, laws.independence)


# ----------------------------------------------------------------------------------------------- the host never waits


def steady(mode, monkeypatch):
    """What the host did in the seventh step on one of two ranks, the kernels that it launched, and how many buckets."""
    wait = streams.wait

    def noted(event, look):
        if not event.last.reached:
            gpu.machine().host.append("wait")
        wait(event, look)

    def main(comm):
        params, opt = laws.train(comm, steps=2, mode=mode)
        steps, machine = [list(laws.pairs(comm, params, step)) for step in range(2, 7)], gpu.machine()
        with gpu.lazily(gpu.lagging()):
            for pairs in steps:
                opt.engine.nonfinite.poll()  # the last outcome is there, as it is after a backward pass
                machine.host.clear()
                machine.log.clear()
                laws.MODES[mode](opt, pairs)
            return list(machine.host), [o.name for o in machine.log if "_float" in o.name], len(opt.plan.buckets)

    monkeypatch.setattr(streams, "wait", noted)
    return on_gpus(2, main)[0]


@pytest.mark.parametrize(
    "mode",
    [
        *("dense", "half", "half with memory", "partial", "topk", "topk per tensor", "threshold", "2bit", "1bit"),
        *("packed", "packed threshold", "dgc by gather", "dgc in int8", "dgc of all"),
    ],
)
def test_a_step_neither_waits_nor_allocates(mode, monkeypatch):
    assert steady(mode, monkeypatch)[0] == []


def test_a_threshold_without_memory_waits_once(monkeypatch):
    host, _, buckets = steady("threshold without memory", monkeypatch)
    assert (host, buckets) == (["wait"], 3)


LAUNCHES = [("dense", 0, 4), ("half", 0, 6), ("partial", 0, 5), ("2bit", 2, 4), ("1bit", 4, 4), ("dgc of all", 2, 4)]


@pytest.mark.parametrize(("mode", "each", "together"), LAUNCHES)
def test_a_step_launches_as_few_kernels_as_listed(mode, each, together, monkeypatch):
    """So many for each bucket, and so many for all: pack, sum up and count what is not finite, update."""
    whole_model(monkeypatch)
    _, launches, buckets = steady(mode, monkeypatch)
    assert len(launches) == each * buckets + together, launches


def whole_model(monkeypatch):
    """Let all buckets leave, and be updated, together, as those of a small model are."""
    for name in ("MESSAGE", "GROUP"):
        monkeypatch.setattr(f"distopt.engine.bucket_store.{name}", 1 << 20)


@pytest.fixture
def apart(monkeypatch):
    """Let every bucket leave by itself, as large ones do."""
    monkeypatch.setattr("distopt.engine.bucket_store.MESSAGE", 0)


@pytest.mark.parametrize(("mode", "messages"), [("dense", 1), ("half", 1), ("2bit", 3), ("topk", 3)])
def test_neighbouring_buckets_leave_together_where_each_element_is_sent_by_itself(mode, messages, monkeypatch):
    whole_model(monkeypatch)

    def main(comm):
        params, opt = laws.train(comm, steps=1, mode=mode)
        machine = gpu.machine()
        machine.log.clear()
        laws.MODES[mode](opt, laws.pairs(comm, params, 1))
        device.synchronize(device.current_stream())
        sent = [op for op in machine.log if op.name in ("allReduce", "allGather")]
        return len(sent) - 1  # and the flag

    assert on_gpus(2, main) == [messages] * 2


# ----------------------------------------------------------------------------------------------- not finite


def poisoned(comm, params, step, bad_step):
    for param, grad in laws.pairs(comm, params, step):
        if step == bad_step and param.name == "p1" and comm.rank == comm.size - 1:
            device.copy(grad, np.full(grad.shape, np.inf, grad.dtype))
        yield param, grad


@pytest.mark.parametrize("mode", every(2, laws.MODES))
def test_a_step_that_is_not_finite_changes_nothing_and_is_raised_one_step_late(mode):
    def main(comm):
        params, opt = laws.train(comm, steps=2, mode=mode)
        before = laws.digest(params), opt.state_dict()
        laws.MODES[mode](opt, poisoned(comm, params, 2, 2))
        assert laws.digest(params) == before[0]
        laws.assert_equal_states(opt.state_dict(), before[1])
        with pytest.raises(FloatingPointError, match=r"step 3 are not finite: rank 1: p1 \(50 of 50 entries\)"):
            laws.MODES[mode](opt, laws.pairs(comm, params, 2))
        assert laws.digest(params) == before[0]
        for step in (2, 3):
            laws.MODES[mode](opt, laws.pairs(comm, params, step))
        return laws.digest(params) == laws.digest(laws.train(comm, mode=mode)[0])

    assert on_gpus(2, main) == [True, True]


def test_close_raises_the_error_of_the_last_step():
    def main(comm):
        params, opt = laws.train(comm, steps=1)
        opt(poisoned(comm, params, 1, 1))
        with pytest.raises(
            FloatingPointError, match="step 2 are not finite: 100 entries of gradients and sums, of all ranks"
        ):
            opt.close()
        _, opt = laws.train(comm, steps=1)
        opt.close()

    on_gpus(2, main)


@pytest.mark.parametrize("sync_on_apply", [True, False])
def test_a_sum_that_overflows_does_not_stay_in_the_window(sync_on_apply):
    def main(comm):
        w = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        opt = DistOpt(SGD(1.0), comm, num_batches=2, nonfinite="skip", sync_on_apply=sync_on_apply)
        for size in (1, 60000, 1, 1, 1, 1, 1, 1):
            opt.step([(w, laws.to_device(comm, [np.full(4, size, np.float32)])[0])], Half(predivide=False))
        state = opt.state_dict()
        return device.host_copy(w.data).tolist(), state["step_counter"], state["skipped"], state["batches"]

    assert on_gpus(2, main) == run_ranks(2, main)


def test_a_refused_step_does_not_change_the_room_for_entries():
    def main(comm, bad):
        rng = np.random.default_rng(comm.rank)
        w = Parameter("w", laws.to_device(comm, [np.zeros(40_000, np.float32)])[0])
        opt = DistOpt(SGD(1.0), comm, nonfinite="skip")
        for step in range(4):
            g = rng.standard_normal(40_000).astype(np.float32)
            if step == 2 and bad:
                spoilt = np.full_like(g, np.nan)
                opt.backward_and_sparse_update([(w, laws.to_device(comm, [spoilt])[0])], spars=0.5)
            opt.backward_and_sparse_update([(w, laws.to_device(comm, [g])[0])], spars=0.5)
        return laws.digest([w]), opt.state_dict()["rooms"], opt.skipped

    for rank, (digest, rooms, skipped) in enumerate(on_gpus(2, lambda comm: main(comm, True))):
        assert skipped == 1
        assert (digest, rooms) == on_gpus(2, lambda comm: main(comm, False))[rank][:2]


def test_a_skip_not_yet_reported_is_in_the_state():
    def main(comm):
        params, opt = laws.train(comm, steps=1, nonfinite="skip")
        opt(poisoned(comm, params, 1, 1))
        saved = opt.state_dict()
        assert (saved["step_counter"], saved["skipped"], saved["skips_in_a_row"]) == (1, 1, 1)
        opt(laws.pairs(comm, params, 1))
        assert opt.skipped == 1
        opt(poisoned(comm, params, 2, 2))
        opt.update(*next(iter(laws.pairs(comm, params, 3))))
        opt.step()  # by hand; the one before was not applied
        return opt.step_counter, opt.opt.step_counter

    assert on_gpus(2, main) == [(3, 3)] * 2


@pytest.mark.parametrize("bad", [2, 3])
@pytest.mark.parametrize("options", [{}, {"num_batches": 2}], ids=str)
@pytest.mark.parametrize("mode", ["dense", "topk", "partial", "half with memory"])
def test_skipped_steps_count_as_on_the_host(mode, options, bad):
    def main(comm):
        params, opt = laws.train(comm, steps=0, mode=mode, nonfinite="skip", **options)
        for step in range(7):
            laws.MODES[mode](opt, poisoned(comm, params, step, bad))
        return laws.digest(params), opt.state_dict()

    for size in (1, 2):
        host = run_ranks(size, main)
        for (digest, state), (expected, other) in zip(on_gpus(size, main), host, strict=True):
            assert state["step_counter"] == other["step_counter"]
            assert state["batches"] == other["batches"]
            if size == 1 or mode == "partial":
                assert digest == expected
                laws.assert_equal_states(state["optimizer"], other["optimizer"])


def test_the_last_agreed_plan_stays_after_a_refused_one():
    """It keeps its own counts, and its own room for entries."""

    def main(comm):
        params, opt = laws.train(comm, steps=1, mode="threshold")
        rooms = opt.state_dict()["rooms"]
        opt.threshold = 500 if comm.rank else 60
        with pytest.raises(ValueError, match="threshold=60, rank 1 has threshold=500"):
            opt(laws.pairs(comm, params, 1))
        opt.threshold, before = 60, laws.digest(params)
        assert opt.state_dict()["rooms"] == rooms
        opt(poisoned(comm, params, 1, bad_step=1))
        assert laws.digest(params) == before
        with pytest.raises(FloatingPointError, match="step 2 are not finite"):
            opt.close()

    on_gpus(2, main)
    run_ranks(2, refused_plan_on_the_host)


def refused_plan_on_the_host(comm):
    """The same where the host looks."""
    params, opt = laws.train(comm, steps=1)
    opt.threshold = 500 if comm.rank else 60
    with pytest.raises(ValueError, match="threshold=60, rank 1 has threshold=500"):
        opt(laws.pairs(comm, params, 1))
    opt.threshold = 60
    with pytest.raises(FloatingPointError, match="p1"):
        opt(poisoned(comm, params, 1, bad_step=1))


@pytest.mark.parametrize("mode", every(2, laws.MODES, first=1))
def test_a_joined_rank_takes_part_in_the_others_steps(mode):
    def main(comm):
        params, opt = laws.train(comm, steps=2, mode=mode)
        for step in range(2, 4 - comm.rank):
            laws.MODES[mode](opt, laws.pairs(comm, params, step))
        opt.join()
        opt.close()
        return laws.digest(params)

    assert on_gpus(2, main) == run_ranks(2, main)


class Stranger:
    """Knows nothing of refusals."""

    def __init__(self):
        self.seen = 0

    def apply(self, name, value, grad):
        assert np.isfinite(device.host_copy(grad)).all()
        self.seen += 1


def test_a_custom_optimizer_never_gets_a_gradient_that_is_not_finite():
    def main(comm):
        params = laws.move_to_device(comm, laws.parameters())
        opt = DistOpt(Stranger(), comm, threshold=60)
        opt(laws.pairs(comm, params, 0))
        with pytest.raises(FloatingPointError, match="rank 1: p1"):
            opt(poisoned(comm, params, 1, 1))
        return opt.opt.seen

    assert on_gpus(2, main) == [len(laws.SHAPES)] * 2


def test_layerwise_updates_one_by_one_wait_once_for_each_ratio():
    there = LocalCommunicator(gpu=0)
    params = laws.move_to_device(there, laws.parameters([(10_003,), (7, 3), (4,), (4,)]))
    params[3].name = "fc.bias"
    pairs, opt = list(laws.pairs(there, params, 0)), laws.layer_wise()
    for _ in range(2):
        gpu.machine().host.clear()
        opt(pairs)
    assert gpu.machine().host.count("synchronize") == 3
    assert set(gpu.machine().host) == {"allocate", "synchronize"}


def test_a_window_goes_between_host_and_device():
    def main(comm, there):
        params, opt = laws.train(comm, steps=3, make=laws.WRAPPERS["lars of two batches"])
        state, values = opt.state_dict(), [device.host_copy(p.data) for p in params]
        assert state["optimizer"]["batches"] == 1
        params, opt = laws.train(there, steps=0, make=laws.WRAPPERS["lars of two batches"])
        for p, value in zip(params, values, strict=True):
            device.copy(p.data, value)
        opt.load_state_dict(state)
        return laws.digest(laws.train(there, 3, 3, params, opt)[0])

    host, gpu0 = LocalCommunicator(), LocalCommunicator(gpu=0)
    assert len({main(a, b) for a in (host, gpu0) for b in (host, gpu0)}) == 1


def test_a_sum_that_overflows_is_refused():
    def main(comm):
        w = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        opt = DistOpt(SGD(1.0), comm)
        opt.step([(w, laws.to_device(comm, [np.full(4, 60000, np.float32)])[0])], Half(predivide=False))
        with pytest.raises(FloatingPointError, match=r"the sum over ranks \(4 entries\)"):
            opt([(w, laws.to_device(comm, [np.ones(4, np.float32)])[0])])
        return device.host_copy(w.data).tolist(), opt.step_counter

    assert on_gpus(2, main) == [([0.0] * 4, 0)] * 2


# ----------------------------------------------------------------------------------------------- overlap


def test_buckets_travel_while_gradients_come(apart):
    """The first bucket is on the communicator's stream before the backward pass has given the last gradient."""

    def main(comm):
        params, opt = laws.train(comm, steps=1)
        seen = []

        def backward():
            for param, grad in laws.pairs(comm, params, 1):
                reduced = [op for op in gpu.machine().log if op.name == "allReduce"]
                assert all(op.stream == comm.duplicate()._stream.ptr for op in reduced)
                seen.append(len(reduced))
                yield param, grad

        gpu.machine().log.clear()
        opt(backward())
        return seen, len(opt.plan.buckets)

    for seen, buckets in on_gpus(2, main):
        assert seen[0] == 0
        assert seen == sorted(seen)
        assert seen[-1] == buckets - 1 > 0  # all but the last


def with_statistics(comm, orders):
    """Steps whose loss sums over ranks in the middle, as batch normalization does; an order of gradients for each."""
    params = laws.move_to_device(comm, [Parameter(f"p{k}", np.zeros(8, np.float32)) for k in range(4)])
    opt = DistOpt(SGD(1.0), comm, threshold=0, broadcast=False)
    [stat] = laws.to_device(comm, [np.full(8, 100, np.float32)])

    def loss(step, order):
        first, *rest = [(params[k], laws.to_device(comm, [np.full(8, k + 1, np.float32)])[0]) for k in order]
        yield first
        if step:
            comm.all_reduce(stat)
            comm.wait()
        yield from rest

    for step, order in enumerate(orders):
        opt(loss(step, order))
    return [device.host_copy(x)[0] for x in (*(p.data for p in params), stat)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 2, 3]])
def test_a_loss_may_use_the_communicator(apart, order):
    """Buckets that were sent before are on the same wire."""

    def main(comm):
        return with_statistics(comm, [range(4), order])

    assert on_gpus(2, main) == run_ranks(2, main) == [[-2, -4, -6, -8, 200]] * 2


def test_a_loss_that_uses_the_communicator_elsewhere_on_one_rank_is_an_error_on_all(apart):
    """NCCL would add one rank's statistics to another one's gradients."""

    def main(comm):
        with pytest.raises(
            ValueError, match=r"ranks differ: rank 0 has enqueued collectives .* same gradients on every"
        ):
            with_statistics(comm, [range(4), [1, 0, 2, 3] if comm.rank else range(4)])

    on_gpus(2, main)


@pytest.mark.parametrize("stage", [0, 3, 7])
def test_a_backward_pass_that_fails_halfway_fails_on_all_ranks(stage):
    def main(comm):
        params, opt = laws.train(comm, steps=2)
        before = laws.digest(params)

        def backward():
            for k, pair in enumerate(laws.pairs(comm, params, 2)):
                if comm.rank and k == stage:
                    raise KeyError("lost")
                yield pair

        with pytest.raises(RuntimeError, match=r"rank 1: KeyError: 'lost'"):
            opt(backward())
        assert laws.digest(params) == before
        for step in (2, 3):
            opt(laws.pairs(comm, params, step))
        return laws.digest(params) == laws.digest(laws.train(comm)[0])

    assert on_gpus(2, main) == [True, True]


# ----------------------------------------------------------------------------------------------- rooms


def bursts(comm, stop=None):
    """Threshold steps of which some want to send far more entries than the step before; returns what was sent too."""
    n, wire = 20_000, Metered(comm)
    w = Parameter("w", laws.to_device(comm, [np.zeros(n, np.float32)])[0])
    opt, total, sent = DistOpt(SGD(1.0), wire, broadcast=False), np.zeros(n), []
    for step, share in enumerate([0.001, 0.4, 0.4, 0.001, 0.001, 0.2]):
        draws = [np.random.default_rng([step, rank]).random(n, np.float32) for rank in range(comm.size)]
        grads = [np.where(d < share / (1 + r), 1, 1e-3).astype(np.float32) for r, d in enumerate(draws)]
        total += np.sum(grads, axis=0)  # ranks differ in how many are large
        wire.reset()
        opt.backward_and_sparse_update([(w, laws.to_device(comm, [grads[comm.rank]])[0])], spars=0.5)
        sent.append(wire.report()["all_gather"]["payload"] // 8)
        if step == stop:
            saved, opt = opt.state_dict(), DistOpt(SGD(1.0), wire, broadcast=False)
            opt.load_state_dict(saved)
    kept = laws.summed(comm, opt.state_dict()["states"]["residual"]["w"].astype(np.float64))
    np.testing.assert_allclose(kept - comm.size * device.host_copy(w.data).astype(np.float64), total, atol=1e-2)
    return laws.digest([w]), sent


def test_a_threshold_sends_what_there_is_room_for_and_loses_nothing():
    """Room is twice what the rank with most wanted in the step before, and the same on all ranks."""
    (digest, sent), (other, also_sent) = on_gpus(2, bursts)
    assert (digest, sent) == (other, also_sent)
    first, least = 20_000 // 64 + 256, 256
    assert sent[:2] == [first, least], sent
    assert 2 * 7_500 < sent[2] <= 20_000
    assert sent[4] < sent[3]
    for stop in range(5):
        assert on_gpus(2, lambda comm, stop=stop: bursts(comm, stop))[0][0] == digest


# ----------------------------------------------------------------------------------------------- streams


def orders(comm):
    """Ways in which a GPU may go on: the communicator's stream behind, the caller's behind, and any."""
    own = getattr(comm, "_stream", device.new_stream()).ptr
    yield from (gpu.lagging(own), gpu.lagging(0), gpu.shuffled(1), gpu.shuffled(2))


def lazily_trained(comm, mode, order, **options):
    """A digest of a run in which nothing is done before somebody waits for it; each step is in another stream."""
    streams = itertools.cycle([device.current_stream(), device.new_stream()])
    with gpu.lazily(order) as machine:
        params, opt = laws.train(comm, steps=0, mode=mode, **options)
        machine.finish()
        for step, stream in zip(range(4), streams, strict=False):
            with stream:
                laws.MODES[mode](opt, laws.pairs(comm, params, step))
        opt.engine.nonfinite.poll()
        machine.finish()
    return laws.digest(params)


@pytest.mark.parametrize("mode", every(3, laws.MODES))
def test_streams_may_lag_as_far_as_events_allow(mode):
    def main(comm):
        expected = laws.digest(laws.train(comm, mode=mode)[0])
        return [lazily_trained(comm, mode, order) == expected for order in orders(comm)]

    assert on_gpus(2, main) == [[True] * 4] * 2


WAITS = {
    "kernels beside, before the caller's": (NcclCommunicator, "on_comm_stream", lambda self: self._stream),
    "the caller, before the sums are there": (NcclCommunicator, "wait", lambda self: None),
    "a collective, before its array is filled": (device.StreamEvent, "__call__", lambda self, first, then: None),
    "a step, before the last one in another stream": (device.StreamEvent, "wait", lambda self: None),
}


@pytest.mark.parametrize("missing", WAITS)
def test_a_missing_wait_between_streams_changes_the_result(missing, monkeypatch):
    """Half and top-K in many small buckets: SINGA overwrote what its other streams still read."""

    def main(comm):
        return all(lazily_trained(comm, mode, order) == expected[mode] for mode in expected for order in orders(comm))

    expected = {
        mode: on_gpus(2, lambda comm, mode=mode: laws.digest(laws.train(comm, mode=mode)[0]))[0]
        for mode in ("half", "topk")
    }
    monkeypatch.setattr(*WAITS[missing])
    try:
        right = all(on_gpus(2, main))
    except Exception:
        right = False
    assert not right


def test_a_step_after_a_failed_one_waits_for_what_that_has_sent():
    """What was sent before one rank's backward pass failed is still on its way when the step is tried again."""

    def main(comm):
        def run(order):
            params, opt = laws.train(comm, steps=0)
            views = opt.gradient_views(params)
            with gpu.lazily(order) if order else contextlib.nullcontext():
                for step in range(3):
                    given = laws.to_device(comm, laws.gradients(params, step, comm.rank))
                    for attempt in range(2):

                        def backward(given=given, attempt=attempt):
                            for k, (p, view, g) in enumerate(zip(params, views, given, strict=True)):
                                if comm.rank and k == 5 and not attempt:
                                    raise KeyError("lost")
                                device.copy(view, g)
                                yield p, view

                        if attempt:
                            opt(backward())
                        else:
                            with pytest.raises(RuntimeError, match="lost"):
                                opt(backward())
                opt.engine.nonfinite.poll()
            return laws.digest(params)

        expected = laws.digest(laws.train(comm, steps=3)[0])
        return [run(order) == expected for order in (None, *orders(comm.duplicate()), *orders(comm))]

    assert on_gpus(2, main) == [[True] * 9] * 2


def test_states_are_read_after_steps_in_other_streams():
    def main(comm):
        expected = laws.train(comm, steps=3, mode="topk")
        found = []
        for order in orders(comm):
            stream = device.new_stream()
            with gpu.lazily(order) as machine:
                params, opt = laws.train(comm, steps=0, mode="topk")
                machine.finish()
                with stream:
                    for step in range(2):
                        laws.MODES["topk"](opt, laws.pairs(comm, params, step))
                opt.load_state_dict(opt.state_dict())  # in the null stream
                with stream:
                    laws.MODES["topk"](opt, laws.pairs(comm, params, 2))
                saved = opt.state_dict()
                machine.finish()
            laws.assert_equal_states(saved, expected[1].state_dict())
            found.append(laws.digest(params) == laws.digest(expected[0]))
        return found

    assert on_gpus(2, main) == [[True] * 4] * 2


@pytest.mark.parametrize("mode", ["dense", "topk"])
def test_memory_of_an_old_plan_is_kept_until_it_has_been_read(mode):
    """States move to their new places in another stream than that to which the old memory goes back."""

    def main(comm):
        def run(order):
            streams = itertools.cycle([device.current_stream(), device.new_stream()])
            with gpu.lazily(order) if order else contextlib.nullcontext():
                params, opt = laws.train(comm, steps=0, nonfinite="propagate")  # nobody waits
                for step, threshold in enumerate([60, 500, 20, 0]):
                    opt.threshold = threshold
                    with next(streams):
                        laws.MODES[mode](opt, laws.pairs(comm, params, step))
                state = opt.state_dict()
            return laws.digest(params), state

        digest, state = run(None)
        for order in orders(comm):
            found = run(order)
            assert found[0] == digest
            laws.assert_equal_states(found[1], state)

    on_gpus(2, main)


def test_one_optimizer_for_two_models_in_two_streams():
    """Its numbers change for the one while the other has not read them yet."""

    def main(comm):
        def run(order):
            adam, streams = laws.OPTIMIZERS["adam"](), (device.current_stream(), device.new_stream())
            with gpu.lazily(order) if order else contextlib.nullcontext():
                models = [laws.move_to_device(comm, laws.parameters(rank=comm.rank)) for _ in streams]
                for k, p in enumerate(models[1]):
                    p.name = f"other {k}"
                gpu.machine().finish()
                opts = [DistOpt(adam, comm, threshold=60, nonfinite="propagate") for _ in models]
                for step in range(3):
                    for opt, params, stream in zip(opts, models, streams, strict=True):
                        with stream:
                            opt(laws.pairs(comm, params, step))
                gpu.machine().finish()
            return [laws.digest(params) for params in models]

        expected = run(None)
        for order in (min, max, *orders(comm)):
            assert run(order) == expected

    on_gpus(2, main)


def test_parameters_read_after_gradient_views_are_those_of_rank_0():
    """A caller's stream that reads a parameter after ``gradient_views`` comes after the broadcast."""

    def main(comm):
        for order in orders(comm):
            with gpu.lazily(order) as machine:
                params, opt = laws.train(comm, steps=0)
                machine.finish()
                opt.gradient_views(params)
                laws.same_on_all_ranks(comm, laws.digest(params))

    on_gpus(2, main)


# ----------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("compressor", laws.CAPTURED, ids=repr)
def test_a_replay_of_a_captured_step_has_the_bits_of_the_step(compressor):
    def main(comm):
        laws.capture_changes_no_bit(comm, compressor)
        laws.capture_changes_no_bit(comm, compressor, make=laws.OPTIMIZERS["adam"], nonfinite="skip", nan_at=(2, 4))

    on_gpus(2, main)


def test_replays_are_ordered_with_steps_in_other_streams():
    """Between a caller that feeds them in one stream, and one that goes on without them in another."""

    def main(comm):
        def run(order, captured):
            with gpu.lazily(order) if order else contextlib.nullcontext():
                params, opt = laws.train_captured(comm, captured=captured, nonfinite="propagate")  # nobody waits
                with device.new_stream():
                    opt(laws.pairs(comm, params, 6))
                opt.engine.nonfinite.poll()
                state = opt.state_dict()
            return laws.digest(params), state

        expected = run(None, captured=False)
        for order in (*orders(comm), min, max):  # the oldest stream first, or the newest
            digest, state = run(order, captured=True)
            assert digest == expected[0]
            laws.assert_equal_states(state, expected[1])

    on_gpus(2, main)


def test_a_replay_has_the_same_commands_every_time():
    """No allocation, no wait, no other argument: everything that changes is read from memory."""

    def main(comm):
        params = laws.move_to_device(comm, laws.parameters())
        opt = DistOpt(laws.OPTIMIZERS["adam"](), comm, threshold=60)
        pairs = list(zip(params, opt.gradient_views(params), strict=True))
        step = opt.capture(lambda: pairs)
        machine, seen = gpu.machine(), []
        for _ in range(3):
            machine.host.clear()
            machine.log.clear()
            step()
            seen.append([(op.name, op.details) for op in machine.log if op.name not in ("record", "wait")])
            assert machine.host == []
        uploads = [[d for name, d in ops if name == "memcpy" and d[3] == device.HOST_TO_DEVICE] for ops in seen]
        assert [len(u) for u in uploads] == [0, 1, 1]  # Adam's numbers; the first were there for the capture
        rest = [[op for op in ops if op[0] != "memcpy" or op[1][3] != device.HOST_TO_DEVICE] for ops in seen]
        assert rest[0] == rest[1] == rest[2]

    on_gpus(2, main)


def test_a_captured_step_is_invalid_after_the_next_change():
    """A graph has addresses: of tables, scratch memory and states that others would change under it."""

    def changes(opt, params, pairs, comm):
        yield lambda: opt(pairs)
        yield lambda: opt.load_state_dict(opt.state_dict())
        yield lambda: opt.opt.set_states(opt.opt.get_states())
        yield lambda: opt.capture(lambda: pairs, Half())
        yield lambda: setattr(params[0], "data", device.copied(params[0].data))

    def main(comm):
        for number in range(5):
            params = laws.move_to_device(comm, laws.parameters())
            opt = DistOpt(SGD(0.1, momentum=0.9), comm, threshold=60)
            pairs = list(zip(params, opt.gradient_views(params), strict=True))
            step = opt.capture(lambda pairs=pairs: pairs)
            step()
            list(changes(opt, params, pairs, comm))[number]()
            with pytest.raises(RuntimeError, match=r"capture the step again|data must be the array of when"):
                step()
        with pytest.raises(ValueError, match="deterministic must be False"):
            DistOpt(SGD(0.1), comm, deterministic=True).capture(lambda: pairs)
        pairs = list(laws.pairs(comm, params, 0))
        step = DistOpt(SGD(0.1), comm).capture(lambda: pairs)
        comm.close()
        with pytest.raises(RuntimeError, match="closed"):
            step()

    on_gpus(2, main)


def test_momentum_that_comes_after_the_capture_is_refused():
    """It would be a second one."""

    def main(comm):
        params = laws.move_to_device(comm, laws.parameters())
        pairs = list(zip(params, laws.to_device(comm, laws.gradients(params, 0, comm.rank)), strict=True))
        opt = DistOpt(SGD(0.1, momentum=lambda k: 0.0 if k < 2 else 0.9), comm)
        step = opt.capture(lambda: pairs, laws.TRIES["dgc in int8"].compressor)
        step()
        with pytest.raises(ValueError, match=r"must be without momentum, .*got SGD's momentum=0\.9"):
            step()
        return opt.step_counter

    assert on_gpus(2, main) == [2, 2]


def test_steps_that_cannot_be_captured_are_refused():
    def main(comm):
        params = laws.move_to_device(comm, laws.parameters())
        pairs = list(laws.pairs(comm, params, 0))
        for opt, compressor, text in (
            (DistOpt(SGD(0.1), comm), Threshold(0.1), "the payload of a captured step must be of a fixed size"),
            (DistOpt(SGD(0.1), comm, num_batches=2), None, "num_batches must be 1"),
            (DistOpt(Stranger(), comm), None, "the optimizer of a captured step must be one of distopt.optim"),
        ):
            with pytest.raises(ValueError, match=text):
                opt.capture(lambda: pairs, compressor)
        fresh = iter([laws.pairs(comm, params, step) for step in range(2)])
        with pytest.raises(RuntimeError, match="arrays of a captured step must stay the same ones"):
            DistOpt(SGD(0.1), comm).capture(lambda: next(fresh))

    on_gpus(2, main)
    with pytest.raises(ValueError, match="must be on a GPU, got"):
        DistOpt(SGD(0.1), LocalCommunicator()).capture(list)


def test_a_captured_loss_has_temporary_arrays_of_its_own():
    """A replay writes to them although they were freed after the capture."""

    def main(comm):
        n = 1003
        w, x = laws.to_device(comm, [np.zeros(n, np.float32), np.full(n, 3, np.float32)])
        opt = DistOpt(SGD(1.0), comm)
        param, [view] = Parameter("w", w), opt.gradient_views([Parameter("w", w)])

        def loss():
            temporary = device.empty(n, np.float32, like=x)
            device.copy(temporary, x)
            kernels.scale(temporary, 2.0)
            device.copy(view, temporary)
            return [(param, view)]

        step = opt.capture(loss)
        with step._stream:  # in which a temporary array's memory would be the next one's
            others = laws.to_device(comm, [np.full(n, k, np.float32) for k in range(8)])
        device.synchronize(step._stream)
        step()
        assert [device.host_copy(other).tolist() for other in others] == [[k] * n for k in range(8)]
        return set(device.host_copy(w).tolist())

    assert on_gpus(2, main) == [{-12.0}] * 2


def test_a_captured_matrix_product_is_refused_with_what_to_capture_instead(arithmetic):
    def main(comm):
        w, x = laws.to_device(comm, [np.zeros((3, 3), np.float32), np.ones((3, 3), np.float32)])
        param, opt = Parameter("w", w), DistOpt(SGD(1.0), comm)
        with pytest.raises(
            RuntimeError, match=r"rank 0: a captured loss .* no matrix product, .*cuBLAS.*gradient_views"
        ):
            opt.capture(lambda: [(param, x @ x)])
        [view] = opt.gradient_views([param])
        pairs = [(param, view)]
        device.copy(view, x @ x)
        step = opt.capture(lambda: pairs)
        for _ in range(2):
            device.copy(view, x @ x)
            step()
        return device.host_copy(w).ravel().tolist()

    found = on_gpus(2, main)
    assert found[0] == found[1]
    assert len(set(found[0])) == 1


NOT_CAPTURED = {
    "matrix product": (lambda x: x @ x, "calling cuBLAS API during stream capture"),
    "random numbers": (lambda x: cupy.random.standard_normal((3, 3)), "calling cuRAND API during stream capture"),
    "wait": (lambda x: x * float(x.sum()), "cudaErrorStreamCaptureUnsupported"),
}


@pytest.mark.parametrize("call", NOT_CAPTURED)
def test_a_loss_that_cannot_be_captured_on_one_rank_leaves_all_ranks_as_after_a_step(call, arithmetic):
    make, text = NOT_CAPTURED[call]

    def main(comm):
        w, x = laws.to_device(comm, [np.zeros((3, 3), np.float32), np.ones((3, 3), np.float32)])
        param, opt, caller = Parameter("w", w), DistOpt(SGD(1.0), comm), device.current_stream()
        [view] = opt.gradient_views([param])

        def loss():
            device.copy(view, (make(x) if comm.rank else x + x).astype(np.float32))
            yield param, view

        with gpu.lazily(gpu.shuffled(0) if comm.rank else min):  # the caller's stream first
            with pytest.raises(RuntimeError, match=rf"rank 1: a captured loss can only .*{text}.*gradient_views"):
                opt.capture(loss)
            seen = device.host_copy(w)  # the ordinary step was made, and the caller's stream comes after it
        assert gpu.machine().captures == {}
        assert device.current_stream() is caller
        assert opt.step_counter == 1
        before = device.host_copy(w)
        assert seen.tobytes() == before.tobytes() != bytes(before.nbytes)
        opt([(param, x)])
        np.testing.assert_array_equal(device.host_copy(w), before - 1)

    on_gpus(2, main)


def test_a_captured_step_keeps_the_gradients_that_it_reads():
    """Its caller may forget them, and their memory would be that of others."""

    def main(comm):
        n = 1003
        w, g = laws.to_device(comm, [np.zeros(n, np.float32), np.full(n, 3, np.float32)])
        pairs = [(Parameter("w", w), g)]
        step = DistOpt(SGD(1.0), comm).capture(lambda pairs=pairs: pairs)
        del pairs, g
        others = laws.to_device(comm, [np.full(n, k, np.float32) for k in range(8)])
        step()
        return set(device.host_copy(w).tolist()), len(others)

    assert on_gpus(2, main) == [({-6.0}, 8)] * 2


def test_a_kernel_takes_two_lists_of_arrays():
    """Their addresses go up one after the other, and both must still be there at the launch."""
    n, out = 6, gpu.array(np.ones(6, np.float32))
    indices = [gpu.array(np.array(i, np.int32)) for i in ([0, 2], [2, 5])]
    entries = [gpu.array(np.array(e, np.float32)) for e in ([1, 2], [3, 4])]
    kernels.decode_all(out, indices, entries, gpu.array(np.array([2, 2])))
    assert device.host_copy(out).tolist() == [1, 0, 5, 0, 0, 4][:n]


# ----------------------------------------------------------------------------------------------- bad input


def test_arrays_that_are_not_there():
    def main(comm):
        there = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        here = Parameter("w", np.zeros(4, np.float32))
        with pytest.raises(TypeError, match=r"w: the parameter must be on GPU 1, got .*, on the host: cupy.asarray"):
            DistOpt(SGD(), comm)([(here if comm.rank else there, there.data if not comm.rank else here.data)])
        with pytest.raises(TypeError, match=r"w: the gradient must be on GPU 0, got .*, on the host: cupy.asarray"):
            DistOpt(SGD(), comm)([(there, here.data)])

    on_gpus(2, main)
    w = gpu.array(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match=r"w: the parameter must be on the host, got .* on GPU 0: cupy.asnumpy"):
        DistOpt(SGD(), LocalCommunicator())([(Parameter("w", w), w)])
    comm = LocalCommunicator(gpu=3)
    with pytest.raises(ValueError, match=r"w: the parameter must be on GPU 3, got .* on GPU 0: .*Device\(3\)\.use"):
        DistOpt(SGD(), comm)([(Parameter("w", w), w)])
    with pytest.raises(ValueError, match=r"w: the gradient must be on GPU 3, got .* on GPU 0: .*Device\(3\)\.use"):
        DistOpt(SGD(), comm)([(Parameter("w", gpu.array(np.zeros(4, np.float32))), w)])
    device.use_gpu(0)


def test_a_gpu_without_room_on_one_rank_is_an_error_on_all():
    def main(comm):
        params = laws.move_to_device(comm, laws.parameters(shapes=[(3000,), (3000,)]))
        opt = DistOpt(SGD(0.1, momentum=0.9), comm, threshold=100)
        pairs = list(laws.pairs(comm, params, 0))
        gpu.machine().memory = 11_000 if comm.rank else 1 << 40
        with pytest.raises(MemoryError, match=r"rank 1: Out of memory"):
            opt(pairs)
        gpu.machine().memory = 1 << 40

    on_gpus(2, main)


@pytest.mark.parametrize("mode", ["dense", "dgc in two phases"])  # whose host waits for numbers after a sum
def test_an_error_of_nccl_in_the_middle_of_a_run_ends_it(mode):
    """NCCL tells every rank that something has failed; each says so, or that another one has left."""

    def main(comm):
        params, opt = laws.train(comm, steps=2, mode=mode)
        comm.barrier()
        nccl.faults.asynchronous[comm.rank, 0] = (comm._comm.calls, nccl.REMOTE_ERROR)  # with the next call
        more = list(laws.pairs(comm, params, 2))
        try:
            for _ in range(3):
                laws.MODES[mode](opt, more)
        except RuntimeError as error:
            return str(error)

    found = on_gpus(2, main)
    assert any(f"rank {r}: NCCL failed on GPU {r} in all_reduce" in text for r, text in enumerate(found)), found
    assert all("NCCL failed" in text or "left" in text for text in found), found


def test_states_go_between_host_and_device():
    host, gpu0 = LocalCommunicator(), LocalCommunicator(gpu=0)
    expected, _ = laws.train(host, steps=6, mode="topk")
    for first, second in ((host, gpu0), (gpu0, host)):
        params, opt = laws.train(first, steps=3, mode="topk")
        saved = opt.state_dict()
        moved = laws.move_to_device(second, [Parameter(p.name, device.host_copy(p.data)) for p in params])
        _, again = laws.train(second, steps=0, mode="topk")
        again.load_state_dict(saved)
        laws.train(second, 3, 3, moved, again, mode="topk")
        assert laws.digest(moved) == laws.digest(expected)


@pytest.mark.parametrize("mode", ["dense", "topk", "threshold", "partial"])
def test_a_checkpoint_goes_between_host_and_device(mode, tmp_path):
    def run(comm, path, start, steps):
        params = laws.move_to_device(comm, laws.parameters(rank=comm.rank))
        opt = DistOpt(laws.OPTIMIZERS["adam"](), comm, threshold=60, deterministic=True)
        opt.load(path, params)
        assert opt.step_counter == start
        laws.train(comm, steps=steps, start=start, params=params, opt=opt, mode=mode)
        opt.save(path, params)
        return laws.digest(params)

    whole = run_ranks(2, lambda comm: run(comm, tmp_path / "whole", 0, 6))
    on_gpus(2, lambda comm: run(comm, tmp_path / "parts", 0, 2))
    run_ranks(2, lambda comm: run(comm, tmp_path / "parts", 2, 2))
    assert on_gpus(2, lambda comm: run(comm, tmp_path / "parts", 4, 2)) == whole


def test_verbs_on_a_gpu_have_the_results_of_the_host():
    def main(comm):
        opt = DistOpt(SGD(), comm, buffSize=5)
        mine = [np.arange(n, dtype=np.float32) + comm.rank for n in (3, 9)]
        a, b = laws.to_device(comm, mine)
        opt.fused_all_reduce([a, b])
        c, d = laws.to_device(comm, mine)
        opt.all_reduce_half(c)
        opt.wait()
        residual = device.gpu_zeros(9, np.float32)
        opt.sparsification(d, residual, spars=0.3, topK=True)
        return [device.host_copy(x).tolist() for x in (a, b, c, d, residual)]

    def on_host(comm):
        opt = DistOpt(SGD(), comm, buffSize=5)
        a, b, c, d = (np.arange(n, dtype=np.float32) + comm.rank for n in (3, 9, 3, 9))
        opt.fused_all_reduce([a, b])
        opt.all_reduce_half(c)
        residual = np.zeros(9, np.float32)
        opt.sparsification(d, residual, spars=0.3, topK=True)
        return [x.tolist() for x in (a, b, c, d, residual)]

    assert on_gpus(2, main) == run_ranks(2, on_host)


def test_a_gradient_averaged_and_updated_by_hand_on_a_gpu():
    def main(comm):
        opt = DistOpt(SGD(1.0), comm)
        w = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        g = laws.to_device(comm, [np.full(4, 1.0 + comm.rank, np.float32)])[0]
        opt.broadcast([w])
        opt.all_reduce(g)
        opt.wait()
        opt.update(w, g)
        opt.step()
        return device.host_copy(w.data).tolist()

    assert on_gpus(2, main) == [[-1.5] * 4] * 2


# ----------------------------------------------------------------------------------------------- the double


def test_commands_left_by_an_ended_rank_are_not_run_later(monkeypatch):
    """They would write to memory that was freed."""
    done, left = [], []

    def rank(comm):
        left.append(gpu.machine())
        left[0].order = min
        left[0].enqueue("late", lambda: done.append("late"))

    run_ranks(1, rank)
    gpu.install(monkeypatch.setattr)
    left[0].go_on()
    assert not done


# ----------------------------------------------------------------------------------------------- the compiler


class Binary:
    """A module that keeps what is in its file."""

    def __init__(self, path):
        self.binary = pathlib.Path(path).read_bytes()


@pytest.fixture
def nvrtc(monkeypatch):
    """The real one, which needs no GPU."""
    real = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    try:
        real.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC is missing: pip install 'distopt[nvrtc]' ({type(error).__name__})")
    monkeypatch.setattr(cupy.cuda, "nvrtc", real)
    monkeypatch.setattr(cupy, "RawModule", Binary)
    return real


def compiled(text="pack.cu", more="", flags=CUDA_FLAGS):
    headers = {h.name: h.read_text() for h in NATIVE.glob("*.h")}
    return device.compile_text(
        text, (NATIVE / text).read_text() + more, headers, (*flags, "-Dreal=float"), cubins.cached
    ).binary


def test_texts_are_compiled_for_the_gpu_at_hand(nvrtc, monkeypatch):
    binary = compiled()
    assert binary.startswith(b"\x7fELF")
    assert b"pack_float" in binary


def test_a_gpu_newer_than_the_compiler_gets_ptx(nvrtc, monkeypatch):
    monkeypatch.setattr(gpu.Device, "compute_capability", "999")
    assert b".version" in compiled()
    monkeypatch.setattr(gpu.Device, "compute_capability", "30")
    with pytest.raises(RuntimeError, match="does not compile for this GPU's compute capability 30"):
        compiled()


def test_a_text_that_does_not_compile_says_where(nvrtc):
    with pytest.raises(RuntimeError, match=r"(?s)pack.cu does not compile for sm_90.*undefined"):
        compiled(more="\nKERNEL(wrong)(long long n) { nonsense(n); }\n")


# ----------------------------------------------------------------------------------------------------- two phases

TWO_PHASES = [m for m in laws.MODES if "two phases" in m and "threshold" not in m]  # which has a capacity on GPUs


@pytest.mark.parametrize("mode", TWO_PHASES)
def test_in_two_phases_gpus_have_the_bits_of_the_host(mode, one_warp):
    """Parameters, residuals and what owners owe: the owner adds in rank order wherever the arrays are."""

    def main(comm):
        params, opt = laws.train(comm, mode=mode, shapes=[(40, 30), (7,), (3000,), ()], deterministic=True)
        states = opt.state_dict()["states"]
        kept = {(s, n): a.tobytes() for s, arrays in states.items() for n, a in arrays.items() if a.any()}
        return laws.digest(params), kept

    assert on_gpus(3, main) == run_ranks(3, main)


def test_in_two_phases_a_refused_step_leaves_everything_as_it_was(one_warp):
    """The skip flag is read by kernels: nothing is selected, sent or owed in a step with a NaN."""

    def main(comm):
        params, opt = laws.train(comm, steps=2, mode="packed in two phases", nonfinite="skip")
        before = laws.digest(params), opt.state_dict()["states"]
        laws.MODES["packed in two phases"](opt, poisoned(comm, params, 2, 2))
        laws.assert_equal_states(opt.state_dict()["states"], before[1])
        assert laws.digest(params) == before[0]
        assert opt.skipped == 1

    on_gpus(2, main)


def test_in_two_phases_buckets_of_several_dtypes_have_the_bits_of_the_host(one_warp):
    assert on_gpus(3, in_two_dtypes) == run_ranks(3, in_two_dtypes)


@pytest.mark.parametrize("compressor", [COMPRESSORS[k] for k in (0, 4, 5)], ids=repr)
def test_in_two_phases_borders_move_on_gpus_as_on_the_host(compressor, one_warp):
    """A step with a NaN changes nothing, also where it is the first one after a move, in which debts move too."""

    def main(comm, poison=False):
        params, (first,), opt = train_crowded(comm, compressor, 1, deterministic=True, nonfinite="skip")
        if poison:
            gradients = crowded(1, comm.rank)
            gradients[0][...] = np.nan
            opt.step(list(zip(params, laws.to_device(comm, gradients), strict=True)), compressor, False, "two_phase")
        borders = go_on(comm, opt, params, compressor, range(1, 4))
        states = opt.state_dict()["states"]
        kept = {(s, n): a.tobytes() for s, arrays in states.items() for n, a in arrays.items() if a.any()}
        return laws.digest(params), kept, [first, *borders], opt.skipped

    host = run_ranks(3, main)
    assert host[0][2][0] != host[0][2][1], "borders have moved"
    assert on_gpus(3, main) == host
    assert on_gpus(3, lambda comm: main(comm, poison=True)) == [(*found[:3], 1) for found in host]


def on_nodes(comm, per_node=2):
    """Ranks as if they were on several machines."""
    comm._hosts = [rank // per_node for rank in range(comm.size)]
    return comm


@pytest.mark.parametrize("sender", [Threshold(1.0), Packed(Threshold(1.0))], ids=repr)
@pytest.mark.parametrize(("exchange", "size"), [("two_phase", 3), ("nodes", 4)])
def test_the_room_for_entries_follows_their_number_in_every_exchange(exchange, size, sender, one_warp):
    """Each step sends less than twice as many as the last one, and the first no more than fit: as many as a host."""
    counts, n = [100, 170, 300, 500], 6000

    def gradient(rank, step):
        """So many integers, the others are zero."""
        rng, x = np.random.default_rng([rank, step]), np.zeros(n, np.float32)
        x[rng.choice(n, counts[step], replace=False)] = rng.integers(1, 10, counts[step])
        return x

    def main(comm):
        [w] = laws.to_device(on_nodes(comm), [np.zeros(n, np.float32)])
        param, opt = Parameter("w", w), DistOpt(SGD(1.0), comm)
        for step in range(len(counts)):
            pairs = [(param, laws.to_device(comm, [gradient(comm.rank, step)])[0])]
            opt.step(pairs, ErrorFeedback(sender), False, exchange)
        state = opt.state_dict()
        kept = {name: arrays["w"].tobytes() for name, arrays in state["states"].items()}
        return laws.digest([param]), kept, state["rooms"]

    for (*found, [room]), (*expected, _) in zip(on_gpus(size, main), run_ranks(size, main), strict=True):
        assert found == expected
        assert room >= 2 * counts[-1] > n // 64 + 256


# ----------------------------------------------------------------------------------------------------- nodes

BY_NODES = [
    Dense(),
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(Packed(TopK(0.1))),
    ErrorFeedback(TwoBit(0.5)),
    DeepGradientCompression(TopK(0.1, per_tensor=True), weight_decay=0.01),
]


def trained_by_nodes(comm, compressor, order=None):
    """A digest of parameters, and what ranks keep, after steps on nodes of two ranks."""
    with gpu.lazily(order) if order else contextlib.nullcontext():
        options = {"shapes": [(40, 30), (7,), (1000,), ()], "mode": "dgc in int8", "deterministic": True}
        params, opt = laws.train(on_nodes(comm), steps=0, **options)
        for step in range(3):
            opt.step(laws.pairs(comm, params, step), compressor, False, "nodes")
        states = opt.state_dict()["states"]
    return laws.digest(params), {(s, n): a.tobytes() for s, arrays in states.items() for n, a in arrays.items()}


@pytest.mark.parametrize("size", [4, 6])  # two nodes gather, three exchange in two phases
@pytest.mark.parametrize("compressor", BY_NODES, ids=repr)
def test_by_nodes_gpus_have_the_bits_of_the_host(compressor, size, one_warp, monkeypatch):
    """Sums are added in rank order inside of a node, and between nodes."""
    monkeypatch.setattr("distopt.exchange.choice.GATHER_BELOW", 0)
    monkeypatch.setattr(gpu, "GPUS", size)

    def main(comm):
        return trained_by_nodes(comm, compressor)

    assert on_gpus(size, main) == run_ranks(size, main)


@pytest.mark.parametrize("compressor", [*BY_NODES[1:], ErrorFeedback(Threshold(0.7))], ids=repr)
def test_by_nodes_streams_may_lag_as_far_as_events_allow(compressor, one_warp):
    """Those of the two communicators of a rank, and the caller's."""

    def main(comm):
        expected = trained_by_nodes(comm, compressor)
        mine = [part._stream.ptr for part in (comm, *nodes_of(comm))]
        orders = [gpu.lagging(*mine), gpu.lagging(*mine[::-1]), gpu.lagging(0), gpu.shuffled(1)]
        return [trained_by_nodes(comm, compressor, order) == expected for order in orders]

    assert on_gpus(4, main) == [[True] * 4] * 4
