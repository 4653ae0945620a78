"""Finite gradients whose sum over ranks overflows: the step is refused before parameters or states change."""

import functools
import itertools

import numpy as np
import pytest

import distopt
from distopt import compress, kernels, run_ranks
from distopt.comm import Ordered
from distopt.engine.finite_check import HostCheck

HUGE = np.float32(3e38)  # of which two have no float32
N = 5000

COMPRESSORS = {
    "dense": compress.Dense,
    "half": compress.Half,
    "bfloat16": lambda: compress.Half("bfloat16"),
    "half, not divided": lambda: compress.Half(predivide=False),
    "top-K": lambda: compress.TopK(0.01),
    "top-K, residual": lambda: compress.ErrorFeedback(compress.TopK(0.01)),
    "threshold, residual": lambda: compress.ErrorFeedback(compress.Threshold(1e-3)),
    "packed, residual": lambda: compress.ErrorFeedback(compress.Packed(compress.TopK(0.01), value="bfloat16")),
    "two bits": lambda: compress.ErrorFeedback(compress.TwoBit(3e38)),
    "DGC": lambda: compress.DeepGradientCompression(compress.TopK(0.01), momentum=0.9),
    "DGC, nesterov": lambda: compress.DeepGradientCompression(compress.TopK(0.01), momentum=0.9, nesterov=True),
}
FINITE = ("half",)  # what is sent saturated, and divided before
TRANSPORTS = {
    "shared memory": {},
    "overlap": {"overlap": True},
    "two batches": {"num_batches": 2},
    "two batches, each exchanged": {"num_batches": 2, "sync_on_apply": False},
    "in rank order": {"ordered": True},
}
CASES = [
    (name, transport)
    for name, transport in itertools.product(COMPRESSORS, TRANSPORTS)
    if not (name.startswith("DGC") and transport == "two batches, each exchanged")  # it has one momentum per update
]


def gradients(comm, step, huge):
    """As of any training, but for one entry, which is the same on all ranks."""
    rng = np.random.default_rng([step, comm.rank])
    found = [rng.standard_normal((N // 50, 50)).astype(np.float32) for _ in range(2)]
    if huge:
        found[0][3, 4] = huge
    return found


def trained(comm, make, policy, huge, ordered=False, num_batches=1, **options):
    """Steps of which number 3 has huge gradients: what is there before and after it, what it said, and the end."""
    params = [distopt.Parameter(f"p{k}", np.zeros((N // 50, 50), np.float32)) for k in (0, 1)]
    comm = Ordered(comm) if ordered else comm
    opt = distopt.DistOpt(
        distopt.optim.SGD(1e-3), comm, nonfinite=policy, num_batches=num_batches, broadcast=False, **options
    )
    compressor, said, before, call = make(), [], None, 0

    def state():
        found = opt.state_dict()
        kept = {f"{s} {n}": a for s, arrays in found["states"].items() if s != "window" for n, a in arrays.items()}
        return kept | {p.name: p.data.copy() for p in params}

    for step in range(6):
        for batch in range(num_batches):
            bad = step == 3 and batch == num_batches - 1
            if bad:
                before, count = state(), opt.step_counter
            pairs = list(zip(params, gradients(comm, call, huge if bad else 0), strict=True))
            call += 1
            try:
                opt.step(pairs, compressor)
            except FloatingPointError as error:
                said.append(str(error))
            if bad:
                after, counted = state(), opt.step_counter - count
        if step == 4:
            assert all(np.isfinite(a).all() for a in state().values())
    return before, after, counted, said, opt.skipped, state()


@pytest.mark.sampled(16)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(("name", "transport"), CASES)
def test_a_sum_that_overflows_is_refused_and_changes_nothing(name, transport, policy):
    options = TRANSPORTS[transport]
    run = functools.partial(trained, make=COMPRESSORS[name], policy=policy, huge=HUGE, **options)
    for before, after, counted, said, skipped, end in run_ranks(2, run):
        assert all(np.isfinite(a).all() for a in end.values())
        if name in FINITE:
            assert (counted, said) == (1, [])
            continue
        assert counted == 0
        assert skipped == (policy == "skip")
        assert [("the sum over ranks" in text) for text in said] == [True] * (policy == "raise")
        assert before.keys() == after.keys()
        for key, value in before.items():
            np.testing.assert_array_equal(after[key], value, err_msg=key)


@pytest.mark.parametrize("name", ["dense", "top-K, residual", "DGC"])
def test_large_gradients_whose_sum_is_finite_are_applied(name):
    options = {"policy": "raise", "huge": np.float32(1e38), "overlap": name == "dense"}
    run = functools.partial(trained, make=COMPRESSORS[name], **options)
    for _, _, counted, said, _, _ in run_ranks(2, run):
        assert counted == 1
        assert not said


@pytest.mark.parametrize("selector", [lambda: compress.TopK(0.01), lambda: compress.TwoBit(1.0)])
def test_a_residual_that_grows_until_it_overflows_is_refused_before(selector):
    """One rank brings what is sent, so that what the other one leaves behind grows."""

    def main(comm):
        param = distopt.Parameter("p", np.zeros(1000, np.float32))
        opt = distopt.DistOpt(distopt.optim.SGD(1e-30), comm, broadcast=False)
        grad = np.zeros(1000, np.float32)
        grad[:] = 1e38
        compressor = compress.ErrorFeedback(selector())

        def steps():
            for _ in range(10):
                opt.step([(param, grad)], compressor)

        with pytest.raises(FloatingPointError, match="the sum over ranks"):
            steps()
        residual = opt.state_dict()["states"]["residual"]["p"]
        return np.isfinite(residual).all() and np.isfinite(param.data).all()

    assert run_ranks(2, main) == [True, True]


def test_sums_are_checked_for_overflow_at_first_after_large_gradients_and_now_and_then(monkeypatch):
    """In the first step, in steps with a large gradient, and after every ``STEPS`` others."""
    looked, count = [], kernels.count_nonfinite

    def counted(*given):
        looked.append(step)
        count(*given)

    monkeypatch.setattr(kernels, "count_nonfinite", counted)
    monkeypatch.setattr(HostCheck, "STEPS", 4)
    param = distopt.Parameter("p", np.zeros(10, np.float32))
    opt = distopt.DistOpt(distopt.optim.SGD(1e-3), num_batches=2)
    for step in range(13):
        for _ in range(2):
            opt([(param, np.full(10, 1e35 if step == 7 else 1, np.float32))])
    assert looked == [0, 5, 7, 12]


def test_a_restored_residual_is_checked_for_overflow():
    def main(comm):
        param = distopt.Parameter("p", np.zeros(100, np.float32))
        opt = distopt.DistOpt(distopt.optim.SGD(1e-30), comm, broadcast=False)
        compressor = compress.ErrorFeedback(compress.TopK(0.01))
        opt.step([(param, np.ones(100, np.float32))], compressor)
        state = opt.state_dict()
        state["states"]["residual"]["p"][:] = HUGE
        opt.load_state_dict(state)
        with pytest.raises(FloatingPointError, match="the sum over ranks"):
            opt.step([(param, np.ones(100, np.float32))], compressor)
        return opt.state_dict()["states"]["residual"]["p"]

    for residual in run_ranks(2, main):
        assert (residual == HUGE).all()
