"""A dynamic loss scale: it changes no bit of a finite step, and all ranks change it in the same step."""

import contextlib
import gc

import numpy as np
import pytest

import laws
import tiers
from distopt import DistOpt, LossScaler, Parameter, device, run_ranks
from distopt.comm import LocalCommunicator
from distopt.compress import ErrorFeedback, Half, TopK
from distopt.engine.nonfinite import policy
from distopt.optim import SGD
from doubles.ranks import on_gpus
from launch import needs_mpi, run_mpi


def scaled(comm, params, step, scaler, bad=()):
    """The gradients of a loss times the scale, as 16-bit arithmetic has them: rank ``bad[step]``'s overflow."""
    scale = scaler.scale
    for param, grad in zip(params, laws.gradients(params, step, comm.rank), strict=True):
        grad *= np.asarray(scale, grad.dtype)
        if dict(bad).get(step) == comm.rank and grad.size:
            grad.flat[0] = np.inf
        yield param, laws.to_device(comm, [grad])[0]


def train(comm, steps=6, start=0, scaler=None, params=None, opt=None, mode="dense", bad=(), make=laws.sgd, **options):
    """Some steps of a run with a scaler; returns (params, opt, scaler)."""
    scaler = LossScaler(window=2) if scaler is None else scaler
    params = laws.move_to_device(comm, laws.parameters(rank=comm.rank)) if params is None else params
    if opt is None:
        opt = DistOpt(laws.maker_for(mode, make)(), comm, nonfinite=scaler, **{"threshold": 60} | options)
    for step in range(start, start + steps):
        laws.MODES[mode](opt, scaled(comm, params, step, scaler, bad))
    return params, opt, scaler


# ----------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"init_scale": 3.0}, ValueError, r"init_scale must be a power of two in \[1.0, 16777216.0\], got 3.0"),
        ({"init_scale": 0.5}, ValueError, "init_scale must be a power of two"),
        ({"init_scale": 2.0**25}, ValueError, "init_scale must be a power of two"),
        ({"init_scale": float("nan")}, ValueError, "init_scale .* got nan"),
        ({"init_scale": "64"}, TypeError, "init_scale must be a number, got '64'"),
        ({"init_scale": True}, TypeError, "init_scale must be a number, got True"),
        ({"factor": 1.0}, ValueError, r"factor must be a power of two in \[2.0, "),
        ({"factor": 3}, ValueError, "factor must be a power of two .* got 3"),
        ({"max_scale": 2.0**127}, ValueError, "max_scale must be a power of two"),
        ({"max_scale": float("inf")}, ValueError, "max_scale must be a power of two .* got inf"),
        ({"max_scale": 2.0, "min_scale": 4.0}, ValueError, r"max_scale must be a power of two in \[4.0, .* got 2.0"),
        ({"min_scale": 0.5}, ValueError, r"min_scale must be a power of two in \[1.0, .* got 0.5"),
        ({"init_scale": 2**2000}, ValueError, "init_scale must be a number that a float can hold"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 2.5}, TypeError, "window must be an integer, got 2.5"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        LossScaler(**options)


def test_numpy_numbers_are_accepted_and_the_scale_stays_in_its_bounds():
    scaler = LossScaler(np.float32(8), 4, np.int64(1), max_scale=16, min_scale=np.float64(2))
    assert repr(scaler) == "LossScaler(init_scale=8.0, factor=4.0, window=1, max_scale=16.0, min_scale=2.0)"
    scaler.passed()
    assert scaler.scale == 16  # 32 is above the largest
    scaler.refused()
    scaler.refused()
    assert scaler.scale == 2  # 1 is below the smallest


def test_the_scale_grows_after_a_window_of_finite_steps_in_a_row():
    scaler, seen = LossScaler(window=3), []
    for finite in (1, 1, 0, 1, 1, 1, 1, 1, 1, 0):
        scaler.passed() if finite else scaler.refused()
        seen.append(scaler.scale / 2.0**16)
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1]


