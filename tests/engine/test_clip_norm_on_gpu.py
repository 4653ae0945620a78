"""Clipping and the gradient hook on a double of a GPU (tests/doubles): the bits of the host."""

import math

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, device, kernels, run_ranks
from distopt.optim import SGD

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
on_gpus = pytest.importorskip("doubles.ranks").on_gpus

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


def halve(means):
    """On whichever side the gradients are."""
    for _, mean in means:
        kernels.scale(mean.reshape(-1), 0.5)


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"gradient_hook": halve}])
@pytest.mark.parametrize("mode", ["dense", "topk", "partial", "dgc"])
def test_clipping_and_hooks_on_a_gpu_have_the_bits_of_the_host(mode, options):
    def main(comm):
        params, opt = laws.train(comm, mode=mode, deterministic=True, **options)
        return laws.digest(params), opt.gradient_norm

    assert on_gpus(2, main) == run_ranks(2, main)


def test_a_step_that_is_not_finite_changes_nothing_and_its_norm_is_not_a_number():
    def main(comm):
        params, opt = laws.train(comm, steps=1, clip_norm=1.0)
        before = laws.digest(params)
        bad = [(p, laws.to_device(comm, [np.full(p.data.shape, np.nan, np.float32)])[0]) for p in params]
        opt(bad)
        assert math.isnan(opt.gradient_norm)
        with pytest.raises(FloatingPointError, match="step 2 are not finite"):
            opt(laws.pairs(comm, params, 1))
        assert laws.digest(params) == before
        opt(laws.pairs(comm, params, 1))
        wanted, other = laws.train(comm, steps=2, clip_norm=1.0)
        return laws.digest(params) == laws.digest(wanted) and opt.gradient_norm == other.gradient_norm

    assert on_gpus(2, main) == [True, True]


def test_a_gradient_hook_gets_arrays_on_the_gpu():
    def main(comm):
        places = []
        p = laws.move_to_device(comm, [Parameter("p", np.zeros(3))])[0]
        opt = DistOpt(SGD(1.0), comm, gradient_hook=lambda means: places.extend(device.on_gpu(m) for _, m in means))
        opt([(p, laws.to_device(comm, [np.ones(3)])[0])])
        return places

    assert on_gpus(2, main) == [[True], [True]]
