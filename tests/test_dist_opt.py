"""DistOpt: what it accepts, what it refuses on every rank alike, and its verbs."""

import contextlib
import copy

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import LocalCommunicator, Metered
from distopt.comm.control import PeerLeft
from distopt.compress import Half
from distopt.optim import SGD
from laws import constant_pairs, texts_of, three_parameters

# ---------------------------------------------------------------------------------------------------- what is a loss


class Loss:
    def __init__(self, pairs):
        self.backward = lambda: iter(pairs)


@pytest.mark.parametrize(
    "wrap", [list, iter, tuple, lambda p: lambda: p, Loss], ids="list iter tuple callable backward".split()
)
def test_a_loss_is_any_iterable_callable_or_backward_of_pairs(wrap):
    def main(comm):
        params = three_parameters()
        assert DistOpt(SGD(0.5), comm)(wrap(constant_pairs(params, comm.rank))) is True
        return [float(p.data.flat[0]) for p in params]

    assert run_ranks(2, main) == [[0.75] * 3] * 2


@pytest.mark.parametrize("loss", [3, "text", [1, 2], [(1, 2, 3)], object()])
def test_a_loss_that_yields_no_pairs_is_refused_on_every_rank(loss):
    text = texts_of(2, lambda comm: DistOpt(communicator=comm)(loss), TypeError)
    assert text.startswith("rank 0: loss must be an iterable of (param, grad) pairs (a generator too), a callable")


def test_a_parameter_is_an_array_or_any_object_with_name_and_data():
    class Duck:
        def __init__(self, name, data):
            self.name, self.data = name, data

    def main(comm):
        bare, named, duck = np.ones(3), Parameter("n", np.ones(2)), Duck("d", np.ones(1))
        opt = DistOpt(SGD(1.0), comm)
        opt([(bare, np.ones(3)), (named, np.ones(2)), (duck, np.ones(1))])
        opt([(duck, np.ones(1)), (named, np.ones(2)), (bare, np.ones(3))])  # later in any order
        assert [bare[0], named.data[0], duck.data[0]] == [-1, -1, -1]
        return opt.plan.buckets[0].names

    assert run_ranks(2, main) == [("parameter 0", "n", "d")] * 2


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("spoil", "kind", "text"),
    [
        (lambda p: [*p, p[0]], ValueError, "a: given twice, at positions 0 and 3"),
        (lambda p: [(Parameter("q", 3.0), 1.0)], TypeError, "q: a parameter must be an array of float32"),
        (lambda p: [(np.ones(3, ">f4"), np.ones(3, "f4"))], TypeError, "native byte order, got an array .* >f4"),
        (lambda p: [(np.ones(3, "i4"), np.ones(3, "i4"))], TypeError, "float32, float64, .* int32"),
        (
            lambda p: [(np.ones((4, 4))[:, 1], np.ones(4))],
            ValueError,
            "C-contiguous and writable, got .* not contiguous",
        ),
        (lambda p: [(np.broadcast_to(1.0, (3,)), np.ones(3))], ValueError, "read-only"),
        (
            lambda p: [(p[0][0], np.ones((3, 2)))],
            TypeError,
            "a: the gradient must be of the parameter's dtype float32, got .* float64",
        ),
        (lambda p: [(p[0][0], np.ones((3, 2), ">f4"))], TypeError, "dtype float32, got .* >f4"),
        (lambda p: [(p[0][0], np.ones((2, 3), "f4"))], ValueError, r"shape \(3, 2\), got \(2, 3\)"),
        (lambda p: [(p[0][0], [1.0, 2.0])], TypeError, "a: a gradient must be an array, got list"),
        (lambda p: [(p[0][0], None)], ValueError, "no gradient for a; allow_missing=True would take zeros"),
        (lambda p: [("a", np.ones(3))], TypeError, "a parameter must be an array, or have name and data"),
        (lambda p: [(Parameter(7, np.ones(3)), np.ones(3))], TypeError, "a parameter's name must be a string, got 7"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_bad_pairs_on_one_rank_are_an_error_on_all(spoil, kind, text, rank):
    def main(comm):
        good = constant_pairs(three_parameters())
        DistOpt(communicator=comm)(spoil(good) if comm.rank == rank else good)

    with pytest.raises(kind, match=f"^rank {rank}: .*{text}"):
        raise kind(texts_of(3, main, kind))


def test_overlapping_parameters_are_refused():
    def main(comm):
        memory = np.zeros(10, "f4")
        tied = Parameter("left", memory[:6]), Parameter("right", memory[5:])
        DistOpt(communicator=comm)(constant_pairs(tied))

    assert "left and right share memory" in texts_of(2, main, ValueError)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda p: p[::-1], "rank 0 has parameter 0 = a (3, 2) float32, rank 1 has parameter 0 = c () float32"),
        (lambda p: p[:2], "rank 0 has parameter 2 = c () float32, rank 1 has threshold=2097152"),
        (
            lambda p: [Parameter("a", np.ones((2, 3), "f4")), *p[1:]],
            "a (3, 2) float32, rank 1 has parameter 0 = a (2, 3)",
        ),
        (
            lambda p: three_parameters("float64"),
            "rank 0 has parameter 0 = a (3, 2) float32, rank 1 has parameter 0 = a (3, 2) float64",
        ),
        (lambda p: [p[0], Parameter("x", p[1].data), p[2]], "parameter 1 = b (4,) float32, rank 1 has parameter 1 = x"),
    ],
)
def test_ranks_that_differ_on_the_first_step_are_refused(other, text):
    def main(comm):
        params = three_parameters()
        DistOpt(communicator=comm)(constant_pairs(other(params) if comm.rank == 1 else params))

    assert text in texts_of(3, main, ValueError)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threshold": 5}, "rank 0 has threshold=2097152, rank 1 has threshold=5"),
        ({"num_batches": 2}, "num_batches=1, sync_on_apply=True, allow_missing=False, check_every=0, rank 1 has"),
        ({"broadcast": False}, "broadcast=True, nonfinite='raise'"),
        ({"nonfinite": "skip"}, "nonfinite='raise'"),
        ({"allow_missing": True}, "allow_missing=False"),
        ({"opt": SGD(0.2)}, "rank 0 has SGD's lr=0.1, rank 1 has SGD's lr=0.2"),
    ],
)
def test_ranks_whose_options_differ_are_refused(options, text):
    def main(comm):
        DistOpt(communicator=comm, **(options if comm.rank == 1 else {}))(constant_pairs(three_parameters()))

    assert text in texts_of(2, main, ValueError)