def test_unknown_nonfinite_policies_are_refused():
    for wrong in ("", "ignore", None, 3, LossScaler):
        with pytest.raises(ValueError, match=r"nonfinite must be one of \('raise', 'skip', 'propagate'\) or a Loss"):
            policy(wrong)
    assert not policy("propagate").checks_finite
    for name in ("raise", "skip", "propagate"):
        assert (policy(name).divisor, policy(name).adapts, policy(name).state()) == (1.0, False, {})


def test_one_scaler_serves_one_optimizer():
    scaler = LossScaler()
    with pytest.raises(ValueError, match="num_batches"):
        DistOpt(SGD(), nonfinite=scaler, num_batches=0)  # does not take it
    opt = DistOpt(SGD(), nonfinite=scaler)
    with pytest.raises(ValueError, match="belongs to another; make one for each"):
        DistOpt(SGD(), nonfinite=scaler)
    del opt
    gc.collect()
    assert scaler.scale == 2.0**16  # it keeps nothing alive, and outlives it


# ----------------------------------------------------------------------------------------------- to the bit


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("mode", "size"), tiers.in_turn(laws.MODES, (2, 1, 3)))
def test_a_scale_changes_no_bit(mode, size):
    """Clips, thresholds and residuals meet gradients that have been divided, whatever the scale was and becomes."""

    def main(comm):
        params, opt, scaler = train(comm, mode=mode)
        plain = laws.train(comm, steps=6, mode=mode)
        assert laws.digest(params) == laws.digest(plain[0])
        assert scaler.scale == 2.0**19
        states = opt.state_dict()
        assert states.pop("loss_scale") == {"scale": 2.0**19, "clean": 0}
        laws.assert_equal_states(states | {"loss_scale": {}}, plain[1].state_dict())

    run_ranks(size, main)


@pytest.mark.parametrize(
    "options",
    [{"overlap": True}, {"deterministic": True}, {"num_batches": 2}, {"num_batches": 3, "sync_on_apply": False}],
    ids=str,
)
def test_a_scale_changes_no_bit_with_any_option(options):
    """In a window too, in the middle of which the scale grows."""

    def main(comm):
        expected = laws.train(comm, steps=6, **options)[0]
        assert laws.digest(train(comm, **options)[0]) == laws.digest(expected)

    run_ranks(2, main)


@pytest.mark.parametrize("dtype", laws.TOLERANCE)
def test_gradients_in_gradient_views_are_divided_by_the_scale(dtype):
    def main(comm):
        params, scaler = laws.parameters(dtype=dtype, rank=comm.rank), LossScaler(window=1)
        opt = DistOpt(laws.sgd(), comm, nonfinite=scaler, threshold=60)
        laws.share(params, opt)
        views = opt.gradient_views(params)
        for step in range(4):
            for view, grad in zip(views, laws.gradients(params, step, comm.rank), strict=True):
                view[...] = grad * np.asarray(scaler.scale, dtype)
            opt(zip(params, views, strict=True))
        found = laws.digest(params)
        comm.barrier()
        return found == laws.digest(laws.train(comm, dtype=dtype)[0])

    assert run_ranks(2, main) == [True] * 2


def over_mpi(comm):
    """On ranks that are processes: the same bits, a refused step, and a checkpoint in the middle."""
    params, opt, scaler = train(comm, steps=5, bad={2: 1}.items(), mode="topk")
    laws.same_on_all_ranks(comm, laws.digest(params) + str(scaler.state()))
    return {"digest": np.array(laws.digest(params)), "scale": np.array([scaler.scale, opt.skipped, opt.step_counter])}


@needs_mpi
def test_processes_have_the_bits_and_scales_of_threads(tmp_path):
    def main(comm):
        params, _, scaler = train(comm, steps=5, bad={2: 1}.items(), mode="topk")
        return laws.digest(params), scaler.scale

    (digest, scale), _ = run_ranks(2, main)
    for found in run_mpi(2, over_mpi, tmp_path):
        assert str(found["digest"]) == digest
        assert found["scale"].tolist() == [scale, 1, 4] == [2.0**17, 1, 4]


