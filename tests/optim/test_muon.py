"""Muon against its equations in float64, and against itself: on ranks that share its work, and in shared memory."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import reference
import tiers
from distopt import DistOpt, Parameter, Trainer, device, run_ranks
from distopt.comm import LocalCommunicator, Metered
from distopt.comm.threads import current_rank
from distopt.compress import DeepGradientCompression, TopK
from distopt.kernels.layout import BucketLayout
from distopt.optim import LAMB, LBSGD, SGD, AdamW, BatchGradients, LarsWrapper, Muon, muon
from doubles.ranks import on_gpus
from launch import needs_mpi, run_mpi

SHAPES = [(40, 90), (50,), (7,), (12, 3, 3, 3), (), (0, 4), (90, 40), (2, 3, 5), (1,), (17, 1), (64, 64)]
MATRICES = [shape for shape in SHAPES if len(shape) > 1 and 0 not in shape]
FIXED = [(1, 1), (1, 9), (9, 1), (8, 8), (60, 20), (20, 60), (16, 4, 3, 3), (4, 16, 3, 3)]
CASES = {
    "defaults": {},
    "no Nesterov": {"nesterov": False},
    "no momentum": {"momentum": 0.0},
    "decay": {"weight_decay": 0.1},
    "clipped": {"clip": 0.5, "weight_decay": 0.01},
    "rescaled": {"rescale": 1e-3},
    "seven iterations": {"steps": 7},
    "schedules": {"momentum": lambda k: 0.8 + 0.01 * k, "weight_decay": lambda k: 0.0 if k < 5 else 0.1},
}
OURS = {"clip": "clip_gradient", "rescale": "rescale_grad"}


def falling(k):
    return 0.1 if k < 10 else 0.02


def make(**options):
    """A Muon of which all that can differ shows."""
    return Muon(**{"lr": falling, "weight_decay": 0.01, "exclude": ["6"]} | options)


def random(shape, dtype="float32", seed=0):
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def update(opt, values, steps=5, start=0):
    """Some updates of arrays, named as ``laws.parameters`` names them."""
    for step in range(start, start + steps):
        for k, value in enumerate(values):
            opt.apply(f"p{k}", value, random(value.shape, value.dtype, [step, k]))
        opt.step()
    return values


def train(comm, steps=4, **options):
    """Some steps of ranks, of matrices of several shapes beside other parameters."""
    return laws.train(comm, steps, **{"make": make, "shapes": SHAPES} | options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-10)])
def test_muon_equals_the_float64_reference(case, dtype, tolerance):
    """On 8 matrices and filters, of which the reference knows the singular values and not the iteration."""
    options = CASES[case]
    opt = Muon(falling, **{OURS.get(name, name): value for name, value in options.items()})
    values = [random(shape, dtype, 1) for shape in FIXED]
    expected = [(v.astype(np.float64), np.zeros(v.shape)) for v in values]
    for k in range(20):
        numbers = {n: v(k) if callable(v) else v for n, v in options.items()} | {"lr": falling(k)}
        for j, value in enumerate(values):
            g = random(value.shape, dtype, [k, j])
            expected[j] = reference.muon(*expected[j], g.astype(np.float64), **numbers)
            opt.apply(f"w{j}", value, g)
        opt.step()
    for value, (w, _) in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, w, rtol=0, atol=tolerance)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    smallest=st.floats(0.002, 1.0),
    even=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_singular_values_end_between_a_half_and_one_and_a_half(rows, columns, smallest, even, dtype, seed):
    """If the smallest is at least 0.002 of the Frobenius norm; whatever the others are."""
    rng, n = np.random.default_rng(seed), min(rows, columns)
    spectrum = np.full(n, smallest) if even else np.exp(rng.uniform(math.log(smallest), 0, n))
    spectrum[0] = 1.0
    spectrum = np.maximum(spectrum / np.linalg.norm(spectrum), 0.00201)  # after the division by the norm
    left, right = (np.linalg.qr(rng.standard_normal((size, n)))[0] for size in (rows, columns))
    x = ((left * (spectrum / np.linalg.norm(spectrum))) @ right.T).astype(dtype)
    found = np.linalg.svd(muon.orthogonalized(x, steps=5).astype(np.float64), compute_uv=False)
    assert 0.5 <= found.min() <= found.max() <= 1.5


@pytest.mark.parametrize("factor", [2.0**10, 1e9])
def test_the_size_of_gradients_does_not_matter(factor):
    """But for the 1e-7 that is added to their norm."""
    values = [[random(s, "float64", 1) for s in MATRICES] for _ in range(2)]
    update(make(rescale_grad=1e6), values[0])
    update(make(rescale_grad=1e6 * factor), values[1])
    for a, b in zip(*values, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def test_what_is_no_matrix_and_what_is_excluded_is_updated_as_by_the_other_optimizer_alone():
    """To the bit; AdamW is the default."""
    for otherwise in (None, lambda: LAMB(falling, weight_decay=0.1), lambda: LBSGD(0.1, batch_scale=2)):
        values = [[random(s, seed=1) for s in SHAPES] for _ in range(2)]
        update(Muon(exclude=lambda name: True, otherwise=otherwise and otherwise()), values[0])
        update(otherwise() if otherwise else AdamW(), values[1])
        some = [[random(s, seed=1) for s in SHAPES] for _ in range(2)]
        update(Muon(exclude=["p0", "p6"], otherwise=otherwise and otherwise()), some[0])
        for k, shape in enumerate(SHAPES):
            np.testing.assert_array_equal(values[0][k], values[1][k])
            assert (some[0][k] == values[1][k]).all() == (k in (0, 6) or shape not in MATRICES)


def test_a_filter_is_the_matrix_of_its_outputs():
    """Of O rows, in the scale as well."""
    matrix, opts = random((24, 18), seed=1), (make(), make())
    filters = matrix.copy().reshape(24, 2, 3, 3)
    for step in range(5):
        g = random((24, 18), seed=step)
        opts[0].apply("w", matrix, g)
        opts[1].apply("w", filters, g.reshape(filters.shape))
    np.testing.assert_array_equal(matrix, filters.reshape(24, 18))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("multi_precision", [False, True])
def test_buckets_in_any_pieces_equal_parameters_one_by_one(dtype, multi_precision):
    """To the bit: parameters, momentum, masters, and the other optimizer's states."""
    one = [random(s, dtype, 1) for s in SHAPES]
    fused, names = [v.copy() for v in one], [f"p{k}" for k in range(len(SHAPES))]
    rooms = [-(-v.size // 16) * 16 for v in one]
    table = BucketLayout(names, SHAPES, np.cumsum([0, *rooms[:-1]]).tolist(), dtype)
    opts = make(multi_precision=multi_precision), make(multi_precision=multi_precision)
    for step in range(4):
        flat, pieces = random(table.extent, table.dtype, step), 1 + step % 3
        opts[0].prepare(1.0)
        opts[0].update_bucket(table.point_to(fused), [(r, pieces, flat) for r in range(pieces)])
        for row, value in enumerate(one):
            opts[1].apply(names[row], value, table.view(flat, row))
        for opt in opts:
            opt.step()
    for a, b in zip(fused, one, strict=True):
        np.testing.assert_array_equal(a, b)
    laws.assert_equal_states(*(opt.get_states() for opt in opts))
    assert ("master" in opts[0].get_states()["otherwise"]) == multi_precision


def test_16_bit_parameters_are_rounded_from_float32():
    """With masters as if they were float32 all the time."""
    narrow, wide = random((30, 20), np.float16, 1), random((30, 20), np.float16, 1).astype(np.float32)
    opts = make(multi_precision=True), make()
    for step in range(20):
        g = random((30, 20), np.float16, step)
        opts[0].apply("w", narrow, g)
        opts[1].apply("w", wide, g.astype(np.float32))
        np.testing.assert_array_equal(narrow, wide.astype(np.float16))


def test_partial_steps_average_the_masters_of_both_optimizers():
    def main(comm):
        found = []
        for stored in (np.float16, np.float32):
            params = [Parameter(n, np.ones(s, stored)) for n, s in (("a", (10, 8)), ("b", (30,)), ("c", (8, 9)))]
            opt = DistOpt(
                Muon(1e-3, multi_precision=True, otherwise=SGD(1e-4, multi_precision=True)), comm, threshold=90
            )
            for step in range(8):
                grads = [random(p.data.shape, np.float16, [step, comm.rank, k]) for k, p in enumerate(params)]
                pairs = [(p, g.astype(stored)) for p, g in zip(params, grads, strict=True)]
                (opt.backward_and_partial_update if step < 6 else opt)(pairs)
            states = opt.state_dict()["optimizer"]
            masters = states["master"] | states["otherwise"]["master"]
            found.append([masters.get(p.name, p.data) for p in params])
            assert set(masters) == (set("abc") if stored == np.float16 else set())
            for p, master in zip(params, found[-1], strict=True):
                np.testing.assert_array_equal(p.data, master.astype(stored))
        for narrow, wide in zip(*found, strict=True):
            np.testing.assert_array_equal(narrow, wide)

    run_ranks(3, main)


# ------------------------------------------------------------------------------------------------------------ options


def test_options_hold_for_all_parameters():
    """Multipliers by name, the rescaling and the clipping, given or assigned."""
    options = {"rescale_grad": 0.5, "clip_gradient": 0.25, "lr_mult": {"p0": 0.5, "p1": 0.5}, "wd_mult": {"p3": 2.0}}
    values = [[random(s, seed=1) for s in SHAPES] for _ in range(3)]
    update(make(otherwise=AdamW(0.1, weight_decay=0.1), **options), values[0])
    assigned = make(otherwise=AdamW(0.1, weight_decay=0.1))
    for name, value in options.items():
        setattr(assigned, name, value)
    update(assigned, values[1])
    for k, value in enumerate(values[2]):  # one optimizer for each, without multipliers
        rate = 0.5 if k < 2 else 1.0
        alone = Muon(
            lambda step, rate=rate: rate * falling(step),
            weight_decay=0.02 if k == 3 else 0.01,
            exclude=["6"],
            otherwise=AdamW(0.1 * rate, weight_decay=0.1),
        )
        for step in range(5):
            alone.apply(
                f"p{k}", value, np.asarray(np.clip(0.5 * random(value.shape, value.dtype, [step, k]), -0.25, 0.25))
            )
            alone.step()
    for a, b, c in zip(*values, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_a_gradient_of_zeros_or_of_what_is_not_finite():
    """Nothing but decay; and NaN stays NaN, without a warning."""
    value = random((4, 3), seed=1)
    before = value.copy()
    make(weight_decay=0.0).apply("w", value, np.zeros((4, 3), np.float32))
    np.testing.assert_array_equal(value, before)
    for odd in (np.nan, np.inf):
        value, g = before.copy(), random((4, 3), seed=2)
        g[1, 1] = odd
        make().apply("w", value, g)
        assert np.isnan(value).all()


def test_a_refused_update_changes_nothing():
    opt, values = make(), [random(s, seed=1) for s in SHAPES]
    update(opt, values)
    before, states = [v.copy() for v in values], opt.get_states()
    for k, value in enumerate(values):
        opt.apply(f"p{k}", value, random(value.shape, seed=9), skip_flag=np.ones(1, np.int64))
    for a, b in zip(values, before, strict=True):
        np.testing.assert_array_equal(a, b)
    laws.assert_equal_states(opt.get_states(), states)
    opt.step()
    opt.take_back()
    laws.assert_equal_states(opt.get_states(), states)


def test_the_text_that_ranks_compare_has_the_other_optimizer_too():
    opt = make(otherwise=AdamW(0.5))
    opt.apply("p6", np.ones((2, 2)), np.ones((2, 2)))
    assert "left_out=('p6',), otherwise=AdamW(lr=0.5, " in repr(opt)
    assert {"Muon's momentum=0.95", "Muon's steps=5", "AdamW's lr=0.5", "AdamW's step_counter=0"} <= set(opt.numbers())


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda: Muon(momentum=1.5), ValueError, r"momentum must be finite and in \[0.0, 1.0\]"),
        (lambda: Muon(steps=0), ValueError, "steps must be at least 1"),
        (lambda: Muon(nesterov=1), TypeError, "nesterov must be True or False"),
        (lambda: Muon(exclude="head"), TypeError, "exclude must be a predicate on the name, or a list of suffixes"),
        (lambda: Muon(otherwise=Muon()), TypeError, "otherwise must be one of distopt's optimizers and no other Muon"),
        (lambda: Muon(otherwise=LarsWrapper(SGD(0.1))), TypeError, "otherwise must be one of .*, got LarsWrapper: "),
        (lambda: Muon(otherwise=SGD(clip_gradient=1.0)), ValueError, "clip_gradient of otherwise must be inf, got 1.0"),
        (lambda: Muon(otherwise=SGD(multi_precision=True)), ValueError, "multi_precision of otherwise must be False"),
        (lambda: Muon(beta_1=0.9), TypeError, "Muon takes lr, momentum, .*, got beta_1=0.9"),
    ],
)
def test_impossible_arguments_are_refused(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong()


def test_states_resume_the_run_and_are_refused_before_anything_changes():
    values, resumed = ([random(s, seed=1) for s in SHAPES] for _ in range(2))
    first, second = make(), make()
    update(first, values, 3)
    good = first.get_states()
    update(second, resumed, 3)
    update(first, values, 3, 3)
    second = make()
    second.set_states(good)
    update(second, resumed, 3, 3)
    for a, b in zip(values, resumed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(good) == {"rule", "step_counter", "moments", "otherwise"}
    assert set(good["moments"]) == {f"p{k}" for k, s in enumerate(SHAPES) if s in MATRICES and k != 6}
    saved = second.get_states()
    for states in (
        None,
        {},
        {name: state for name, state in good.items() if name != "otherwise"},
        good | {"otherwise": None},
        good | {"otherwise": SGD().get_states()},
        good | {"moments": {"p0": np.zeros((2, 2))}},
    ):
        with pytest.raises((TypeError, ValueError)):
            second.set_states(states)
    laws.assert_equal_states(second.get_states(), saved)


# -------------------------------------------------------------------------------------------------------------- ranks


def sharing_changes_no_bit(comm, make=make):
    """Each rank its own matrices, gathered or in shared memory; resumed in between, in several modes."""
    expected = laws.digest(train(comm)[0])
    laws.same_on_all_ranks(comm, expected)
    plain = laws.digest(train(comm, make=make)[0])
    for threshold in (0, 60, 10**6):
        assert laws.digest(train(comm, make=make, threshold=threshold, deterministic=True)[0]) == plain
    laws.resume(comm, make=make, shapes=SHAPES, stops=(2,))
    for mode, options in (("dense", {}), ("half", {"nonfinite": "propagate"}), ("topk", {"clip_norm": 1.0})):
        laws.sharding_changes_no_bit(comm, mode, make, shapes=SHAPES, **options)
    return expected, plain


WAYS = {
    "alone": make,
    "gathered": lambda: make(sharded=True),
    "beside lamb": lambda: make(otherwise=LAMB(0.01), sharded=True),
}


@pytest.mark.parametrize("size", tiers.one_by_default(2, of=(1, 2, 3)))
@pytest.mark.parametrize("way", tiers.one_by_default("gathered", of=tuple(WAYS)))
def test_sharing_the_work_changes_no_bit(way, size):
    found = run_ranks(size, lambda comm: sharing_changes_no_bit(comm, WAYS[way]))
    assert all((expected == plain) == (way != "beside lamb") for expected, plain in found)


def gathering_on_mpi(comm):
    """For ``launch.run_mpi``."""
    return {"digests": np.array(sharing_changes_no_bit(comm, WAYS["gathered"]))}


@needs_mpi
def test_sharing_the_work_changes_no_bit_on_mpi(tmp_path):
    expected = run_ranks(2, gathering_on_mpi)
    found = run_mpi(2, gathering_on_mpi, tmp_path)
    assert [r["digests"].tolist() for r in found] == [r["digests"].tolist() for r in expected]


def uneven(x, steps):
    """What the BLAS of another machine may return."""
    ours = np.random.default_rng([current_rank().rank, x.size]).standard_normal(x.shape)
    return x + np.asarray(1e-6 * ours, x.dtype)


def test_only_ranks_that_gather_stay_equal_where_their_blas_differs(monkeypatch):
    monkeypatch.setattr(muon, "orthogonalized", uneven)

    def main(comm):
        digests = [
            comm.control.gather(laws.digest(train(comm, make=lambda o=o: make(**o))[0]))
            for o in ({}, {"sharded": True})
        ]
        return [len(set(texts)) for texts in digests]

    assert run_ranks(3, main) == [[3, 1]] * 3


def test_each_matrix_is_orthogonalized_once_and_its_bytes_are_gathered(monkeypatch):
    """Number j by rank j modulo the ranks; in shared memory nothing is sent that other optimizers do not send."""
    done = []

    def noted(x, steps):
        done.append((current_rank().rank, x.shape))
        return x

    monkeypatch.setattr(muon, "orthogonalized", noted)
    chosen = [(s[0], math.prod(s[1:])) for k, s in enumerate(SHAPES) if s in MATRICES and k != 6]

    def main(comm, shared, rule):
        meter = Metered(comm)
        params, opt = train(meter, 0, make=rule, threshold=0)
        if shared:
            laws.share(params, opt)
        train(meter, 2, params=params, opt=opt)
        opt.state_dict()
        comm.barrier()
        return meter.report()

    for shared, rule in ((True, make), (False, lambda: make(sharded=True))):
        done.clear()
        reports = run_ranks(3, lambda comm, s=shared, r=rule: main(comm, s, r))
        expected = [(j % 3, shape) for j, shape in enumerate(chosen)]
        assert sorted(done) == sorted(2 * expected)
        if shared:
            plain = run_ranks(3, lambda comm: main(comm, True, AdamW))
            kept = [{k: v for k, v in r.items() if not k.startswith("other")} for r in reports]
            assert kept == [{k: v for k, v in r.items() if not k.startswith("other")} for r in plain]
        else:
            rooms = [sum(-(-4 * math.prod(s) // 64) * 64 for r, s in expected if r == rank) for rank in range(3)]
            assert [r["all_gather"]["payload"] for r in reports] == [2 * room for room in rooms]
            assert [r["all_gather"]["calls"] for r in reports] == [2] * 3


def test_ranks_without_batches_take_their_part_of_the_work():
    """Until all have joined."""

    def main(comm, rule):
        params, opt = train(comm, 0, make=rule)
        train(comm, 4 - comm.rank, params=params, opt=opt)
        opt.join()
        return laws.digest(params)

    for rule in (make, lambda: make(sharded=True)):
        digests = run_ranks(3, lambda comm, rule=rule: main(comm, rule))
        assert len(set(digests)) == 1
        assert digests == run_ranks(3, lambda comm: main(comm, make))


def test_ranks_agree_on_both_optimizers():
    for makes, text in (
        ((lambda: make(), lambda: make(sharded=True)), "Muon's sharded=True"),
        ((lambda: make(), lambda: make(otherwise=AdamW(0.5))), "AdamW's lr=0.5"),
        ((lambda: make(), lambda: make(exclude=lambda name: name == "p0")), "left_out"),
        ((lambda: make(), lambda: make(exclude=lambda name: 1 / 0)), "division by zero"),
    ):
        assert text in laws.texts_of(2, lambda comm, makes=makes: train(comm, make=makes[comm.rank]))


def test_wrappers_and_the_trainer_take_it():
    """But not if ranks share the work, and parameters come one by one."""

    def main(comm):
        for wrap in (lambda opt: BatchGradients(opt, 2), LarsWrapper):
            laws.same_bits(comm, make=lambda wrap=wrap: wrap(make(weight_decay=0.0)))
            with pytest.raises(ValueError, match="sharded of Muon must be False inside of a wrapper, got True"):
                train(comm, make=lambda wrap=wrap: wrap(make(weight_decay=0.0, sharded=True)))
        params, options = laws.parameters(SHAPES), {"learning_rate": 0.1, "wd": 0.01, "sharded": True}
        trainer = Trainer(params, "muon", options, communicator=comm)
        for stale in (0, 1):
            before = laws.digest(params)
            for p, g in zip(params[stale:], laws.gradients(params[stale:], 0, comm.rank), strict=True):
                p.grad = g
            if stale:
                with pytest.raises(ValueError, match="sharded of Muon must be False where a step updates some"):
                    trainer.step(8, ignore_stale_grad=True)
            else:
                trainer.step(8)
            laws.same_on_all_ranks(comm, laws.digest(params))
            assert (laws.digest(params) == before) == bool(stale)

    run_ranks(2, main)


@pytest.mark.parametrize("rule", [make, lambda: make(momentum=0.0)])
def test_a_momentum_of_either_optimizer_excludes_one_of_the_compressor(rule):
    opt = DistOpt(rule(), LocalCommunicator())
    with pytest.raises(ValueError, match=r"must be without momentum, .* got (Muon's momentum|AdamW's beta_1)"):
        opt.step([(Parameter("w", np.ones((2, 2))), np.ones((2, 2)))], DeepGradientCompression(TopK(0.1)))


# ---------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize("options", [{}, {"sharded": True}], ids=str)
def test_doubles_of_gpus_have_the_hosts_bits(options, arithmetic, one_warp):
    """Whose matrix products are numpy's; with masters, a refused step and partial ones."""

    def main(comm):
        found = []
        for mode, multi_precision in (("dense", False), ("partial", True)):
            params = laws.parameters(SHAPES, np.float16 if multi_precision else np.float32, comm.rank)
            laws.move_to_device(comm, params)
            opt = DistOpt(make(multi_precision=multi_precision, **options), comm, threshold=60, nonfinite="skip")
            for step in range(4):
                grads = laws.gradients(params, step, comm.rank)
                grads[3][0, 0] = np.nan if step == 2 else 0.5
                laws.MODES[mode](opt, zip(params, laws.to_device(comm, grads), strict=True))
            found += [laws.digest(params), opt.step_counter]
        return found

    assert on_gpus(2, main) == run_ranks(2, main)


def test_a_captured_step_is_refused_by_name(doubles):
    comm = LocalCommunicator(gpu=0)
    [w, g] = laws.to_device(comm, [np.ones((2, 2), np.float32)] * 2)
    with pytest.raises(ValueError, match=r"must only enqueue kernels, got optimizer Muon.*, which calls cuBLAS"):
        DistOpt(make(), comm).capture(lambda: [(Parameter("w", w), g)])
    assert (device.host_copy(w) == 1).all()
