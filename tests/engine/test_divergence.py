"""check_every: ranks whose parameters have diverged are named."""

import numpy as np
import pytest

import laws
from distopt import DistOpt, run_ranks


def diverging(comm, flip, check_every=3, steps=12, **options):
    """The step at which a run ends in which a bit flips in one parameter of some ranks, and what is said."""
    params, opt = laws.train(comm, steps=0, check_every=check_every, **options)
    for step in range(steps):
        if step == 4 and comm.rank in flip:
            params[2].data.view(np.uint32).reshape(-1)[-1] ^= 1
            params[5].data.view(np.uint32).reshape(-1)[0] ^= 1
        try:
            opt(laws.pairs(comm, params, step))
        except RuntimeError as error:
            return opt.step_counter, str(error)
    return None


@pytest.mark.parametrize(
    ("size", "flip", "said"),
    [
        (2, [1], "rank 1 from the other 1"),
        (2, [0], "rank 1 from the other 1"),
        (3, [0], "rank 0 from the other 2"),
        (4, [1, 3], "ranks 1, 3 from the other 2"),
        (4, [0, 2], "ranks 1, 3 from the other 2"),
        (4, [0, 1, 2], "rank 3 from the other 3"),
    ],
)
def test_the_first_parameter_and_the_minority_are_named(size, flip, said):
    expected = 6, f"ranks have diverged after step 6: p2 differs on {said}"
    assert run_ranks(size, lambda comm: diverging(comm, flip)) == [expected] * size


def test_parameters_with_the_same_nan_have_not_diverged():
    def main(comm):
        params, opt = laws.train(comm, steps=1, check_every=1, nonfinite="propagate")
        params[0].data.fill(np.nan)
        opt(laws.pairs(comm, params, 1))

    run_ranks(2, main)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_parameters_of_any_dtype_are_compared(dtype):
    def main(comm):
        params = laws.parameters([(3, 5), (0,), ()], dtype)
        opt = DistOpt(communicator=comm, check_every=1)
        opt(laws.pairs(comm, params, 0))
        params[0].data[0, 0] += comm.rank
        with pytest.raises(RuntimeError, match="ranks have diverged after step 2: p0 differs on rank 1"):
            opt(laws.pairs(comm, params, 1))

    run_ranks(2, main)


@pytest.mark.parametrize("options", [{}, {"check_every": 0}, {"num_batches": 2, "steps": 5}])
def test_ranks_that_are_equal_or_not_checked_raise_no_divergence(options):
    flip = [] if not options else [1]
    assert run_ranks(2, lambda comm: diverging(comm, flip, **options)) == [None] * 2


def test_partial_steps_let_ranks_differ():
    run_ranks(2, lambda comm: laws.train(comm, mode="partial", check_every=1))


def test_check_every_is_validated_and_must_agree_on_all_ranks():
    with pytest.raises(ValueError, match="check_every must be at least 0, got -1"):
        DistOpt(check_every=-1)
    with pytest.raises(TypeError, match=r"check_every must be an integer, got 1\.5"):
        DistOpt(check_every=1.5)
    with pytest.raises(ValueError, match=r"check_every=0, rank 1 has .*check_every=1"):
        run_ranks(2, lambda comm: laws.train(comm, steps=1, check_every=comm.rank))