# ----------------------------------------------------------------------------------------------- overflow


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", laws.MODES)
def test_an_overflow_on_one_rank_drops_the_step_on_all(mode):
    """Nothing but scale and counts knows of it; the very next forward pass has the new scale."""

    def main(comm):
        params, opt, scaler = train(comm, steps=3, scaler=LossScaler(), mode=mode)
        before = laws.digest(params), opt.state_dict()
        laws.MODES[mode](opt, scaled(comm, params, 3, scaler, bad=((3, 1),)))
        assert scaler.scale == 2.0**15
        after = opt.state_dict()
        assert (after["skipped"], after["loss_scale"]) == (1, {"scale": 2.0**15, "clean": 0})
        assert laws.digest(params) == before[0]
        same = {k: before[1][k] for k in ("skipped", "loss_scale")}
        laws.assert_equal_states(after | same, before[1])
        train(comm, 3, 3, scaler, params, opt, mode)
        return laws.digest(params) == laws.digest(laws.train(comm, steps=6, mode=mode)[0])

    assert run_ranks(2, main) == [True] * 2


def test_two_overflows_halve_twice_and_no_more():
    def main(comm):
        seen, scaler = [], LossScaler(window=2)
        params, opt, _ = train(comm, 0, scaler=scaler)
        for step in range(8):
            seen.append(scaler.scale / 2.0**16)
            opt(scaled(comm, params, step, scaler, bad=((1, 0), (2, 1))))
        return seen

    assert run_ranks(2, main) == [[1, 1, 0.5, 0.25, 0.25, 0.5, 0.5, 1]] * 2


def test_a_sum_that_overflows_in_float16_halves_the_scale():
    def main(comm):
        w, scaler = Parameter("w", np.zeros(4, np.float32)), LossScaler(init_scale=4.0)
        opt = DistOpt(SGD(1.0), comm, nonfinite=scaler)
        for value in (1.0, 6e4, 1.0):
            opt.step([(w, np.full(4, value * scaler.scale, np.float32))], Half(predivide=False))
        return w.data.tolist(), scaler.scale

    assert run_ranks(2, main) == [([-2.0] * 4, 2.0)] * 2


@pytest.mark.parametrize("sync_on_apply", [True, False])
def test_a_refused_micro_batch_is_not_counted(sync_on_apply):
    def main(comm):
        w, scaler = Parameter("w", np.zeros(2)), LossScaler(window=2, init_scale=8.0)
        opt = DistOpt(SGD(1.0), comm, nonfinite=scaler, num_batches=2, sync_on_apply=sync_on_apply)
        for value in (1.0, np.inf, 3.0, 5.0, np.inf, 7.0):
            opt([(w, np.full(2, (value + comm.rank) * scaler.scale))])
        return w.data.tolist(), opt.step_counter, opt.skipped, scaler.scale

    # means of 1.5 and 3.5, and of 5.5 and 7.5; the scale is halved, doubled and halved again
    assert run_ranks(2, main) == [([-9.0, -9.0], 2, 2, 4.0)] * 2


def test_ten_non_finite_steps_in_a_row_at_the_smallest_scale_raise():
    """Fewer than ten in a row are skipped."""

    def main(comm):
        w, scaler = Parameter("w", np.zeros(1)), LossScaler(init_scale=4.0)
        opt = DistOpt(SGD(1.0), comm, nonfinite=scaler)

        def step(value):
            return opt([(w, np.array([value if comm.rank else 1.0]))])

        for _ in range(2 + 9):  # two halvings lead to the floor
            assert not step(np.nan)
        assert step(1.0)
        for _ in range(9):
            assert not step(np.nan)
        assert scaler.scale == 1.0
        for count in (10, 11):
            text = rf"step 2: {count} steps in a row are not finite at min_scale=1.0: rank 1: w \(1 of 1 entries\)"
            with pytest.raises(FloatingPointError, match=text):
                step(np.nan)
        assert step(1.0)
        return opt.skipped

    assert run_ranks(2, main) == [22, 22]


