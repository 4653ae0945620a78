"""Options and steps must be the same on all ranks: a difference is an error on all of them that names it."""

import numpy as np
import pytest

from distopt import DistOpt, Parameter, Trainer, run_ranks
from distopt.comm import LocalCommunicator
from distopt.optim import LAMB, LBSGD, SGD, BatchGradients


def pairs(params, value=1.0):
    return [(p, np.full(p.data.shape, value, p.data.dtype)) for p in params]


def two():
    return [Parameter(n, np.zeros(4, np.float32)) for n in "ab"]


def differing(size, main):
    """The text that every rank raises, and what it leaves unchanged."""

    def catch(comm):
        with pytest.raises(ValueError, match="ranks differ") as caught:
            main(comm)
        return str(caught.value)

    (text,) = set(run_ranks(size, catch))
    return text.removeprefix("ranks differ: ")


def assign(name, *values):
    """A change that each rank makes to its optimizer in its own way."""
    return lambda opt, rank: setattr(opt, name, values[rank])


@pytest.mark.parametrize(
    ("make", "change", "text"),
    [
        (SGD, assign("lr_mult", {"a": 0.5}, {"b": 0.5}), "SGD's lr_mult of a=0.5, rank 1 has SGD's lr_mult of b=0.5"),
        (SGD, assign("lr_mult", {"a": 0.5}, {"a": 0.25}), "lr_mult of a=0.5, rank 1 has SGD's lr_mult of a=0.25"),
        (
            SGD,
            lambda opt, r: setattr(opt, ("lr_mult", "wd_mult")[r], {"a": 0.5}),
            "lr_mult of a=0.5, rank 1 has SGD's wd",
        ),
        (SGD, lambda opt, r: opt.lr_mult.update({"ab"[r]: 2.0}), "lr_mult of a=2.0, rank 1 has SGD's lr_mult of b=2.0"),
        (SGD, assign("rescale_grad", -1, -2), "rescale_grad=-1.0, rank 1 has SGD's rescale_grad=-2.0"),
        (SGD, assign("lr", 0.1, 0.1 + 2**-55), "SGD's lr=0.1, rank 1 has SGD's lr=0.10000000000000003"),
        (lambda: SGD(0.1, 0.9), assign("nesterov", True, False), "nesterov=True, rank 1 has SGD's nesterov=False"),
        (lambda: LBSGD(0.1), assign("warmup_strategy", "linear", "sqrt"), "warmup_strategy='linear', rank 1 has"),
        (LAMB, assign("bias_correction", True, False), "bias_correction=True, rank 1 has LAMB's bias_correction=False"),
        (LAMB, lambda opt, r: opt.bounds.update(upper=float(r)), "bounds={'lower': 0.0, 'upper': 0.0}, rank 1 has"),
        (
            lambda: BatchGradients(SGD(), 2),
            assign("num_batches", 2, 3),
            "num_batches=2, rank 1 has BatchGradients's num",
        ),
        (lambda: BatchGradients(SGD(), 2), lambda o, r: setattr(o.opt, "rescale_grad", -1 - r), "rescale_grad=-1.0"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_difference_in_the_optimizer_is_named(make, change, text, steps):
    def main(comm):
        params, opt = two(), DistOpt(make(), comm)
        for _ in range(steps):
            opt(pairs(params))
        before = [p.data.tolist() for p in params]
        change(opt.opt, comm.rank)
        try:
            opt(pairs(params))
        finally:
            assert [p.data.tolist() for p in params] == before

    assert text in differing(2, main)


def test_a_trainer_names_an_option_in_which_ranks_differ():
    def main(comm):
        params = two()
        trainer = Trainer(params, "sgd", communicator=comm)
        trainer.optimizer.wd_mult = {"ab"[comm.rank]: 0.0}
        for p in params:
            p.grad = np.ones(4, np.float32)
        trainer.step(1)

    assert differing(2, main) == "rank 0 has SGD's wd_mult of a=0.0, rank 1 has SGD's wd_mult of b=0.0"


def test_training_goes_on_once_a_differing_option_is_put_right():
    """Also in another mode than the last step's."""

    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0), comm)
        opt(pairs(params))
        opt.opt.lr = 1.0 + comm.rank
        with pytest.raises(ValueError, match=r"rank 0 has SGD's lr=1\.0, rank 1 has SGD's lr=2.0"):
            opt.backward_and_update_half(pairs(params))
        opt.opt.lr = 1.0
        assert opt.backward_and_update_half(pairs(params))
        return [float(p.data[0]) for p in params]

    assert run_ranks(2, main) == [[-2.0, -2.0]] * 2


def test_multipliers_in_another_order_are_the_same():
    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0), comm)
        for name in ("ab", "ba")[comm.rank]:
            opt.opt.lr_mult[name] = 0.5
            opt.opt.wd_mult[name] = 0.25
        for _ in range(2):
            opt(pairs(params))
        return [float(p.data[0]) for p in params]

    assert run_ranks(2, main) == [[-1.0, -1.0]] * 2