def test_two_optimizers_on_one_communicator_take_turns_in_the_same_order_on_every_rank():
    """They may take turns, in the same order on every rank; otherwise the models would mix."""

    def main(comm, mixed):
        models = [[Parameter("w", np.zeros(2))] for _ in range(2)]
        opts = [DistOpt(SGD(1.0), comm) for _ in range(2)]
        for opt, params in zip(opts, models, strict=True):
            opt(constant_pairs(params))
        order = (1, 0) if mixed and comm.rank else (0, 1)
        for k in order:
            opts[k](constant_pairs(models[k], k + 1.0))
        return [float(params[0].data[0]) for params in models]

    assert run_ranks(2, lambda comm: main(comm, False)) == [[-2.0, -3.0]] * 2
    text = texts_of(2, lambda comm: main(comm, True))
    assert text.startswith("ranks differ: rank 0 has DistOpt 1 of those made on this communicator, rank 1 has Dist")


def test_a_parameter_that_changes_its_shape():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(1.0), comm, allow_missing=True)
        opt(constant_pairs(params))
        params[1].data = np.zeros(9, "f4")
        try:
            opt([(p, None) for p in params])
        finally:
            assert (params[0].data == 0).all()

    text = texts_of(2, main, ValueError)
    assert text == "rank 0: b: the parameter must be (4,) float32, as on the first step, got (9,) float32"


def test_an_array_in_the_place_of_another_is_used():
    """param.data may be another array of the same shape later: the new one is updated."""

    def main(comm):
        p = Parameter("p", np.zeros(2))
        opt = DistOpt(SGD(1.0, 0.5), comm)
        opt(constant_pairs([p]))
        old, p.data = p.data, np.full(2, 10.0)
        opt(constant_pairs([p]))
        return old[0], p.data[0]

    assert run_ranks(2, main) == [(-1.0, 8.5)] * 2


def test_an_empty_first_step_does_not_freeze_the_model():
    for first in (lambda opt: opt([]), lambda opt: opt.gradient_views([])):
        opt, p = DistOpt(SGD(1.0)), Parameter("p", np.zeros(2))
        first(opt)
        opt(constant_pairs([p]))
        assert (p.data == -1).all()


def test_shared_memory_is_checked_again_when_a_parameters_array_changes():
    def main(comm):
        a, b = Parameter("a", np.zeros(2)), Parameter("b", np.zeros(2))
        opt = DistOpt(SGD(1.0, 0.9), comm, allow_missing=True)
        opt(constant_pairs([a, b]))
        b.data = b.data.copy()
        opt(constant_pairs([a, b] if comm.rank == 0 else [a]))  # b has no gradient here, but another array
        values = b.data.tolist()
        b.data = a.data
        with pytest.raises(ValueError, match="share memory"):
            opt(constant_pairs([a, b]))
        return values

    first, second = run_ranks(2, main)
    assert first == second


def test_ranks_whose_hyper_parameters_drift_apart_are_refused():
    def main(comm):
        opt, p = DistOpt(SGD(lambda k: 0.1), comm), Parameter("p", np.zeros(1))
        opt(constant_pairs([p]))
        opt.opt.lr = 0.2
        opt(constant_pairs([p]))
        if comm.rank:
            opt.opt.lr = 0.3
        opt(constant_pairs([p]))

    text = texts_of(2, main, ValueError)
    assert text.startswith("ranks differ: rank 0 has SGD's lr=0.2, rank 1 has SGD's lr=0.3")
    bad = SGD(lambda k: np.nan if k else 1.0)
    opt, p = DistOpt(bad), Parameter("p", np.zeros(1))
    opt(constant_pairs([p]))
    with pytest.raises(ValueError, match=r"lr must be finite and in \[0.0, inf\], got nan at update 1"):
        opt(constant_pairs([p]))
    assert p.data[0] == -1


def test_a_refused_first_step_leaves_no_optimizer_state():
    def main(comm):
        opt = DistOpt(SGD(1.0, 0.9), comm)
        with pytest.raises(ValueError, match="ranks differ"):
            opt(constant_pairs([Parameter("a", np.zeros(3 if comm.rank else 40))]))
        a = Parameter("a", np.zeros(40))
        opt(constant_pairs([a]))
        return float(a.data[0])

    assert run_ranks(2, main) == [-1.0, -1.0]


def test_gradient_views_work_after_a_refused_step_with_another_threshold():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(1.0), comm)
        opt(constant_pairs(params))
        with pytest.raises(TypeError, match="loss must be"):
            opt.backward_and_update(3 if comm.rank else constant_pairs(params), 0)
        return len(opt.gradient_views(params)), len(opt.plan.buckets)

    assert run_ranks(2, main) == [(3, 1)] * 2


def test_an_error_whose_text_raises_is_still_reported_to_all_ranks():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    def main(comm):
        def loss():
            if comm.rank:
                raise Mute
            return constant_pairs(three_parameters())

        DistOpt(communicator=comm)(loss)

    assert texts_of(2, main, RuntimeError) == "rank 1: Mute: (its text could not be made)"