def test_ranks_with_different_loss_scales_are_refused():
    def main(comm, init_scale=2.0**16):
        params, opt, scaler = train(comm, 2, scaler=LossScaler(init_scale))
        if comm.rank:
            scaler.refused()
        with pytest.raises(
            ValueError, match=r"^ranks differ: rank 0 has the loss scale 65536.0, rank 1 has .* 32768.0"
        ):
            opt(scaled(comm, params, 2, scaler))

    run_ranks(2, main)
    with pytest.raises(ValueError, match=r"ranks differ: rank 0 has .*nonfinite=LossScaler\(init_scale=1.0, "):
        run_ranks(2, lambda comm: main(comm, 1.0 + comm.rank))


def test_update_by_hand_is_refused_with_a_loss_scale():
    w = Parameter("w", np.zeros(2))
    opt = DistOpt(SGD(1.0), LocalCommunicator(), nonfinite=LossScaler())
    with pytest.raises(ValueError, match="nonfinite must not be a LossScaler for update"):
        opt.update(w, np.ones(2))


# ----------------------------------------------------------------------------------------------- going on


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("mode", ["dense", "topk", "partial"])
def test_a_run_with_a_loss_scale_resumes_to_the_same_bits(mode, num_batches, tmp_path):
    """Also with the count of finite steps between two changes of the scale."""
    bad, options = {1: 1, 4: 0}.items(), {"mode": mode, "num_batches": num_batches}

    def main(comm):
        expected = train(comm, 8, scaler=LossScaler(window=3), bad=bad, **options)
        for stop in (1, 2, 4, 5):
            params, opt, _ = train(comm, stop, scaler=LossScaler(window=3), bad=bad, **options)
            opt.save(tmp_path / str(stop), params)
            params, opt, scaler = train(comm, 0, scaler=LossScaler(window=3), num_batches=num_batches)
            opt.load(tmp_path / str(stop), params)
            train(comm, 8 - stop, stop, scaler, params, opt, mode, bad)
            assert laws.digest(params) == laws.digest(expected[0])
            laws.assert_equal_states(opt.state_dict(), expected[1].state_dict())

    run_ranks(2, main)


def test_inconsistent_states_of_a_scaler_are_refused():
    _, opt, scaler = train(LocalCommunicator(), 1)
    good = opt.state_dict()
    for wrong, error, text in (
        (None, TypeError, "loss_scale must be a dict, got NoneType"),
        ({"scale": 2.0}, ValueError, r"the entries of loss_scale must be \['clean', 'scale'\], got \['scale'\]"),
        ({"scale": 3.0, "clean": 0}, ValueError, "the scale of loss_scale must be a power of two"),
        ({"scale": 2.0**30, "clean": 0}, ValueError, r"power of two in \[1.0, 16777216.0\], got 1073741824.0"),
        ({"scale": 2.0, "clean": -1}, ValueError, "the clean steps of loss_scale must be at least 0, got -1"),
    ):
        with pytest.raises(error, match=text):
            opt.load_state_dict(good | {"loss_scale": wrong})
        assert scaler.scale == 2.0**16


def test_a_run_with_a_scaler_resumes_from_one_without_and_back():
    """The scale is no part of what was learnt: either may go on from the other."""
    with_one, without = train(LocalCommunicator(), 3)[1], laws.train(LocalCommunicator(), 3)[1]
    a, b = with_one.state_dict(), without.state_dict()
    _, opt, scaler = train(LocalCommunicator(), 0)
    opt.load_state_dict(b)
    assert scaler.state() == {"scale": 2.0**16, "clean": 0}
    opt.load_state_dict(a)
    assert scaler.state() == {"scale": 2.0**17, "clean": 1}
    without.load_state_dict(a)
    assert without.state_dict()["loss_scale"] == {}


def test_a_restored_count_above_the_window_grows_the_scale_at_the_next_step():
    scaler = LossScaler(window=3)
    scaler.restore({"scale": 8.0, "clean": 1999})
    scaler.passed()
    assert scaler.scale == 16.0


# ----------------------------------------------------------------------------------------------- on a GPU, as it seems