# ---------------------------------------------------------------------------------------------------- two models


def test_ranks_that_step_two_equal_optimizers_in_another_order_are_refused():
    def main(comm):
        models = [two(), two()]
        opts = [DistOpt(SGD(1.0), comm) for _ in models]
        for k in (1, 0) if comm.rank else (0, 1):
            opts[k](pairs(models[k], 100.0 * k))

    first, second = (f"DistOpt {k} of those made on this communicator" for k in (1, 2))
    assert differing(2, main) == f"rank 0 has {first}, rank 1 has {second}"


def test_two_optimizers_may_take_their_first_step_in_any_order_common_to_all_ranks():
    def main(comm):
        models = [two(), two()]
        opts = [DistOpt(SGD(1.0), comm) for _ in models]
        for k in (1, 0, 0, 1):
            opts[k](pairs(models[k], k + 1.0))
        return [float(model[0].data[0]) for model in models]

    assert run_ranks(2, main) == [[-2.0, -4.0]] * 2


def test_an_optimizer_refused_at_construction_on_one_rank_does_not_count():
    def main(comm):
        if comm.rank:
            with pytest.raises(ValueError, match="threshold"):
                DistOpt(SGD(1.0), comm, threshold=-1)
        params, opt = two(), DistOpt(SGD(1.0), comm)
        return opt(pairs(params))

    assert run_ranks(2, main) == [True, True]


# ---------------------------------------------------------------------------------------------------- windows


def mixed(opt, kinds, params, value):
    for kind in kinds:
        (opt if kind == "whole" else opt.backward_and_partial_update)(pairs(params, value))


@pytest.mark.parametrize("kinds", [("whole", "partial"), ("partial", "whole")])
def test_a_window_with_sync_on_apply_false_has_steps_of_one_kind(kinds):
    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0), comm, num_batches=2, sync_on_apply=False)
        with pytest.raises(ValueError, match=rf"sync_on_apply=False: .* got a {kinds[1]} one after a {kinds[0]} one"):
            mixed(opt, kinds, params, comm.rank + 1.0)
        assert all((p.data == 0).all() for p in params)
        mixed(opt, kinds[:1], params, comm.rank + 1.0)  # the window is as it was
        mixed(opt, kinds[1:] * 2, params, comm.rank + 1.0)  # the next one may be of the other
        return opt.step_counter

    assert run_ranks(2, main) == [2, 2]


def test_windows_that_are_exchanged_at_their_end_may_mix():
    def main(comm):
        params, opt = two(), DistOpt(SGD(1.0), comm, num_batches=2)
        mixed(opt, ("partial", "whole"), params, comm.rank + 1.0)
        return float(params[0].data[0])

    assert run_ranks(2, main) == [-1.5, -1.5]


def test_the_vote_compares_each_hyper_parameter_once():
    """A vote is as long as the optimizer has hyper-parameters, however many parameters the model has."""
    opt = DistOpt(LAMB(exclude=["b"]), LocalCommunicator())
    opt(pairs(two()))
    said = opt.engine.optimizer.numbers()
    assert len(said) == len(set(said)) == len(LAMB.hypers) + 6
    assert not any("left_out" in text for text in said)