def test_update_checks_the_gradient_before_it_sends_anything():
    opt, p, wrong = DistOpt(SGD(1.0)), Parameter("p", np.zeros((2, 3))), np.full(3, 4.0)
    with pytest.raises(ValueError, match="p: the gradient must be of the parameter's shape"):
        opt.update(p, wrong)
    assert (wrong == 4).all()
    with pytest.raises(TypeError, match="a communicator's array must be"):
        opt.fused_all_reduce([np.ones(2, np.uint32)], send=False)


def test_neighbours_in_one_array_are_no_overlap():
    memory = np.zeros(10)
    params = [Parameter("left", memory[:5]), Parameter("right", memory[5:]), Parameter("none", memory[2:2])]
    DistOpt(SGD(1.0))(constant_pairs(params))
    assert (memory == -1).all()


def test_a_parameter_name_that_cannot_be_encoded_is_reported_all_the_same():
    def main(comm):
        p = Parameter("\udc80 \n", np.zeros(2))
        DistOpt(communicator=comm)([(p, np.full(2, np.nan))])

    assert "not finite" in texts_of(2, main, FloatingPointError)


def test_ranks_at_different_steps_or_batches_are_refused():
    """A rank that was resumed from another checkpoint must not train along with the others."""

    def main(comm, **options):
        opt = DistOpt(SGD(0.1), comm, **options)
        if comm.rank == 1:
            ahead = DistOpt(SGD(0.1), LocalCommunicator(), **options)
            ahead(constant_pairs(three_parameters()))
            opt.load_state_dict(ahead.state_dict())
        opt(constant_pairs(three_parameters()))

    assert texts_of(2, main, ValueError) == "ranks differ: rank 0 has step 1, rank 1 has step 2"
    text = texts_of(2, lambda comm: main(comm, num_batches=3), ValueError)
    assert text == "ranks differ: rank 0 has step 1, batch 1, rank 1 has step 1, batch 2"


def test_a_refused_first_step_leaves_nothing_behind():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(1.0), comm)
        with pytest.raises(ValueError, match="ranks differ"):
            opt(constant_pairs(params[:2] if comm.rank else params))
        assert all((p.data == 1).all() for p in params)
        opt(constant_pairs(params[1:]))
        return float(params[0].data[0, 0]), float(params[1].data[0])

    assert run_ranks(2, main) == [(1.0, 0.0)] * 2


def test_unknown_and_missing_parameters_of_a_later_step_are_named():
    def main(comm, late):
        params = [Parameter("weight", np.ones(2)), Parameter("bias", np.ones(1))]
        opt = DistOpt(communicator=comm)
        opt(constant_pairs(params))
        opt(late(params) if comm.rank == 1 else constant_pairs(params))

    text = texts_of(
        2,
        lambda c: main(c, lambda p: [*constant_pairs(p), *constant_pairs([Parameter("weigth", np.ones(2))])]),
        ValueError,
    )
    assert text == "rank 1: weigth: not a parameter of the first step; did you mean weight?"
    assert texts_of(2, lambda c: main(c, lambda p: constant_pairs(p[:1])), ValueError).startswith(
        "rank 1: no gradient for bias;"
    )
    assert "use distopt.Parameter" in texts_of(
        2, lambda c: main(c, lambda p: [*constant_pairs(p), (np.ones(9), np.ones(9))])
    )


def test_missing_gradients_count_as_zeros_if_allowed():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(1.0), comm, allow_missing=True)
        opt([(p, None) if comm.rank and p.name == "b" else (p, g) for p, g in constant_pairs(params)])
        opt(constant_pairs(params[:1] if comm.rank else params))
        return [float(p.data.flat[0]) for p in params]

    assert run_ranks(2, main) == [[-1.0, 0.0, -0.5]] * 2


def test_gradients_may_be_strided_read_only_or_scalars():
    def main(comm):
        params = [
            Parameter("m", np.zeros((3, 4), "f4")),
            Parameter("v", np.zeros(5, "f4")),
            Parameter("s", np.zeros((), "f4")),
        ]
        wide, fixed = np.arange(24, dtype="f4").reshape(4, 6), np.arange(5, dtype="f4")
        fixed.flags.writeable = False
        DistOpt(SGD(1.0), comm)([(params[0], wide.T[:3]), (params[1], fixed), (params[2], np.float32(2))])
        np.testing.assert_array_equal(params[0].data, -wide.T[:3])
        np.testing.assert_array_equal(params[1].data, -fixed)
        assert params[2].data == -2

    run_ranks(2, main)


def test_a_step_without_any_parameter_is_applied():
    assert run_ranks(2, lambda comm: DistOpt(communicator=comm)([])) == [True, True]


def test_a_generator_that_raises_halfway():
    def main(comm):
        params = three_parameters()
        before = [p.data.copy() for p in params]

        def halfway():
            yield from constant_pairs(params[:1])
            if comm.rank == 1:
                raise OSError("disk gone")
            yield from constant_pairs(params[1:])

        opt = DistOpt(communicator=comm)
        opt(constant_pairs(params, 0.0))
        try:
            opt(halfway())
        finally:
            assert all((p.data == b).all() for p, b in zip(params, before, strict=True))
            opt(constant_pairs(params, 0.0))  # and the next step works

    assert texts_of(3, main, RuntimeError) == "rank 1: OSError: disk gone"


def test_two_ranks_fail_and_the_lowest_is_named():
    def main(comm):
        DistOpt(communicator=comm)(3 if comm.rank else [(np.ones(3), np.ones(4))])

    assert texts_of(3, main, ValueError).startswith(
        "rank 0: parameter 0: the gradient must be of the parameter's shape"
    )


