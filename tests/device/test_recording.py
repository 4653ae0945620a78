"""Recorded launches: replayed while they are the same, recorded anew when anything that they depend on has changed."""

import collections

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, device, kernels, run_ranks
from distopt.compress import DeepGradientCompression, ErrorFeedback, Packed, TopK
from distopt.device import DeviceMirror, Recording
from distopt.optim import SGD
from doubles.ranks import on_gpus

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu = pytest.importorskip("doubles.gpu")

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


@pytest.fixture
def calls(monkeypatch):
    """How many kernels were launched, and graphs replayed."""
    counts = collections.Counter()

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(gpu.Graph, "launch", counted("graphs", gpu.Graph.launch))
    monkeypatch.setattr(gpu.RawKernel, "__call__", counted("kernels", gpu.RawKernel.__call__))
    return counts


def add_up(key, recording, stream, total, x):
    with stream:
        return recording.run(key, lambda: kernels.accumulate(x, total), 0)


@pytest.fixture
def stream(doubles):
    return device.new_stream()


def test_work_is_enqueued_then_recorded_then_replayed(calls, stream):
    with stream:
        total, x = gpu.array(np.zeros(4, np.float32)), gpu.array(np.ones(4, np.float32))
    recording = Recording()
    for _ in range(5):
        add_up("a", recording, stream, total, x)
    assert device.host_copy(total).tolist() == [5.0] * 4
    assert calls == {"kernels": 2, "graphs": 4}  # as it is, and into the graph; the graph replays itself first, too


def test_another_key_is_enqueued_as_it_is_and_recorded_anew(calls, stream):
    with stream:
        total, x = gpu.array(np.zeros(4, np.float32)), gpu.array(np.ones(4, np.float32))
    recording = Recording()
    for key in "aaabbbab":
        add_up(key, recording, stream, total, x)
    assert device.host_copy(total).tolist() == [8.0] * 4
    assert calls["graphs"] == 4  # the second and third of a, and of b; the others came after another key


def test_numbers_in_a_mirror_are_those_of_the_replay(stream):
    layout = kernels.layout.BucketLayout(["x"], [(4,)], [0], np.float32)
    recording = Recording()
    with stream:
        flat, count = gpu.array(np.zeros(4, np.float32)), gpu.array(np.zeros(1, np.int64))
        sources = [gpu.array(np.full(4, k, np.float32)) for k in range(6)]
        for k, source in enumerate(sources):
            layout.point_to([source])
            recording.run("same", lambda: kernels.pack(layout, flat, 1.0, count, np.inf), 0)
            assert device.host_copy(flat).tolist() == [k] * 4


def test_work_that_uploads_what_was_not_there_before_is_an_error(stream):
    recording, mirrors = Recording(), iter([DeviceMirror(np.zeros(1)) for _ in range(2)])
    with stream:
        recording.run("same", lambda: next(mirrors).address(0), 0)
        with pytest.raises(RuntimeError, match="arrays of a captured step must stay the same ones"):
            recording.run("same", lambda: next(mirrors).address(0), 0)
        assert recording.run("same", lambda: 7, 0) == 7, "nothing is left of the failed one"


def test_dropped_graphs_are_recorded_again(calls, stream):
    with stream:
        total, x = gpu.array(np.zeros(4, np.float32)), gpu.array(np.ones(4, np.float32))
    recording = Recording()
    for step in range(6):
        if step == 3:
            device.drop_graphs(0)
        add_up("a", recording, stream, total, x)
    assert device.host_copy(total).tolist() == [6.0] * 4
    assert calls == {"kernels": 3, "graphs": 5}


DGC = DeepGradientCompression(TopK(0.1), momentum=0.5, weight_decay=0.1, exclude_1d=False)


@pytest.mark.parametrize(
    "compressor", [ErrorFeedback(TopK(0.1)), ErrorFeedback(Packed(TopK(0.1))), DGC], ids=lambda c: type(c).__name__
)
def test_the_third_step_replays_two_graphs_a_bucket_and_more_for_weight_decay(compressor, calls):
    def main(comm):
        params, opt = laws.train(comm, steps=0, make=lambda: SGD(0.1))
        seen = []
        for step in range(5):
            comm.barrier()
            before = calls.copy()
            comm.barrier()
            opt.step(list(laws.pairs(comm, params, step)), compressor)
            comm.barrier()
            seen.append(calls - before)
        return seen, len(opt.plan.buckets)

    [(seen, buckets), _] = on_gpus(2, main)
    each = 4 if compressor.traits.has_hooks else 2
    assert seen[0]["graphs"] == 0
    assert seen[-1] == seen[-2]
    assert seen[-1]["graphs"] == 2 * each * buckets  # of two ranks
    # both ranks: a launch of pack and of an update for each group, counts of each group, and their sum
    assert seen[-1]["kernels"] == 2 * (2 + 2 + 2 + 1)


def moved(comm, change):
    """Steps between which something is changed; the parameters after them."""
    params, compressor = (
        laws.move_to_device(comm, laws.parameters(rank=comm.rank)),
        DeepGradientCompression(TopK(0.3), momentum=0.5, weight_decay=0.1, exclude_1d=False),
    )
    opt = DistOpt(SGD(0.1), comm, threshold=60, deterministic=True)
    for step in range(9):
        if step == 5:
            change(comm, params, opt, compressor)
        opt.step(list(laws.pairs(comm, params, step)), compressor)
    return laws.digest(params)


def another_momentum(comm, params, opt, compressor):
    compressor.momentum = 0.25


def another_array(comm, params, opt, compressor):
    params[1].data = device.copied(params[1].data)
    params[1].data[...] = laws.to_device(comm, [np.ones(params[1].data.shape, np.float32)])[0]


def other_multipliers(comm, params, opt, compressor):
    opt.opt.wd_mult = {"p1": 3.0}


def a_checkpoint(comm, params, opt, compressor):
    opt.load_state_dict(opt.state_dict())


def another_threshold(comm, params, opt, compressor):
    opt.threshold = 20


def nothing(comm, params, opt, compressor):
    """For comparison."""


CHANGES = [another_momentum, another_array, other_multipliers, a_checkpoint, another_threshold]


@pytest.mark.parametrize("change", [nothing, *CHANGES], ids=lambda change: change.__name__)
def test_what_changes_between_steps_changes_what_is_replayed(arithmetic, change):
    expected = run_ranks(2, lambda comm: moved(comm, change))
    assert on_gpus(2, lambda comm: moved(comm, change)) == expected


def test_these_changes_change_a_step():
    """Else the test above would show nothing."""
    plain = run_ranks(1, lambda comm: moved(comm, nothing))
    for change in (another_momentum, another_array, other_multipliers):
        assert run_ranks(1, lambda comm, change=change: moved(comm, change)) != plain, change.__name__


def test_a_velocity_that_moves_is_followed():
    """A checkpoint puts states in other memory: what was recorded may not write to the old one."""

    def main(comm):
        w = Parameter("w", laws.to_device(comm, [np.zeros(64, np.float32)])[0])
        opt, states = DistOpt(SGD(1.0), comm), []
        for step in range(8):
            g = laws.to_device(comm, [np.arange(64, dtype=np.float32) + comm.rank])[0]
            opt.step([(w, g)], ErrorFeedback(TopK(0.1)))
            if step == 3:
                states.append(opt.state_dict())
            if step == 5:
                opt.load_state_dict(states[0])
        return device.host_copy(w.data).tolist()

    assert on_gpus(2, main) == run_ranks(2, main)
