"""What scripts for SINGA's optimizers write."""

import numpy as np
import pytest

from distopt import DistOpt, Parameter
from distopt.comm import LocalCommunicator
from distopt.optim import LBSGD, SGD, AdaGrad, Adam, ExponentialDecay, Muon, RMSProp

MAKE = {
    "SGD": lambda: SGD(ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
    "RMSProp": lambda: RMSProp(0.1),
    "AdaGrad": lambda: AdaGrad(0.1),
    "Adam": lambda: Adam(0.1),
}


def stepped(opt, steps, p=None):
    p = p or Parameter("p", np.full((2, 3), 0.1))
    for step in range(steps):
        opt.apply(p.name, p.data, np.random.default_rng(step).standard_normal((2, 3)))
        opt.step()
    return p


@pytest.mark.parametrize("name", MAKE)
def test_states_may_be_a_counter_alone(name):
    """As get_states of SINGA's base class has them: buffers stay, and schedules go on from there."""
    opt, same = MAKE[name](), MAKE[name]()
    p, q = stepped(opt, 3), stepped(same, 3)
    opt.set_states({"step_counter": 5})
    same.step_counter = 5
    assert opt.step_counter == 5
    assert opt.lr_value == same.lr_value
    stepped(opt, 2, p)
    stepped(same, 2, q)
    np.testing.assert_array_equal(p.data, q.data)


@pytest.mark.parametrize("name", MAKE)
def test_states_without_the_rule_are_taken_whole(name):
    opt, again = MAKE[name](), MAKE[name]()
    p = stepped(opt, 3)
    states = opt.get_states()
    del states["rule"]
    again.set_states(states)
    q = Parameter("p", p.data.copy())
    stepped(opt, 2, p)
    stepped(again, 2, q)
    np.testing.assert_array_equal(p.data, q.data)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (MAKE["SGD"], {"moments": {}}),
        (MAKE["SGD"], {"step_counter": 5, "history": {}}),
        (MAKE["SGD"], {"rule": "SGD", "step_counter": 5}),  # of get_states, with a part of it lost
        (MAKE["SGD"], {"step_counter": -1}),
        (Muon, {"step_counter": 5}),
        (lambda: LBSGD(batch_scale=2), {"step_counter": 5, "batches": 2}),
    ],
)
def test_other_states_are_refused_and_nothing_changes(make, states):
    opt = make()
    with pytest.raises(ValueError, match=r"must be|must have"):
        opt.set_states(states)
    assert opt.step_counter == 0


def test_a_window_of_lbsgd_stays_where_it_was():
    opt = LBSGD(batch_scale=2)
    opt.set_states({"step_counter": 5})
    assert (opt.step_counter, opt.batches) == (5, 0)


def test_update_is_another_name_of_apply():
    p, q = Parameter("p", np.zeros(3)), Parameter("p", np.zeros(3))
    one, other = SGD(0.1, 0.9), SGD(0.1, 0.9)
    for _ in range(2):
        one.update(p, np.ones(3))
        one.step()
        other.apply("p", q.data, np.ones(3))
        other.step()
    np.testing.assert_array_equal(p.data, q.data)
    opt = DistOpt(one, LocalCommunicator())
    opt([(p, np.ones(3))])  # a whole bucket in one kernel call, as before
    other([(q, np.ones(3))])
    np.testing.assert_array_equal(p.data, q.data)