def test_a_rank_that_leaves_is_named():
    def main(comm):
        opt = DistOpt(communicator=comm)
        for _ in range(3 if comm.rank == 1 else 4):
            opt(constant_pairs(three_parameters()))

    with pytest.raises(PeerLeft, match="rank 1 left"):
        run_ranks(2, main)


# ---------------------------------------------------------------------------------------------------- nan and inf


def poisoned(params, comm, value=np.nan):
    found = constant_pairs(params)
    if comm.rank == 1:
        found[1][1][2] = value
    return found


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_raise_refuses_the_step_and_names_rank_and_parameter(value):
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(1.0), comm)
        opt(constant_pairs(params))
        try:
            opt(poisoned(params, comm, value))
        finally:
            assert all((p.data == 0).all() for p in params)
            assert opt.step_counter == 1

    text = texts_of(3, main, FloatingPointError)
    assert text == "gradients of step 2 are not finite: rank 1: b (1 of 4 entries)"


def test_optimizers_that_have_made_different_numbers_of_updates():
    def main(comm):
        params, opt = laws.train(comm, steps=1, make=lambda: SGD(0.1))
        opt.opt.step_counter += comm.rank
        laws.train(comm, steps=1, params=params, opt=opt)

    text = texts_of(2, main, ValueError)
    assert text == "ranks differ: rank 0 has SGD's step_counter=1, rank 1 has SGD's step_counter=2"


def test_gradient_views_stay_equal_on_ranks_after_one_refused_a_step_early():
    def main(comm):
        params, opt = laws.train(comm, steps=1)
        with pytest.raises(ValueError, match="clip_Value must be at least 0"):
            opt.backward_and_update_half(laws.pairs(comm, params, 1), clipping=True, clip_Value=-comm.rank)
        laws.share(params, opt)
        opt.state_dict()

    run_ranks(2, main)


@pytest.mark.parametrize(("num_batches", "updates"), [(1, 7), (2, 3)])
def test_gradients_whose_sum_is_refused_are_not_counted(num_batches, updates):
    def main(comm):
        w, half = Parameter("w", np.zeros(4, np.float32)), Half(predivide=False)
        opt = DistOpt(SGD(1.0), comm, num_batches=num_batches)
        for k in range(8):
            refused = k == 3
            with pytest.raises(FloatingPointError) if refused else contextlib.nullcontext():
                opt.step([(w, np.full(4, 4e4 if refused else 1, np.float32))], half)
        return w.data.tolist()

    assert run_ranks(2, main) == [[-updates] * 4] * 2


def test_gradients_that_are_refused_in_their_views_are_not_counted():
    def main(comm):
        w, opt = Parameter("w", np.zeros(4, np.float32)), DistOpt(SGD(1.0), comm)
        [view] = opt.gradient_views([w])
        for value in (1, np.nan, 1):
            view[...] = value
            with pytest.raises(FloatingPointError) if np.isnan(value) else contextlib.nullcontext():
                opt([(w, view)])
        return w.data.tolist()

    assert run_ranks(2, main) == [[-2] * 4] * 2


def test_nonfinite_skip_drops_steps_and_raises_after_ten_in_a_row():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(1.0), comm, nonfinite="skip")
        assert opt(constant_pairs(params)) is True
        for _ in range(5):
            assert opt(poisoned(params, comm)) is False
        assert opt(constant_pairs(params)) is True
        assert (opt.skipped, opt.step_counter, opt.opt.step_counter) == (5, 2, 2)
        assert all((p.data == -1).all() for p in params)
        for _ in range(9):
            assert opt(poisoned(params, comm)) is False
        assert opt(constant_pairs(params)) is True
        for _ in range(10):
            opt(poisoned(params, comm))

    assert "10 steps in a row are not finite: rank 1: b" in texts_of(2, main, FloatingPointError)


def test_ten_bad_steps_raise_and_so_does_every_one_after_them():
    opt, params = DistOpt(SGD(1.0), nonfinite="skip"), three_parameters()
    for _ in range(9):
        assert not opt(constant_pairs(params, np.inf))
    for count in (10, 11):
        with pytest.raises(FloatingPointError, match=f"{count} steps in a row"):
            opt(constant_pairs(params, np.inf))


def test_nonfinite_propagate_applies_what_is_not_finite():
    def main(comm):
        params = three_parameters()
        assert DistOpt(SGD(1.0), comm, nonfinite="propagate")(poisoned(params, comm)) is True
        return np.isnan(params[1].data).tolist()

    assert run_ranks(2, main) == [[False, False, True, False]] * 2


# ---------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"opt": SGD}, TypeError, "opt must be an object with apply.*, got the class SGD; make an instance of it"),
        (
            {"opt": 3},
            TypeError,
            r"opt must be an object with apply\(name, value, grad\) or update\(param, grad\), got int",
        ),
        (
            {"nonfinite": "ignore"},
            ValueError,
            "nonfinite must be one of .*'raise', 'skip', 'propagate'.*, got 'ignore'",
        ),
        ({"threshold": -1}, ValueError, "threshold must be at least 0, got -1"),
        ({"threshold": 1.5}, TypeError, "threshold must be an integer, got 1.5"),
        ({"num_batches": 0}, ValueError, "num_batches must be at least 1, got 0"),
        ({"buffSize": 0}, ValueError, "buffSize must be at least 1, got 0"),
        ({"communicator": 3}, TypeError, "communicator must be a distopt.comm.Communicator or None, got int"),
        ({"communicator": []}, TypeError, "communicator must be a distopt.comm.Communicator or None, got list"),
        ({"overlap": 3}, ValueError, "overlap must be 'auto', True or False, got 3"),
        ({"overlap": 1.0}, ValueError, "overlap must be 'auto', True or False, got 1.0"),
        ({"broadcast": "no"}, TypeError, "broadcast must be True or False, got 'no'"),
        ({"sync_on_apply": 0}, TypeError, "sync_on_apply must be True or False, got 0"),
        ({"deterministic": None}, TypeError, "deterministic must be True, False or 'exact', got None"),
        ({"check_every": True}, TypeError, "check_every must be an integer, got True"),
    ],
)
def test_wrong_options_are_refused_by_name(options, error, text):
    with pytest.raises(error, match=text):
        DistOpt(**options)
    with pytest.raises(TypeError, match="unexpected keyword"):
        DistOpt(treshold=5)


