"""Transformations of optax in DistOpt: one tree of all parameters; the references are numpy's, in float64."""

import numpy as np
import pytest

optax = pytest.importorskip("optax", reason="optax is missing: pip install optax")
import jax  # noqa: E402

from distopt import DistOpt, LocalSteps, Parameter, run_ranks  # noqa: E402
from distopt.compress import ErrorFeedback, Int8, TopK  # noqa: E402
from distopt.optim import SGD, BatchGradients  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = {"w": (5, 4), "b": (4,), "scale": ()}
RATES = np.linspace(0.1, 0.01, 11)


def chain():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, 10)))


TRANSFORMATIONS = {
    "clipped AdamW": chain,
    "SGD with momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "looks ahead": lambda: optax.contrib.schedule_free_sgd(0.1),
    "every second step": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 10)),
    "Adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "by label": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.1), "rest": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: "matrix" if np.ndim(x) > 1 else "rest", params),
    ),
}


def parameters(rank, dtype=np.float32):
    """Other ones on each rank: rank 0's are sent to all."""
    rng = np.random.default_rng(rank)
    return [Parameter(name, np.array(rng.standard_normal(shape), dtype)) for name, shape in SHAPES.items()]


def pairs(params, rank, step):
    rng = np.random.default_rng([rank, step])
    return [(p, np.array(3 * rng.standard_normal(p.data.shape), p.data.dtype)) for p in params]


def values(params):
    return b"".join(p.data.tobytes() for p in params)


def adamw(params, ranks, steps, dtype):
    """Adam with decay after clipping by the norm of all, in numpy."""
    w = np.concatenate([p.data.reshape(-1).astype(float) for p in params])
    m = v = np.zeros_like(w)
    for step in range(steps):
        every = [np.concatenate([g.reshape(-1).astype(float) for _, g in pairs(params, r, step)]) for r in range(ranks)]
        g = np.mean(every, axis=0)
        g /= max(1.0, np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        direction = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        w = (w - RATES[step] * (direction + 1e-4 * w)).astype(dtype).astype(float)
    return w


@pytest.mark.parametrize(("dtype", "near"), [(np.float32, 1e-5), (np.float64, 1e-8), (np.float16, 4e-3)])
def test_three_ranks_are_one_rank_with_the_whole_batch(dtype, near):
    transformation = chain()  # all ranks have one compiled function of it

    def main(comm):
        params, opt = parameters(comm.rank, dtype), DistOpt(transformation, comm, threshold=4)
        for step in range(6):
            assert opt(pairs(params, comm.rank, step))
        return params

    first, *others = run_ranks(3, main)
    assert {values(params) for params in others} == {values(first)}
    found = np.concatenate([p.data.reshape(-1) for p in first])
    np.testing.assert_allclose(found, adamw(parameters(0, dtype), 3, 6, dtype), rtol=0, atol=near)


WAYS = {
    "dense": lambda opt, loss: opt(loss),
    "top-K": lambda opt, loss: opt.step(loss, ErrorFeedback(TopK(0.25))),
    "int8": lambda opt, loss: opt.step(loss, ErrorFeedback(Int8())),
    "partial": lambda opt, loss: opt.backward_and_partial_update(loss),
    "local steps": lambda opt, loss: opt(loss),
}


@pytest.mark.parametrize(
    ("name", "way"), [(name, "dense") for name in TRANSFORMATIONS] + [("clipped AdamW", way) for way in list(WAYS)[1:]]
)
def test_training_goes_on_to_the_same_bits(name, way, tmp_path):
    transformation = TRANSFORMATIONS[name]()

    def main(comm):
        def made():
            local = way == "local steps"
            opt = LocalSteps(transformation, comm, every=4) if local else DistOpt(transformation, comm)
            return parameters(comm.rank), opt

        def train(params, opt, steps):
            for step in steps:
                WAYS[way](opt, pairs(params, comm.rank, step))

        whole, opt = made()
        train(whole, opt, range(8))
        params, opt = made()
        train(params, opt, range(3))
        opt.save(tmp_path, params)
        params, opt = made()
        opt.load(tmp_path, params)
        train(params, opt, range(3, 8))
        assert values(params) == values(whole)
        return values(whole)

    ranks = run_ranks(2, main)
    assert way == "partial" or ranks[0] == ranks[1]
    assert ranks[0] != values(parameters(0))


def test_steps_by_hand_are_those_of_a_loss():
    hand, whole = parameters(0), parameters(0)
    by_hand, opt = DistOpt(chain()), DistOpt(chain())
    for step in range(3):
        for p, g in pairs(hand, 0, step):
            by_hand.update(p, g)
            g[...] = np.nan  # it is the caller's again
        assert by_hand.step()
        opt(pairs(whole, 0, step))
    assert values(hand) == values(whole)


def test_a_parameter_without_a_gradient_has_one_of_zeros():
    params, opt = parameters(0), DistOpt(optax.sgd(1.0, momentum=0.5), allow_missing=True)
    before = params[0].data.copy()
    opt([(p, np.ones_like(p.data)) for p in params])
    opt([(p, np.ones_like(p.data)) for p in params[1:]])
    np.testing.assert_allclose(params[0].data, before - 1.5, rtol=1e-6)


def test_states_of_others_are_refused_before_anything_moves(tmp_path):
    params, opt = parameters(0), DistOpt(chain())
    opt(pairs(params, 0, 0))
    opt.save(tmp_path, params)
    before = values(params)
    text = r"the optimizer's state must be one of this transformation and these parameters, with .* of shape"
    fresh = DistOpt(optax.sgd(0.1, momentum=0.9))
    fresh.load(tmp_path, params)
    with pytest.raises(ValueError, match=text):
        fresh(pairs(params, 0, 1))
    state = opt.state_dict()
    used = DistOpt(optax.sgd(0.1, momentum=0.9))
    used(pairs(parameters(0), 0, 0))
    with pytest.raises(ValueError, match=text):
        used.load_state_dict(state)
    assert values(params) == before


def test_what_asks_for_the_loss_too_is_refused_before_anything_moves():
    params, opt = parameters(0), DistOpt(optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()))
    before = values(params)
    for _ in range(2):  # nothing has failed halfway
        with pytest.raises(TypeError, match=r"missing .* 'value'"):
            opt(pairs(params, 0, 0))
    assert values(params) == before


def test_a_wrapper_of_distopt_takes_none():
    with pytest.raises(TypeError, match=r"got the optax transformation .*; give it to DistOpt itself"):
        BatchGradients(optax.adam(0.1), 2)


def test_it_is_the_outer_optimizer_of_local_steps_too():
    def main(comm, outer):
        params = parameters(comm.rank)
        opt = LocalSteps(SGD(0.1), comm, every=2, outer=outer)
        for step in range(4):
            opt(pairs(params, comm.rank, step))
        return np.concatenate([p.data.reshape(-1) for p in params])

    nesterov = {"momentum": 0.9, "nesterov": True}
    with_optax = run_ranks(2, lambda comm: main(comm, optax.sgd(0.7, **nesterov)))
    np.testing.assert_array_equal(*with_optax)
    np.testing.assert_allclose(with_optax, run_ranks(2, lambda comm: main(comm, SGD(0.7, **nesterov))), atol=1e-5)
