"""Pairs of a loss are recognised by the objects that they hold."""

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import DistOpt, Parameter
from distopt.comm import LocalCommunicator
from distopt.kernels.pairs import PairMatcher
from distopt.optim import SGD

Pair = namedtuple("Pair", "param grad")
FORMS = {"tuple": tuple, "list": list, "a tuple's subclass": lambda pair: Pair(*pair)}


def model(count):
    return [Parameter(f"p{k}", np.zeros(k + 1)) for k in range(count)]


@pytest.mark.parametrize("form", FORMS)
@given(count=st.integers(1, 50), data=st.data())
def test_gradient_ids_are_those_of_the_gradients_of_the_pairs(form, count, data):
    params = model(count)
    matcher = PairMatcher(params, [p.data for p in params])
    grads = [data.draw(st.sampled_from([np.ones(p.data.shape), None, "text"])) for p in params]
    ids = matcher.gradient_ids([FORMS[form](pair) for pair in zip(params, grads, strict=True)])
    assert ids.tolist() == [id(g) for g in grads]


@given(count=st.integers(1, 50), data=st.data())
def test_pairs_with_one_other_parameter_or_array_are_not_matched(count, data):
    params = model(count)
    matcher, grads = PairMatcher(params, [p.data for p in params]), [np.ones(p.data.shape) for p in params]
    pairs, k = list(zip(params, grads, strict=True)), data.draw(st.integers(0, count - 1))
    expected, other = params[k], Parameter(params[k].name, params[k].data)
    for flaw in ((other, grads[k]), (expected, grads[k], 1), (expected,), None, expected, "ab", [other, grads[k]]):
        assert matcher.gradient_ids([*pairs[:k], flaw, *pairs[k + 1 :]]) is None
    assert matcher.gradient_ids(pairs[:k]) is None
    assert matcher.gradient_ids([*pairs, pairs[k]]) is None
    if count > 1:
        assert matcher.gradient_ids([*pairs[1:], pairs[0]]) is None
    expected.data = expected.data.copy()
    assert matcher.gradient_ids(pairs) is None


def test_an_equal_array_of_one_element_is_not_matched():
    """Although ``==`` of two lists would call them equal."""
    params = [Parameter("a", np.zeros(1)), Parameter("b", np.zeros(1))]
    matcher, pairs = PairMatcher(params, [p.data for p in params]), [(p, np.ones(1)) for p in params]
    assert matcher.gradient_ids(pairs) is not None
    params[1].data = np.zeros(1)
    assert matcher.gradient_ids(pairs) is None


def test_a_bare_array_is_matched_by_identity():
    x, g = np.zeros(3), np.ones(3)
    matcher = PairMatcher([x], [x])
    assert matcher.gradient_ids([(x, g)]).tolist() == [id(g)]
    assert matcher.gradient_ids([(x.copy(), g)]) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", [1, -1])
def test_known_pairs_are_not_read_parameter_by_parameter_again(form, order, monkeypatch):
    """In the order of the plan or in another, with new gradients or old ones; what is applied is the same."""
    params, opt = model(5), DistOpt(SGD(1.0), LocalCommunicator())
    sets = [[np.full(p.data.shape, k + 1.0) for p in params] for k in range(2)]
    steps = [list(map(FORMS[form], zip(params, grads, strict=True))) for grads in sets]
    opt(steps[0])
    opt(steps[0][::order])
    monkeypatch.setattr(opt.engine.store.collector, "_read", None)
    for k in (0, 1, 1, 0):
        opt(steps[k][::order])
    for p in params:
        np.testing.assert_array_equal(p.data, np.full(p.data.shape, -(1.0 + 1 + 1 + 2 + 2 + 1)))