def test_every_instance_has_its_own_optimizer():
    assert DistOpt().opt is not DistOpt().opt
    assert isinstance(DistOpt().opt, SGD)


def test_rank_0_parameters_are_broadcast_once_unless_broadcast_is_false():
    def main(comm, broadcast):
        params = [Parameter("w", np.full(3, comm.rank, "f4"))]
        opt = DistOpt(SGD(1.0), comm, broadcast=broadcast)
        opt(constant_pairs(params))
        first = float(params[0].data[0])
        params[0].data += comm.rank
        opt(constant_pairs(params, 0.0))
        return first, float(params[0].data[0])

    assert run_ranks(3, lambda c: main(c, True)) == [(-1, -1), (-1, 0), (-1, 1)]
    assert run_ranks(3, lambda c: main(c, False)) == [(-1, -1), (0, 1), (1, 3)]


@pytest.mark.parametrize("sync_on_apply", [True, False])
def test_num_batches_calls_are_one_step_on_their_mean(sync_on_apply):
    def main(comm):
        params, whole = laws.parameters(), laws.parameters()
        metered = Metered(comm)
        opt = DistOpt(laws.sgd(), metered, num_batches=3, sync_on_apply=sync_on_apply, broadcast=False, threshold=60)
        one = DistOpt(laws.sgd(), comm, threshold=60)
        applied = [opt(zip(params, laws.gradients(params, k, comm.rank), strict=True)) for k in range(6)]
        for start in (0, 3):
            batches = [laws.gradients(params, start + k, comm.rank) for k in range(3)]
            one((p, sum(g) / p.data.dtype.type(3)) for p, *g in zip(whole, *batches, strict=True))
        for p, w in zip(params, whole, strict=True):
            np.testing.assert_allclose(p.data, w.data, rtol=0, atol=1e-6)
        return applied, metered.report()["all_reduce"]["calls"] // len(opt.plan.buckets)

    exchanges = 2 if sync_on_apply else 6
    assert run_ranks(2, main) == [([False, False, True] * 2, exchanges)] * 2


def test_a_threshold_given_to_one_call_does_not_outlive_it():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(communicator=comm)
        opt.backward_and_update(constant_pairs(params), threshold=0)
        every = len(opt.plan.buckets)
        opt(constant_pairs(params))
        return every, len(opt.plan.buckets)

    assert run_ranks(2, main) == [(3, 1)] * 2


# ---------------------------------------------------------------------------------------------------- strangers


class ByUpdate:
    def __init__(self):
        self.seen = []

    def update(self, param, grad):
        self.seen.append((param.name, grad.tolist()))
        param.data -= grad


class ByApply:
    def __init__(self):
        self.seen, self.steps = [], 0

    def apply(self, name, value, grad):
        self.seen.append((name, grad.tolist()))
        value -= grad

    def step(self):
        self.steps += 1


@pytest.mark.parametrize("kind", [ByUpdate, ByApply])
def test_a_custom_optimizer_gets_means_in_backward_order(kind):
    def main(comm):
        params = [Parameter(n, np.ones(s)) for n, s in (("last", 2), ("big", 9), ("first", 1))]
        opt = DistOpt(kind(), comm, threshold=5)
        opt(constant_pairs(params, comm.rank * 2.0))
        opt(constant_pairs(params[::-1], 0.0))
        assert opt.opt.seen[:3] == [("last", [1.0] * 2), ("big", [1.0] * 9), ("first", [1.0])]
        assert [n for n, _ in opt.opt.seen[3:]] == ["last", "big", "first"]
        assert getattr(opt.opt, "steps", 2) == 2
        return [float(p.data[0]) for p in params]

    assert run_ranks(2, main) == [[0.0] * 3] * 2


# ---------------------------------------------------------------------------------------------------- memory


def test_gradient_views_are_never_packed():
    def main(comm):
        params, plain = three_parameters(), three_parameters()
        opt, other = DistOpt(SGD(0.5, 0.9), comm), DistOpt(SGD(0.5, 0.9), comm)
        views = opt.gradient_views(params)
        assert [v.shape for v in views] == [(3, 2), (4,), ()]
        addresses = [v.ctypes.data for v in views]
        assert all(a % 64 == 0 for a in addresses)
        for step in range(3):
            for v in views:
                v[...] = step + comm.rank
            opt(reversed(list(zip(params, views, strict=True))))
            other(constant_pairs(plain, step + comm.rank))
        assert [v.ctypes.data for v in opt.gradient_views(params)] == addresses
        for p, q in zip(params, plain, strict=True):
            np.testing.assert_array_equal(p.data, q.data)

    run_ranks(2, main)


def test_views_given_for_the_wrong_parameters_are_copied_first():
    def main(comm):
        params = [Parameter("a", np.zeros(3)), Parameter("b", np.zeros(3))]
        opt = DistOpt(SGD(1.0), comm)
        a, b = opt.gradient_views(params)
        a[:], b[:] = 1, 2
        opt([(params[0], b), (params[1], a)])
        return params[0].data[0], params[1].data[0]

    assert run_ranks(2, main) == [(-2.0, -1.0)] * 2


