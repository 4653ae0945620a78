"""What scripts for SINGA's optimizers write."""

import inspect

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks
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


def backward_and_update(self, loss, threshold, one, fused):
    """The loop of SINGA's ``backward_and_update``, and with ``_half`` of its float16 form, with this library's loss."""
    plist, acc, glist = [], 0, []
    for p, g in loss:
        if g.size > threshold:
            one(g)
        else:
            glist.append(g)
            fused([g], send=False)
            acc += g.size
            if acc > threshold:
                fused(glist)
                acc, glist = 0, []
        plist.append((p, g))
    if glist:
        fused(glist)
    self.wait()
    for p, g in plist:
        self.update(p, g)
    self.opt.step()


def sparse_update(self, loss, threshold, spars, accumulation):
    """The loop of SINGA's ``backward_and_sparse_update``, with its residuals by position."""
    plist, acc, k, glist = [], 0, -1, []

    def residual(size):
        return accumulation.setdefault(k, np.zeros(size, np.float32))

    for p, g in loss:
        if g.size > threshold:
            k += 1
            self.sparsification(g, residual(g.size), spars, True)
        else:
            glist.append(g)
            acc += g.size
            if acc > threshold:
                k += 1
                self.fused_sparsification(glist, residual(acc), spars, True)
                acc, glist = 0, []
        plist.append((p, g))
    if glist:
        k += 1
        self.fused_sparsification(glist, residual(acc), spars, True)
    self.wait()
    for p, g in plist:
        self.update(p, g)
    self.opt.step()


@pytest.mark.parametrize("mode", ["dense", "half", "sparse"])
def test_singas_own_loops_train_as_its_modes_do(mode):
    """All verbs that they call are there, and an update takes the mean."""
    sizes, threshold = (3, 40, 5, 30, 2), 32

    def losses(rank, params, step):
        rng = np.random.default_rng([rank, step])
        return [(p, rng.integers(-8, 8, p.data.size).astype(np.float32)) for p in params]

    def main(comm):
        trained = []
        for by_hand in (True, False):
            opt, kept = DistOpt(SGD(0.5, momentum=0.5), comm), {}
            params = [Parameter(f"p{k}", np.zeros(n, np.float32)) for k, n in enumerate(sizes)]
            for step in range(3):
                loss = losses(comm.rank, params, step)
                if not by_hand:
                    mode_of_step = {"dense": opt.backward_and_update, "half": opt.backward_and_update_half}.get(mode)
                    if mode_of_step:
                        mode_of_step(loss, threshold)
                    else:
                        opt.backward_and_sparse_update(loss, threshold, spars=1.0, topK=True)
                elif mode == "dense":
                    backward_and_update(opt, loss, threshold, opt.all_reduce, opt.fused_all_reduce)
                elif mode == "half":
                    backward_and_update(opt, loss, threshold, opt.all_reduce_half, opt.fused_all_reduce_half)
                else:
                    sparse_update(opt, loss, threshold, 1.0, kept)
            trained.append([p.data for p in params])
        return trained

    for by_hand, by_mode in run_ranks(2, main):
        for x, y in zip(by_hand, by_mode, strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.any()


def test_every_method_of_singas_takes_its_arguments_in_its_order():
    singas = {
        "update": "param grad",
        "fused_all_reduce": "_ send",
        "fused_all_reduce_half": "_ send",
        "sparsification": "_ accumulation spars topK",
        "fused_sparsification": "_ accumulation spars topK",
        "backward_and_update": "loss threshold",
        "backward_and_update_half": "loss threshold clipping clip_Value",
        "backward_and_partial_update": "loss threshold",
        "backward_and_sparse_update": "loss threshold spars topK corr",
    }
    for name, arguments in singas.items():
        ours = list(inspect.signature(getattr(DistOpt, name)).parameters)[1:]
        theirs = arguments.split()
        assert [a for a, b in zip(ours, theirs, strict=False) if b not in ("_", a)] == [], name
        assert len(ours) >= len(theirs)
    assert {"nccl_id", "local_rank", "world_size", "buffSize"} < set(inspect.signature(DistOpt).parameters)
