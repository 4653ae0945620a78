"""What scripts for Gluon's Trainer write: multipliers of parameters, kvstores by name, rates beside schedules."""

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, Trainer, optim, run_ranks
from distopt.comm import LocalCommunicator
from distopt.optim import (
    LANS,
    LARS,
    LBSGD,
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    BatchGradients,
    Factor,
    LarsWrapper,
    MultiFactor,
    Muon,
    Poly,
    Signum,
)

OPTIMIZERS = {
    "SGD": lambda **o: SGD(0.1, 0.9, weight_decay=0.05, **o),
    "Adam": lambda **o: Adam(0.1, weight_decay=0.05, **o),
    "AdamW": lambda **o: AdamW(0.1, weight_decay=0.05, **o),
    "RMSProp": lambda **o: optim.RMSProp(0.1, weight_decay=0.05, **o),
    "AdaGrad": lambda **o: AdaGrad(0.1, weight_decay=0.05, **o),
    "Signum": lambda **o: Signum(0.1, weight_decay=0.05, **o),
    "LARS": lambda **o: LARS(0.1, weight_decay=0.05, **o),
    "LAMB": lambda **o: optim.LAMB(0.1, weight_decay=0.05, **o),
    "LANS": lambda **o: LANS(0.1, weight_decay=0.05, **o),
    "LBSGD": lambda **o: LBSGD(0.1, weight_decay=0.05, **o),
    "Muon": lambda **o: Muon(0.1, weight_decay=0.05, exclude=["b"], **o),
    "LarsWrapper": lambda **o: LarsWrapper(SGD(0.1, 0.9, **o)),
    "BatchGradients": lambda **o: BatchGradients(AdamW(0.1, weight_decay=0.05, **o), 2),
}


def two():
    rng = np.random.default_rng(0)
    return [Parameter(name, rng.standard_normal((3, 4))) for name in "ab"]


def gradients(step):
    return np.random.default_rng(step).standard_normal((2, 3, 4))


def by_dist_opt(opt, params, step, done=lambda: None):
    opt(list(zip(params, gradients(step), strict=True)))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("threshold", [0, 100])
def test_every_optimizer_takes_multipliers_of_parameters_as_by_name(name, threshold):
    """To the bit those that the optimizer has by name; they change at step 2, and one is taken away at step 4."""

    def trained(of_parameters):
        params = two()
        rule = OPTIMIZERS[name](lr_mult={"a": 0.5}, wd_mult={"b": 3.0})
        inner = rule if isinstance(rule, optim.Optimizer) else rule.opt
        opt = DistOpt(rule, LocalCommunicator(), threshold=threshold)
        for step in range(6):
            if step == 2 and of_parameters:
                params[0].lr_mult, params[1].lr_mult, params[1].wd_mult = 0.25, 0, 2.0
            elif step == 2:
                inner.lr_mult, inner.wd_mult = {"a": 0.25, "b": 0.0}, {"b": 2.0}
            if step == 4 and of_parameters:
                params[0].lr_mult = params[1].lr_mult = params[1].wd_mult = 1
            elif step == 4:
                inner.lr_mult, inner.wd_mult = {"a": 0.5}, {"b": 3.0}
            by_dist_opt(opt, params, step)
        return [p.data for p in params]

    np.testing.assert_array_equal(trained(True), trained(False))


def test_a_trainers_rate_is_multiplied_from_the_next_step_on():
    """SGD with momentum, by hand; on two ranks, in one call and in two."""

    def main(comm):
        found = []
        for split in (False, True):
            x = Parameter("x", np.zeros(4), lr_mult=2.0)
            trainer = Trainer([x], "sgd", {"learning_rate": 1.0, "momentum": 0.5, "wd": 0.25}, communicator=comm)
            for lr_mult, wd_mult in ((2.0, 1.0), (0.5, 1.0), (0.5, 0.0)):
                x.lr_mult, x.wd_mult = lr_mult, wd_mult
                x.grad = np.ones(4)
                if split:
                    trainer.allreduce_grads()
                    trainer.update(2)
                else:
                    trainer.step(2)
            found.append(x.data[0])
        return found

    value = buffer = 0.0
    for lr_mult, wd_mult in ((2.0, 1.0), (0.5, 1.0), (0.5, 0.0)):
        buffer = 0.5 * buffer + 1.0 + 0.25 * wd_mult * value
        value -= lr_mult * buffer
    assert run_ranks(2, main) == [[pytest.approx(value)] * 2] * 2


class Duck:
    def __init__(self, name, data, **attributes):
        self.name, self.data = name, data
        vars(self).update(attributes)