def test_gradient_views_may_be_swapped_across_buckets_and_beside_a_missing_gradient():
    params = [Parameter(n, np.zeros(3)) for n in "abc"]
    opt = DistOpt(SGD(1.0), threshold=0, allow_missing=True)
    a, b, c = opt.gradient_views(params)
    for view, value in zip((a, b, c), (1, 2, 3), strict=True):
        view[:] = value
    opt(zip(params, (c, a, b), strict=True))
    assert [p.data[0] for p in params] == [-3, -1, -2]
    a[:] = 5
    opt([(params[1], a)])
    assert [p.data[0] for p in params] == [-3, -6, -2]


def test_views_live_on_after_load_state_dict():
    params = three_parameters()
    opt = DistOpt(SGD(1.0), num_batches=2)
    views = opt.gradient_views(params)
    for v in views:
        v[...] = 1
    opt(zip(params, views, strict=True))
    opt.load_state_dict(opt.state_dict())
    assert all(v is w or v.ctypes.data == w.ctypes.data for v, w in zip(views, opt.gradient_views(params), strict=True))
    opt(zip(params, views, strict=True))
    assert all((p.data == 0).all() for p in params)


def test_gradient_views_of_ranks_that_differ_are_refused():
    def main(comm):
        DistOpt(communicator=comm).gradient_views(three_parameters()[: 2 + comm.rank % 2])

    assert "ranks differ: rank 0 has threshold" in texts_of(2, main, ValueError)


def test_the_plan_prints_buckets_with_sizes_and_members():
    def main(comm):
        opt = DistOpt(communicator=comm, threshold=5)
        assert opt.plan is None
        opt(constant_pairs(three_parameters()))
        return str(opt.plan)

    assert run_ranks(2, main)[0].splitlines() == [
        "3 tensors, 11 elements, 2 buckets (threshold 5)",
        "bucket  dtype    tensors      elements     payload       dense  members",
        "     0  float32        1             6    0.024 kB    0.024 kB  a",
        "     1  float32        2             5    0.068 kB    0.068 kB  b .. c",
    ]


def test_state_dict_is_plain_and_a_copy():
    def main(comm):
        params = three_parameters()
        opt = DistOpt(SGD(0.1, 0.9), comm, num_batches=2)
        for _ in range(3):
            opt(constant_pairs(params))
        state = opt.state_dict()
        assert set(state) == set(
            "step_counter num_batches batches contributions partial skipped skips_in_a_row loss_scale rooms borders "
            "states optimizer".split()
        )
        assert (state["step_counter"], state["batches"], state["contributions"]) == (1, 1, 1.0)
        window = state["states"]["window"]
        assert {n: a.shape for n, a in window.items()} == {"a": (3, 2), "b": (4,), "c": ()}
        window["a"][:] = 99
        assert (opt.state_dict()["states"]["window"]["a"] == 1).all()
        fresh = DistOpt(SGD(0.1, 0.9), comm, num_batches=2)
        fresh.load_state_dict(opt.state_dict())
        assert (fresh.state_dict()["states"]["window"]["a"] == 1).all()  # before there is a plan

    run_ranks(2, main)


def saved(**options):
    """The state of a run with momentum that was skipped once, in the middle of a window if there are windows."""
    opt, params = DistOpt(SGD(0.1, 0.9), nonfinite="skip", **options), three_parameters()
    for value in (1.0, 1.0, 1.0, np.nan):
        opt(constant_pairs(params, value))
    return opt.state_dict()


def test_a_state_is_refused_before_anything_changes():
    state = saved(num_batches=2)
    other = [Parameter("b", np.zeros(4, "f4"))]
    opt = DistOpt(SGD(0.1, 0.9), num_batches=2)
    opt(constant_pairs(other))
    before = str(opt.state_dict())
    window = {"window": {"b": np.zeros((2, 2), "f4")}}
    for wrong, text in (
        ({}, r"the entries of a state must be \['batches', .*, got \[\]"),
        (
            state | {"num_batches": 3},
            "num_batches must be that of the state, which was saved after 1 of 3 batches, got 2",
        ),
        (state, "names in state window must be those of parameters, got 'a'"),
        (state | {"states": window}, r"state window of b must be of shape \(4,\), got \(2, 2\)"),
        (state | {"states": {"window": {"b": np.zeros(4)}}}, "state window of b must be of dtype float32, got float64"),
        (state | {"states": {"window": {"b": np.full(4, "x")}}}, "state window of b must be of dtype float32, got <U1"),
    ):
        with pytest.raises(ValueError, match=text):
            opt.load_state_dict(wrong)
    assert str(opt.state_dict()) == before


def test_a_state_of_other_parameters_is_refused_at_the_first_step():
    def main(comm):
        opt = DistOpt(SGD(0.1, 0.9), comm)
        opt.load_state_dict(saved())
        params = [Parameter("a", np.ones(6, "f4")), *three_parameters()[1:]]
        try:
            opt(constant_pairs(params))
        finally:
            assert all((p.data == 1).all() for p in params)

    assert "state moments of a must be shaped (6,), as the parameter, got (3, 2)" in texts_of(2, main, ValueError)


def test_a_restored_window_survives_a_refused_first_step():
    def main(comm):
        opt, params = DistOpt(SGD(1.0), comm, num_batches=2), three_parameters()
        source = DistOpt(SGD(1.0), num_batches=2)
        source(constant_pairs(params, 3.0))
        opt.load_state_dict(source.state_dict())
        with pytest.raises(ValueError, match="ranks differ"):
            opt(constant_pairs(params[::-1] if comm.rank else params))
        opt(constant_pairs(params))
        return [float(p.data.flat[0]) for p in params]

    assert run_ranks(2, main) == [[-1.0] * 3] * 2


