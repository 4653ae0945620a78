"""The memory of gradients and parameters: what may be shared, and what must not change until a step returns."""

import itertools

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import LocalCommunicator
from distopt.kernels.layout import ArrayMatcher
from distopt.optim import SGD

ONE_MEMORY = "have gradients in the same memory: what a generator yields must stay as it is until the step returns"


def three(size=4):
    return [Parameter(n, np.zeros(size, np.float32)) for n in "abc"]


def scratch(params, parts):
    """A loss that writes each gradient into one buffer, of which it yields ``parts``, one for each parameter."""
    buffer = np.zeros(36, np.float32)

    def loss():
        for k, p in enumerate(params):
            buffer[:] = k + 1
            yield p, parts[k](buffer).reshape(p.data.shape)

    return loss


SAME = [lambda b: b[:4]] * 3
SHIFTED = [lambda b, k=k: b[3 * k : 3 * k + 4] for k in range(3)]
STRIDED = [lambda b: b[:8:2]] * 3


# ---------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("parts", [SAME, SHIFTED, STRIDED], ids=["same", "shifted", "strided"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_generator_that_writes_over_what_it_yielded_is_refused_on_every_rank(parts, overlap):
    def main(comm):
        params = three()
        opt = DistOpt(SGD(1.0), comm, threshold=0, overlap=overlap)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"a and b {ONE_MEMORY}"):
                opt(scratch(params, parts))
        return [p.data.tolist() for p in params], opt.step_counter

    assert run_ranks(2, main) == [([[0.0] * 4] * 3, 0)] * 2