@pytest.mark.parametrize("way", ["a step", "by hand", "without DistOpt", "one parameter"])
def test_any_object_may_have_multipliers(way):
    params = [Duck("a", np.zeros(2), lr_mult=0.5), Duck("b", np.zeros(2)), Duck("c", np.zeros(2), lr_mult=0.5)]
    rule = SGD(1.0, lr_mult={"b": 0.25, "c": 8.0})
    opt = DistOpt(rule, LocalCommunicator())
    pairs = [(p, np.ones(2)) for p in params]
    if way == "a step":
        opt(pairs)
    elif way == "without DistOpt":
        rule(pairs)
    else:
        for pair in pairs:
            (opt if way == "by hand" else rule).update(*pair)
    assert [p.data[0] for p in params] == [-0.5, -0.25, -0.5]


def test_ranks_with_other_multipliers_are_told():
    """At the first step, too, and in a step that sums first."""

    def main(comm, when, field):
        x = Parameter("x", np.zeros(4))
        trainer = Trainer([x], "sgd", communicator=comm)
        for step in range(3):
            if step == when and comm.rank == 1:
                setattr(x, field, 0.5)
            x.grad = np.ones(4)
            if when == 1:
                trainer.allreduce_grads()
                trainer.update(2)
            else:
                trainer.step(2)

    for when in range(3):
        for field in ("lr_mult", "wd_mult"):
            text = laws.texts_of(2, lambda comm, when=when, field=field: main(comm, when, field), ValueError)
            assert text.startswith("ranks differ: rank 0 has ")
            assert f"rank 1 has SGD's {field} of x=0.5" in text


def test_a_multiplier_that_is_none_is_refused_by_name():
    def main(comm, value):
        x = Parameter("x", np.zeros(4))
        x.lr_mult = value if comm.rank == 1 else 1.0
        DistOpt(SGD(1.0), comm)([(x, np.ones(4))])

    for value, kind in ((-1.0, ValueError), ("2", TypeError)):
        assert "lr_mult of x must be" in laws.texts_of(2, lambda comm, value=value: main(comm, value), kind)


@pytest.mark.parametrize("kvstore", [None, *"local device dist dist_sync dist_device_sync horovod byteps".split()])
def test_kvstores_of_synchronous_sums_mean_all_ranks(kvstore):
    def main(comm):
        x = Parameter("x", np.zeros(2))
        trainer = Trainer([x], "sgd", {"learning_rate": 1.0}, kvstore, update_on_kvstore=False, communicator=comm)
        x.grad = np.full(2, 1.0 + comm.rank)
        trainer.step(1)
        return x.data[0]

    assert run_ranks(2, main) == [-3.0, -3.0]


SCHEDULES = {
    "MultiFactor": (lambda: MultiFactor(0.01, step=[2, 4], factor=0.5), [0.8, 0.8, 0.4, 0.4, 0.2]),
    "Factor": (lambda: Factor(0.01, step=2, factor=0.5), [0.8, 0.8, 0.4, 0.4, 0.2]),
    "Poly": (lambda: Poly(0.01, max_update=4, pwr=1), [0.8, 0.6, 0.4, 0.2, 0.0]),
    "warm-up": (lambda: MultiFactor(0.01, step=[4], factor=0.5, warmup_steps=2), [0.0, 0.4, 0.8, 0.8, 0.4]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_learning_rate_beside_a_schedule_is_its_base(name):
    make, rates = SCHEDULES[name]
    x = Parameter("x", np.zeros(1))
    options = {"learning_rate": 0.8, "lr_scheduler": make(), "wd": 0.0, "multi_precision": True, "momentum": 0.0}
    trainer = Trainer([x], "sgd", options, communicator=LocalCommunicator())
    for rate in rates:
        assert trainer.learning_rate == pytest.approx(rate)
        before = x.data[0]
        x.grad = np.ones(1)
        trainer.step(1)
        assert before - x.data[0] == pytest.approx(rate)


def test_a_base_is_checked_and_none_leaves_the_schedules_own():
    x = Parameter("x", np.zeros(1))
    for rate, schedule in ((None, Factor(0.3, 1, 0.5)), (0.3, None)):
        trainer = Trainer([x], "sgd", {"learning_rate": rate, "lr_scheduler": schedule})
        assert trainer.learning_rate == pytest.approx(0.3)
    for rate in (-1.0, 0.1):  # below the beginning of the warm-up
        with pytest.raises(ValueError, match=r"learning_rate must be .*0\.2"):
            Trainer([x], "sgd", {"learning_rate": rate, "lr_scheduler": Poly(1.0, 9, warmup_begin_lr=0.2)})
    with pytest.raises(TypeError, match="learning_rate must be a number"):
        Trainer([x], "sgd", {"learning_rate": "1", "lr_scheduler": Poly(1.0, 9)})


def test_how_mxnet_calls_its_kernels_changes_nothing():
    results = []
    for more in ({}, {"aggregate_num": 4, "use_fused_step": False}):
        x = Parameter("x", np.ones(3))
        trainer = Trainer([x], "lans", {"learning_rate": 0.1, "beta1": 0.9, "lower_bound": 0.5, **more})
        x.grad = np.arange(3.0)
        trainer.step(1)
        results.append(x.data)
    np.testing.assert_array_equal(*results)