def test_load_state_dict_restores_counters_and_parameters_are_not_broadcast_again():
    state = saved()

    def main(comm):
        opt = DistOpt(SGD(0.1, 0.9), comm, nonfinite="skip")
        opt.load_state_dict(state)
        assert (opt.step_counter, opt.skipped, opt.opt.step_counter) == (3, 1, 3)
        assert opt.state_dict()["skips_in_a_row"] == 1
        p = three_parameters()
        for q in p:
            q.data += comm.rank
        opt(constant_pairs(p, 0.0))
        return float(p[2].data)

    first, second = run_ranks(2, main)
    assert second - first == pytest.approx(1), "parameters of a resumed run are not broadcast"


def test_an_update_that_failed_halfway_needs_a_checkpoint():
    """A custom optimizer that raises on one rank has updated part of its parameters there."""

    class Moody:
        def __init__(self, comm):
            self.rank = comm.rank

        def update(self, param, grad):
            if grad[0] == 1 and self.rank == 1 and param.name == "q":
                raise OSError("mood")
            param.data -= grad

    def main(comm):
        params = [Parameter("p", np.zeros(1)), Parameter("q", np.zeros(1))]
        opt = DistOpt(Moody(comm), comm, num_batches=2)
        state = opt.state_dict()
        opt(constant_pairs(params))
        try:
            opt(constant_pairs(params))
        except OSError:
            assert comm.rank == 1
        text = "rank 1: the update of step 1 failed halfway with OSError: mood; load a checkpoint to go on"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                opt(constant_pairs(params))
        opt.load_state_dict(state)
        for p in params:
            p.data[:] = 0
        assert [opt(constant_pairs(params, 2.0)), opt(constant_pairs(params, 4.0))] == [False, True]
        return [float(p.data[0]) for p in params]

    assert run_ranks(2, main) == [[-3.0, -3.0]] * 2


def test_inconsistent_states_are_refused_and_change_nothing():
    opt = DistOpt(SGD(0.1, 0.9), num_batches=2)
    opt(constant_pairs(three_parameters()))
    good = opt.state_dict()
    before = str(good)
    for change, error, text in (
        ({"batches": 7}, ValueError, "saved after 7 of 2 batches"),
        ({"batches": -5}, ValueError, "batches must be at least 0, got -5"),
        ({"contributions": -0.5}, ValueError, "contributions must be at least 0 and finite, got -0.5"),
        ({"contributions": float("nan")}, ValueError, "contributions must be at least 0 and finite, got nan"),
        ({"step_counter": None}, TypeError, "step_counter must be an integer, got None"),
        ({"optimizer": None}, ValueError, "the optimizer of a state must be a state of this optimizer, got None"),
        ({"optimizer": {"m": 1}}, ValueError, "the states of SGD must be"),
        ({"states": 3}, ValueError, "states must be a dict of dicts of arrays, got int"),
        ({"states": {"residual": []}}, ValueError, "states must be a dict of dicts of arrays, got list"),
    ):
        with pytest.raises(error, match=text):
            opt.load_state_dict(good | change)
        assert str(opt.state_dict()) == before


# ---------------------------------------------------------------------------------------------------- the verbs


def test_singas_loop_of_all_reduce_and_update_equals_whole_steps():
    def main(comm):
        params, whole = three_parameters(), three_parameters()
        opt, other = DistOpt(SGD(0.1, 0.9), comm), DistOpt(SGD(0.1, 0.9), comm)
        for step in range(3):
            found = constant_pairs(params, step + comm.rank)
            for _, g in found:
                opt.all_reduce(g)
            opt.wait()
            for p, g in found:
                opt.update(p, g)
            opt.step()
            other(constant_pairs(whole, step + comm.rank))
        for p, w in zip(params, whole, strict=True):
            np.testing.assert_array_equal(p.data, w.data)
        return opt.step_counter

    assert run_ranks(2, main) == [3, 3]


@pytest.mark.parametrize("capacity", [1, 7, 1000])
def test_fused_all_reduce_sums_in_pieces_of_the_buffer_size(capacity):
    def main(comm):
        opt = DistOpt(communicator=comm, buffSize=capacity)
        xs = [np.full(s, comm.rank + 1.0) for s in ((2, 3), (0,), (), (11,))]
        opt.fused_all_reduce(xs)
        assert all((x == 3).all() for x in xs)
        opt.fused_all_reduce(xs[:2], send=False)
        opt.fused_all_reduce(xs[2:], send=False)
        assert all((x == 3).all() for x in xs)
        opt.fused_all_reduce(xs, send=True)
        opt.wait()
        assert all((x == 6).all() for x in xs)
        opt.fused_all_reduce([])

    run_ranks(2, main)


def test_fused_all_reduce_refuses_a_list_that_was_not_filled():
    def main(comm):
        opt = DistOpt(communicator=comm)
        xs = [np.ones(3), np.ones(4)]
        opt.fused_all_reduce(xs, send=False)
        opt.fused_all_reduce(xs[::-1] if comm.rank else xs)

    text = texts_of(2, main, ValueError)
    assert text == (
        "rank 1: the list must be the 2 arrays that were filled, got 2; "
        "at position 0 3 elements of float64 were filled, got 4 of float64"
    )
    with pytest.raises(TypeError, match="fused arrays must be of one dtype, float64 as those filled, got float32"):
        DistOpt().fused_all_reduce([np.ones(3), np.ones(3, "f4")], send=False)


