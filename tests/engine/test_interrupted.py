"""After a step that ended halfway, by an error or by Ctrl-C, training needs a checkpoint."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from distopt import DistOpt, Parameter, Trainer, device, simulate
from distopt.compress import ErrorFeedback, TopK
from distopt.optim import SGD


def pairs(params, value=1.0):
    return [(p, np.full(p.data.shape, value, p.data.dtype)) for p in params]


def two():
    return [Parameter(n, np.zeros(4, np.float32)) for n in "ab"]


class Interrupted:
    """A stranger whose second update is interrupted, before or after the parameter's change, or in ``step``."""

    def __init__(self, error, where):
        self.error, self.where, self.applied = error, where, 0

    def apply(self, name, value, grad):
        self.applied += 1
        if self.applied == 2 and self.where == "before":
            raise self.error
        value -= grad
        if self.applied == 2 and self.where == "behind":
            raise self.error

    def step(self):
        if self.where == "step" and self.applied == 2:
            raise self.error

    def state_dict(self):
        return {"applied": self.applied}

    def load_state_dict(self, state):
        self.where = "nowhere"


@pytest.mark.parametrize("where", ["before", "behind", "step"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), OSError("mood")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("call", ["backward_and_update", "backward_and_partial_update"])
def test_an_update_that_was_interrupted_needs_a_checkpoint(call, error, where):
    params, opt = two(), DistOpt(Interrupted(error, where), overlap=False)
    state = opt.state_dict()
    with pytest.raises(type(error)):
        getattr(opt, call)(pairs(params))
    said = f"the update of step 1 failed halfway with {type(error).__name__}.*; load a checkpoint to go on"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=said):
            getattr(opt, call)(pairs(params))
    opt.load_state_dict(state)
    for p in params:
        p.data[:] = 0
    assert getattr(opt, call)(pairs(params))
    assert [p.data[0] for p in params] == [-1, -1]


@pytest.mark.parametrize("call", ["step", "update"])
def test_a_trainers_update_that_was_interrupted_needs_a_checkpoint(call):
    params = two()
    trainer = Trainer(params, Interrupted(KeyboardInterrupt(), "behind"))

    def step():
        for p in params:
            p.grad = np.ones(4, np.float32)
        if call == "step":
            trainer.step(1)
        else:
            trainer.allreduce_grads()
            trainer.update(1)

    with pytest.raises(KeyboardInterrupt):
        step()
    with pytest.raises(RuntimeError, match="the update of step 1 failed halfway with KeyboardInterrupt; load"):
        step()


def test_an_interrupted_exchange_needs_a_checkpoint():
    """What a sparse step has taken out of its residuals is not in the parameters yet."""

    class Torn(TopK):
        def compress(self, x, state, context, add=None):
            super().compress(x, state, context, add)
            raise KeyboardInterrupt

    params, opt = two(), DistOpt(SGD(1.0))
    with pytest.raises(KeyboardInterrupt):
        opt.step(pairs(params), ErrorFeedback(Torn(0.5)), break_even=False)
    with pytest.raises(RuntimeError, match="failed halfway with KeyboardInterrupt"):
        opt(pairs(params))
    assert [p.data[0] for p in params] == [0, 0]


def test_an_interrupted_window_needs_a_checkpoint(monkeypatch):
    """Its divisor has counted gradients that the sum has not."""
    params, opt = two(), DistOpt(SGD(1.0), num_batches=2)
    opt(pairs(params))

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(opt.engine.accumulator, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opt(pairs(params))
    with pytest.raises(RuntimeError, match="failed halfway"):
        opt(pairs(params))


def test_an_interrupted_load_needs_a_checkpoint():
    class Slow(Interrupted):
        def load_state_dict(self, state):
            if state["applied"]:
                raise KeyboardInterrupt
            raise ValueError("no such state")

    params, opt = two(), DistOpt(Slow(None, "nowhere"))
    nothing = opt.state_dict()
    assert opt(pairs(params))
    state = opt.state_dict()
    with pytest.raises(ValueError, match="no such state"):
        opt.load_state_dict(nothing)
    assert opt(pairs(params))
    with pytest.raises(KeyboardInterrupt):
        opt.load_state_dict(state)
    with pytest.raises(RuntimeError, match="loading a state ended halfway; load a checkpoint to go on"):
        opt(pairs(params))


def test_parameters_that_were_loaded_in_part_need_a_checkpoint(tmp_path, monkeypatch):
    params, opt = two(), DistOpt(SGD(1.0))
    opt(pairs(params))
    opt.save(tmp_path, params)
    copy, copied = device.copy, []

    def interrupted(to, source):
        copied.append(to)
        if len(copied) == 2:
            raise KeyboardInterrupt
        copy(to, source)

    with monkeypatch.context() as patched:
        patched.setattr("distopt.engine.checkpointer.device.copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opt.load(tmp_path, params)
    with pytest.raises(RuntimeError, match="ended halfway"):
        opt(pairs(params))
    opt.load(tmp_path, params)
    assert opt(pairs(params))


def test_an_interrupted_simulation_cannot_go_on():
    params, sim = two(), simulate(2, Interrupted(KeyboardInterrupt(), "before"))
    with pytest.raises(KeyboardInterrupt):
        sim(lambda rank: pairs(params))
    with pytest.raises(RuntimeError, match="the update of step 1 failed halfway with KeyboardInterrupt; start anew"):
        sim(lambda rank: pairs(params))


def test_what_ends_before_the_vote_leaves_a_step_that_can_be_made_again():
    params, opt = two(), DistOpt(SGD(1.0))

    def loss():
        yield params[0], np.ones(4, np.float32)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            opt(loss())
    assert opt(pairs(params))
    assert [p.data[0] for p in params] == [-1, -1]


def test_a_refused_step_needs_no_checkpoint():
    params, opt = two(), DistOpt(SGD(1.0))
    with pytest.raises(FloatingPointError):
        opt(pairs(params, np.nan))
    assert opt(pairs(params))


def test_a_step_is_complete_when_its_callback_is_interrupted():
    params, opt = two(), DistOpt(SGD(1.0))

    def interrupted(step, numbers):
        raise KeyboardInterrupt

    opt.observe(interrupted, every=1)
    with pytest.raises(KeyboardInterrupt):
        opt(pairs(params))
    opt.observe(every=0)
    assert opt(pairs(params))
    assert opt.step_counter == 2
    assert params[0].data[0] == -2


SCRIPT = """
import numpy as np, os, distopt
from signal import SIGINT

class Slow:
    def apply(self, name, value, grad):
        value -= grad
        if name == "b" and opt.step_counter == 1:
            os.kill(os.getpid(), SIGINT)

params = [distopt.Parameter(n, np.zeros(4)) for n in "abc"]
opt = distopt.DistOpt(Slow(), distopt.comm.LocalCommunicator())
step = lambda: opt([(p, np.ones(4)) for p in params])
step()
try:
    step()
except KeyboardInterrupt:
    print([p.data[0] for p in params] == [-2, -2, -1], opt.step_counter)
try:
    step()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.faults
def test_a_real_ctrl_c_in_an_update_needs_a_checkpoint():
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts with & ignore it
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=os.environ)
    signal.signal(signal.SIGINT, before)
    first, second = done.stdout.splitlines()
    assert first == "True 1"
    assert second.endswith("the update of step 2 failed halfway with KeyboardInterrupt; load a checkpoint to go on")
