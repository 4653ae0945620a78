"""Custom optimizers: which are accepted, and the errors of those that would train nothing."""

import warnings

import numpy as np
import pytest

from distopt import DistOpt, Parameter, Trainer
from distopt.optim import SGD, Adam, AdamW, BatchGradients, LarsWrapper, RMSProp
from distopt.optim.adapters import ParamAdapter, SingaAdapter, adapt
from distopt.optim.foreign import call_style


def two(dtype=np.float32):
    return [Parameter(n, np.zeros(4, dtype)) for n in "ab"]


def pairs(params, value=1.0):
    return [(p, np.full(p.data.shape, value, p.data.dtype)) for p in params]


class Given:
    """An object with these methods."""

    def __init__(self, **methods):
        self.__dict__.update(methods)


@pytest.mark.parametrize("wrap", [DistOpt, lambda o: BatchGradients(o, 2), LarsWrapper, lambda o: Trainer(two(), o)])
@pytest.mark.parametrize(
    ("opt", "text"),
    [
        ({"lr": 0.1}, r"got a dict; its entries are arguments, as in SGD\(\*\*options\)"),
        (Given(apply=lambda value, grad: None), r"got Given: .*, whose apply is apply\(value, grad\)"),
        (Given(update=lambda grads, state, params: None), r"whose update is update\(grads, state, params\)"),
        (Given(apply=lambda: None, update=lambda p: None), r"apply is apply\(\), whose update is update\(p\)"),
        (Given(apply=lambda name, value, grad, *, more: None), r"whose apply is apply\(name, value, grad, \*, more\)"),
    ],
)
def test_an_object_without_apply_or_update_is_refused_at_construction(wrap, opt, text):
    with pytest.raises(TypeError, match=text) as caught:
        wrap(opt)
    assert "opt must be an object with apply(name, value, grad) or update(param, grad), got" in str(caught.value)


@pytest.mark.parametrize(
    ("opt", "found"),
    [
        (Given(apply=lambda name, value, grad: None), "apply"),
        (Given(apply=lambda *given: None), "apply"),
        (Given(apply=lambda name, value, grad, more=1: None), "apply"),
        (Given(apply=lambda params: None, update=lambda param, grad: None), "update"),
        (Given(update=max), "update"),
        (Given(update=np.add), "update"),
    ],
)
def test_apply_and_update_methods_of_custom_optimizers_are_recognised(opt, found):
    assert call_style(opt) == found
    assert type(adapt(opt)) is {"apply": SingaAdapter, "update": ParamAdapter}[found]


# ---------------------------------------------------------------------------------------------------- what it does


class Functional:
    def apply(self, name, value, grad):
        return value - 0.5 * grad

    def update(self, param, grad):
        return param.data - 0.5 * grad


@pytest.mark.parametrize("opt", [Functional(), Given(update=Functional().update)], ids=["apply", "update"])
def test_an_optimizer_that_returns_new_values_is_refused(opt):
    params = two()
    with pytest.raises(TypeError, match=r"a: .* must change the parameter's array in place, .*value\[...\] = new"):
        DistOpt(opt)(pairs(params))
    by_hand = DistOpt(opt)
    with pytest.raises(TypeError, match=r"b: .* must change the parameter's array in place"):
        by_hand.update(params[1], np.ones(4, np.float32))


def in_place(value, grad):
    value -= 0.5 * grad
    return value


def in_place_and_the_change(value, grad):
    value -= 0.5 * grad
    return 0.5 * grad


def in_place_and_a_copy(value, grad):
    value -= 0.5 * grad
    return value.copy()


@pytest.mark.parametrize("rule", [in_place, in_place_and_the_change, in_place_and_a_copy])
@pytest.mark.parametrize("value", [1.0, 0.0])
def test_what_an_optimizer_returns_does_not_matter_if_it_updates(rule, value):
    params, opt = two(), DistOpt(Given(apply=lambda name, value, grad: rule(value, grad)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            opt(pairs(params, value))
    assert [p.data[0] for p in params] == [-value] * 2


def test_an_optimizer_that_changes_nothing_is_noticed_once():
    params, opt = two(), DistOpt(Given(apply=lambda name, value, grad: None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt(pairs(params, 0.0))  # nothing can be said of that
    with pytest.warns(RuntimeWarning, match="Given has changed no parameter in its first update.*must change arrays"):
        opt(pairs(params))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt(pairs(params))


class Rebinds:
    """It makes a new array, and says so."""

    def update(self, param, grad):
        param.data = param.data - grad


class InItsStep:
    """It updates after the last gradient, as a wrapper of torch's does."""

    def __init__(self):
        self.grads = []

    def apply(self, name, value, grad):
        self.grads.append((value, grad))

    def step(self):
        for value, grad in self.grads:
            value -= grad
        self.grads = []


@pytest.mark.parametrize("opt", [Rebinds(), InItsStep(), SGD(0.0), BatchGradients(SGD(), 3)], ids=type)
def test_an_optimizer_that_updates_later_or_rebinds_its_arrays_raises_no_warning(opt):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DistOpt(opt)(pairs(two()))


def test_step_without_a_loss_needs_an_update_by_hand_since_the_last_step():
    params, opt = two(), DistOpt(SGD(1.0))
    text = r"nothing was updated since the last one: opt\(loss\) or opt.step\(loss\) is a whole step"
    with pytest.raises(RuntimeError, match=text):
        opt.step()
    for _ in range(2):
        for p, g in pairs(params):
            opt.all_reduce(g)
            opt.update(p, g)
        assert opt.step()
        with pytest.raises(RuntimeError, match=text):
            opt.step()
    opt(pairs(params))
    with pytest.raises(RuntimeError, match=text):
        opt.step()
    assert opt.step_counter == 3
    assert [p.data[0] for p in params] == [-3, -3]


# ---------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Adam(0.1, betas=(0.9, 0.99)), r"got betas=\(0.9, 0.99\); write beta_1=0.9, beta_2=0.99"),
        (lambda: AdamW(0.1, eps=1e-7), "AdamW takes .* got eps=1e-07; write epsilon=1e-07"),
        (lambda: AdamW(learning_rate=0.1), "write lr=0.1"),
        (lambda: SGD(0.1, wd=0.01), "SGD takes .* got wd=0.01; write weight_decay=0.01"),
        (lambda: RMSProp(0.1, alpha=0.9), "write rho=0.9"),
        (lambda: SGD(0.1, momentun=0.9), r"got momentun=0.9; did you mean momentum\?"),
        (lambda: SGD(0.1, betas=(0.9, 0.99)), r"SGD takes lr, .*, wd_mult, got betas=\(0.9, 0.99\)$"),
        (lambda: Adam(0.1, betas=3), "Adam takes lr, .*, wd_mult, got betas=3"),
    ],
)
def test_options_of_other_libraries_are_translated_in_the_error(make, text):
    with pytest.raises(TypeError, match=text):
        make()