def test_ranks_that_call_different_verbs_or_sizes_are_refused():
    def other_size(comm):
        DistOpt(communicator=comm).all_reduce(np.ones(3 + comm.rank))

    def other_verb(comm):
        opt, x = DistOpt(communicator=comm), np.ones(3)
        opt.broadcast([x]) if comm.rank else opt.all_reduce(x)

    def no_array(comm):
        DistOpt(communicator=comm).all_reduce([1.0] if comm.rank else np.ones(1))

    assert "rank 0 has all_reduce of array 0 = (3,) float64, rank 1 has all_reduce of array 0 = (4,)" in texts_of(
        2, other_size
    )
    assert "rank 0 has all_reduce, rank 1 has broadcast" in texts_of(2, other_verb)
    assert texts_of(2, no_array, TypeError).startswith("rank 1: a communicator's array must be of float32,")


def test_an_error_of_one_rank_in_a_verb_is_raised_by_every_rank():
    def bad_list(verb):
        def main(comm):
            def broken():
                yield np.ones(2)
                if comm.rank == 1:
                    raise OSError("gone")
                yield np.ones(3)

            getattr(DistOpt(communicator=comm), verb)(broken())

        return main

    for verb in ("fused_all_reduce", "broadcast", "gradient_views"):
        assert texts_of(2, bad_list(verb), RuntimeError) == "rank 1: OSError: gone"
    text = texts_of(2, lambda c: DistOpt(communicator=c).broadcast([3.0 if c.rank else np.ones(1)]), TypeError)
    assert text.startswith("rank 1: a communicator's array must be of")
    text = texts_of(
        2, lambda c: DistOpt(communicator=c, buffSize=4 + c.rank).fused_all_reduce([np.ones(9)]), ValueError
    )
    assert "buffSize=4, rank 1 has" in text


def test_a_refused_send_forgets_what_was_filled():
    def main(comm):
        opt, xs = DistOpt(communicator=comm), [np.ones(3)]
        opt.fused_all_reduce(xs, send=False)
        with pytest.raises(ValueError, match="the list must be the 1 arrays that were filled"):
            opt.fused_all_reduce([np.ones(4)] if comm.rank else xs)
        xs = [np.full(2, comm.rank + 1.0)]
        opt.fused_all_reduce(xs)
        return xs[0].tolist()

    assert run_ranks(2, main) == [[3.0, 3.0]] * 2


def test_broadcast_sends_rank_0s_values_and_rank_attributes_are_set():
    def main(comm):
        opt = DistOpt(communicator=comm)
        x, p = np.full(3, comm.rank), Parameter("p", np.full(2, comm.rank, "f4"))
        opt.broadcast([x, p])
        assert not x.any()
        assert not p.data.any()
        assert opt.communicator is comm
        return opt.world_size, opt.global_rank, opt.local_rank

    assert run_ranks(3, main) == [(3, 0, 0), (3, 1, 1), (3, 2, 2)]


def test_a_closed_dist_opt_refuses_every_call():
    opt = DistOpt()
    opt.close()
    for use in (
        lambda: opt([]),
        opt.step,
        lambda: opt.update(0, 0),
        lambda: opt.fused_all_reduce([], send=False),
        lambda: opt.all_reduce(np.ones(1)),
        lambda: opt.gradient_views([]),
    ):
        with pytest.raises(RuntimeError, match="this DistOpt is closed; make a new one"):
            use()


@pytest.mark.parametrize("size", [1, 2])
def test_one_gradient_array_may_serve_two_parameters_at_every_step(size):
    """It lies in the view of one of them, and is copied for the other anew at every step."""

    def main(comm):
        a, b = Parameter("a", np.zeros(3)), Parameter("b", np.zeros(3))
        opt = DistOpt(SGD(1.0), comm)
        view, _ = opt.gradient_views([a, b])
        for step in range(3):
            view[...] = 10**step
            opt([(a, view), (b, view)])
        assert a.data.tolist() == b.data.tolist() == [-111.0] * 3

    run_ranks(size, main)


def test_gradient_views_asked_for_while_a_parameter_has_another_array_do_not_bind_it():
    """As when averaged weights are swapped in for a moment: the next step updates what is there then."""

    def main(comm):
        p = Parameter("p", np.zeros(3))
        own, other, opt = p.data, np.ones(3), DistOpt(SGD(1.0), comm)
        grad = np.ones(3)
        opt([(p, grad)])
        p.data = other
        opt.gradient_views([p])
        p.data = own
        grad[:] = 1
        opt([(p, grad)])
        assert own.tolist() == [-2.0] * 3
        assert other.tolist() == [1.0] * 3

    run_ranks(2, main)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [40001, 27003])
def test_half_sparse_and_topk_steps_share_one_bucket_of_scratch_memory(n, dtype):
    """Payloads of different kinds in the memory of one bucket, one after the other."""

    def main(comm):
        w, opt = Parameter("w", np.zeros(n, dtype)), DistOpt(SGD(1.0), comm)
        for _ in range(2):
            opt.backward_and_update_half([(w, np.ones(n, dtype))])
            opt.backward_and_sparse_update([(w, np.ones(n, dtype))], spars=0.5)
            opt.backward_and_sparse_update([(w, np.ones(n, dtype))], spars=3.0)
            opt.backward_and_sparse_update([(w, np.ones(n, dtype))], spars=0.5, topK=True)
        opt.backward_and_sparse_update([(w, np.zeros(n, dtype))], spars=1.0, topK=True)
        return w.data.sum(dtype=np.float64)

    assert run_ranks(2, main) == [-8.0 * n] * 2


def test_an_optimizer_that_was_used_can_be_copied():
    p, q = Parameter("p", np.zeros(3)), Parameter("p", np.zeros(3))
    opt = DistOpt(SGD(1.0, momentum=0.5), LocalCommunicator())
    opt([(p, np.ones(3))])
    q.data[:] = p.data
    twin = copy.deepcopy(opt.opt)
    opt([(p, np.ones(3))])
    twin([(q, np.ones(3))])
    assert q.data.tolist() == p.data.tolist() == [-2.5] * 3