@pytest.mark.parametrize("parts", [SAME, STRIDED], ids=["same", "strided"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_reused_gradient_buffer_is_refused_after_good_steps_too(parts, overlap):
    """Although with overlap the first buckets are on their way when the last gradient comes."""

    def main(comm):
        params = three()
        opt = DistOpt(SGD(1.0), comm, threshold=0, overlap=overlap)
        own = [(p, np.ones(4, np.float32)) for p in params]
        assert opt(iter(own))
        assert opt(iter(own))
        for _ in range(2):
            with pytest.raises(ValueError, match=ONE_MEMORY):
                opt(scratch(params, parts))
        assert opt(iter(own))
        return [float(p.data[0]) for p in params]

    assert run_ranks(2, main) == [[-3.0] * 3] * 2


def test_one_rank_that_writes_over_its_gradients_is_named():
    def main(comm):
        params = three()
        opt = DistOpt(SGD(1.0), comm)
        with pytest.raises(ValueError, match=f"rank 1: a and b {ONE_MEMORY}"):
            opt(scratch(params, SAME) if comm.rank else [(p, np.ones(4, np.float32)) for p in params])

    run_ranks(2, main)


def test_virtual_ranks_refuse_a_reused_gradient_buffer():
    params = three()
    with pytest.raises(ValueError, match=ONE_MEMORY):
        simulate(2, SGD(1.0))(lambda rank: scratch(params, SAME)())
    sim = simulate(2, SGD(1.0))
    with pytest.raises(ValueError, match=f"rank 1: a and b {ONE_MEMORY}"):
        sim(lambda rank: scratch(params, SAME)() if rank else [(p, np.ones(4, np.float32)) for p in params])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_may_have_one_gradient_twice(kind, overlap):
    """It is complete before anything is read, as after a sum whose terms have equal gradients."""

    def main(comm):
        params, same = three(), np.ones(4, np.float32)
        opt = DistOpt(SGD(1.0), comm, threshold=0, overlap=overlap)
        for _ in range(3):
            opt(kind((p, same) for p in params))
        for _ in range(2):
            with pytest.raises(ValueError, match=ONE_MEMORY):
                opt((p, same) for p in params)
        return [float(p.data[0]) for p in params]

    assert run_ranks(2, main) == [[-3.0] * 3] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_parts_of_one_buffer_are_gradients_like_any_others(overlap):
    def main(comm):
        params = [Parameter(n, np.zeros(s, np.float32)) for n, s in (("a", (2, 3)), ("b", (0,)), ("c", ()), ("d", 5))]
        opt, flat = DistOpt(SGD(1.0), comm, threshold=0, overlap=overlap), np.arange(12, dtype=np.float32)
        views = [flat[:6].reshape(2, 3), flat[6:6], flat[6:7].reshape(()), flat[7:12]]
        for _ in range(3):
            opt(iter([(p, v) for p, v in zip(params, views, strict=True)]))
        return [p.data.tolist() for p in params]

    wanted = [[[0.0, -3.0, -6.0], [-9.0, -12.0, -15.0]], [], -18.0, [-21.0, -24.0, -27.0, -30.0, -33.0]]
    assert run_ranks(2, main) == [wanted] * 2


def test_columns_of_one_matrix_are_gradients_like_any_others():
    params, matrix = three(), np.arange(12, dtype=np.float32).reshape(4, 3)
    opt = DistOpt(SGD(1.0), LocalCommunicator())
    for _ in range(2):
        opt((p, matrix[:, k]) for k, p in enumerate(params))
    assert [p.data.tolist() for p in params] == (-2 * matrix.T).tolist()


def test_gradient_views_may_come_from_a_generator():
    params, opt = three(), DistOpt(SGD(1.0), LocalCommunicator())
    views = opt.gradient_views(params)

    def loss():
        for p, v in zip(params, views, strict=True):
            v[:] = 1
            yield p, v

    for _ in range(3):
        opt(loss)
    assert [p.data[0] for p in params] == [-3] * 3


def test_temporary_gradient_arrays_are_kept_apart_until_the_step_returns():
    params, opt = three(), DistOpt(SGD(1.0), LocalCommunicator())
    for _ in range(3):
        opt((p, np.full(4, k, np.float32)) for k, p in enumerate(params))
    assert [p.data[0] for p in params] == [0, -3, -6]


def test_a_repeated_address_is_found_at_any_position():
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 100, 5000):
        layout = ArrayMatcher([np.zeros(1, np.float32)] * count)
        addresses = (random.permutation(4 * count)[:count] * 64 + 64).astype(np.uintp)
        assert layout.repeated(addresses) is None
        for first, second in itertools.islice(itertools.combinations(range(count), 2), 20):
            twice = addresses.copy()
            twice[second] = twice[first]
            assert layout.repeated(twice) == (first, second)
    assert ArrayMatcher([np.zeros(0), np.zeros(0), np.zeros(1)]).repeated(np.array([64, 64, 64], np.uintp)) is None
    assert ArrayMatcher([np.zeros(1)] * 3).repeated(np.array([0, 64, 0], np.uintp)) is None, "at 0 there is no gradient"


# ---------------------------------------------------------------------------------------------------- parameters


def locked(array):
    array.flags.writeable = False


def reshaped(array):
    array.shape = (2, 2)


def of_integers(array):
    array.dtype = np.int32


@pytest.mark.filterwarnings("ignore:Setting the .* has been deprecated in NumPy 2.5")  # programs do it all the same
@pytest.mark.parametrize("change", [locked, reshaped, of_integers])
@pytest.mark.parametrize("kind", [np.asarray, lambda x: x.view(np.memmap)], ids=["array", "subclass"])
def test_a_parameter_that_was_changed_in_place_is_refused_before_anything_is_written(change, kind):
    def main(comm):
        params = [Parameter(n, kind(np.zeros(4, np.float32))) for n in "abc"]
        opt = DistOpt(SGD(1.0), comm)
        own = [(p, np.ones(4, np.float32)) for p in params]
        for _ in range(2):
            opt(own)
        if comm.rank == 1:
            change(params[1].data)
        for _ in range(2):
            with pytest.raises((ValueError, TypeError), match=r"rank 1: b: (a|the) parameter"):
                opt(own)
        return [float(p.data.view(np.float32).flat[0]) for p in params]

    assert run_ranks(2, main) == [[-2.0] * 3] * 2


def test_training_goes_on_with_a_parameter_moved_to_another_array():
    params, opt = three(), DistOpt(SGD(1.0), LocalCommunicator())
    own = [(p, np.ones(4, np.float32)) for p in params]
    opt(own)
    old, params[1].data = params[1].data, params[1].data.copy()
    locked(old)
    opt(own)
    assert [p.data[0] for p in params] == [-2] * 3


def test_masked_arrays_are_refused_by_name():
    masked = np.ma.masked_array(np.zeros(4, np.float32), [0, 1, 0, 0])
    with pytest.raises(TypeError, match=r"b: a parameter must be an array.*\(the mask would be lost: x.filled\(0\)"):
        DistOpt()([(Parameter("b", masked), np.ones(4, np.float32))])
    params, opt = three(), DistOpt()
    own = [(p, np.ones(4, np.float32)) for p in params]
    opt(own)
    with pytest.raises(TypeError, match=r"b: a gradient must be an array, got MaskedArray.*\(the mask would be lost"):
        opt([own[0], (params[1], masked), own[2]])
    with pytest.raises(TypeError, match="the mask would be lost"):
        opt.all_reduce(masked)


# ---------------------------------------------------------------------------------------------------- endless losses


@pytest.mark.parametrize("steps", [0, 1])
def test_a_loss_that_yields_without_end_is_refused(steps):
    params, opt = three(), DistOpt()
    own = [(p, np.ones(4, np.float32)) for p in params]
    for _ in range(steps):
        opt(own)
    with pytest.raises(ValueError, match="a: given twice, at positions 0 and 3"):
        opt(itertools.cycle(own))
    with pytest.raises(ValueError, match="a: given twice, at positions 0 and 1"):
        opt((Parameter("a", np.zeros(4, np.float32)), None) for _ in itertools.count())
    with pytest.raises(TypeError, match="loss must be an iterable of"):
        opt(itertools.count())
    with pytest.raises(ValueError, match="a: given twice"):
        opt.gradient_views(itertools.cycle(params))
    with pytest.raises(ValueError, match="a: given twice"):
        simulate(2)(lambda rank: itertools.cycle(own))