@pytest.mark.parametrize("mode", ["dense", "half", "topk", "partial", "half with memory"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_gpu_has_the_scales_of_the_host(doubles, size, mode):
    """Although it is asked for the outcome of a step only when the scale is read, or by the next step."""
    bad = {1: 0, 2: size - 1, 5: 0}.items()

    def main(comm):
        params, opt, scaler = train(comm, 0)
        seen = []
        for step in range(8):
            seen.append(scaler.scale)
            laws.MODES[mode](opt, scaled(comm, params, step, scaler, bad))
        return seen, laws.digest(params), opt.state_dict()

    for here, there in zip(run_ranks(size, main), on_gpus(size, main), strict=True):
        assert there[0] == here[0]
        assert there[0][1] == 2.0**16
        assert there[0][2] == 2.0**15
        assert there[2]["loss_scale"] == here[2]["loss_scale"]
        assert there[2]["skipped"] == here[2]["skipped"] == 3
        if size == 1 or mode == "partial":
            assert there[1] == here[1]


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_each_outcome_counts_once_however_often_the_scale_is_read(doubles, reads):
    def main(comm):
        scaler = LossScaler(window=2)
        w = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        opt = DistOpt(SGD(1.0), comm, nonfinite=scaler)
        for value in (1, 1, 1, np.inf, 1, np.nan, 1, 1):
            opt([(w, laws.to_device(comm, [np.full(4, value, np.float32)])[0])])
            for _ in range(reads):
                assert scaler.scale
        opt.close()
        return scaler.state(), opt.skipped, opt.step_counter

    assert on_gpus(2, main) == [({"scale": 2.0**16, "clean": 0}, 2, 6)] * 2


def test_ranks_need_not_all_read_the_scale(doubles):
    def main(comm):
        scaler = LossScaler()
        w = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        opt = DistOpt(SGD(1.0), comm, nonfinite=scaler)
        for value in (1, np.inf, 1):
            opt([(w, laws.to_device(comm, [np.full(4, value, np.float32)])[0])])
            if comm.rank:
                assert scaler.scale
        opt.close()
        return scaler.state()

    assert on_gpus(2, main) == [{"scale": 2.0**15, "clean": 1}] * 2


def test_ten_non_finite_steps_in_a_row_at_the_smallest_scale_raise_on_a_gpu(doubles):
    def main(comm):
        scaler = LossScaler(init_scale=1.0)
        w = Parameter("w", laws.to_device(comm, [np.zeros(4, np.float32)])[0])
        opt = DistOpt(SGD(1.0), comm, nonfinite=scaler)
        for k in range(11):
            told = k == 10  # of the tenth
            with pytest.raises(FloatingPointError, match="10 steps in a") if told else contextlib.nullcontext():
                opt([(w, laws.to_device(comm, [np.full(4, np.nan, np.float32)])[0])])
        opt([(w, laws.to_device(comm, [np.ones(4, np.float32)])[0])])
        opt.close()
        return device.host_copy(w.data).tolist()

    assert on_gpus(2, main) == [[-1.0] * 4] * 2


def test_scaled_gradient_views_have_the_same_bits_however_streams_lag(doubles):
    """Gradients in views are divided in place, after the backward pass and before the exchange."""

    def main(comm):
        expected = laws.digest(laws.train(comm)[0])
        for order in (doubles.lagging(comm._stream.ptr), doubles.lagging(0), doubles.shuffled(3)):
            with doubles.lazily(order) as machine:
                params, opt, scaler = train(comm, 0)
                views = opt.gradient_views(params)
                for step in range(4):
                    for view, (_, grad) in zip(views, scaled(comm, params, step, scaler), strict=True):
                        device.copy(view, grad)
                    opt(zip(params, views, strict=True))
                opt.engine.nonfinite.poll()
                machine.finish()
            assert laws.digest(params) == expected

    on_gpus(2, main)


def test_a_scale_cannot_be_captured(doubles):
    def main(comm):
        params, opt, scaler = train(comm, 0)
        pairs = list(scaled(comm, params, 0, scaler))
        with pytest.raises(ValueError, match="nonfinite must not be a LossScaler in a captured step"):
            opt.capture(lambda: pairs, ErrorFeedback(TopK(0.1)))

    on_gpus(2, main)
