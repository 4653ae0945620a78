"""The orders of calls that pages of docs/concepts have are those of the code."""

import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pages

import distopt
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Elastic
from distopt.optim import SGD

CONCEPTS = pages.PROJECT / "docs" / "concepts"
PACKAGE = str(Path(distopt.__file__).parent)


def order_of(page):
    """The calls of a page's list, each with those it is made by: ``["DistOpt.run", "Engine.step", "Engine.vote"]``."""
    text = re.search(r"```text\n(.*?)```", (CONCEPTS / page).read_text(), re.DOTALL)[1]
    stack = []
    for line in textwrap.dedent(text).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        stack = [*stack[:depth], line.split()[0]]
        yield list(stack)


def calls_of(step):
    """The calls of distopt's functions on this thread, in order: the names of those that make one, and its own."""
    found, start = [], sys._getframe()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names = []
            while frame is not start:
                names.insert(0, frame.f_code.co_qualname)
                frame = frame.f_back
            found.append(names)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def stands_in(names, call):
    """Whether a call is the last of these names, and the others made it, in this order, whatever is between them."""
    above = iter(call)
    return call[-1] == names[-1] and all(name in above for name in names)


def check_order(expected, calls):
    """Every expected call is made, after the one before it."""
    rest = iter(calls)
    for names in expected:
        assert any(stands_in(names, call) for call in rest), f"{' > '.join(names)} is not called, or earlier"


def test_a_step_has_the_order_of_its_page():
    def train(comm):
        params = [Parameter(f"p{k}", np.ones(30, np.float32)) for k in range(3)]
        opt = DistOpt(SGD(0.1), comm)
        opt.step([(p, p.data * comm.rank) for p in params])
        return calls_of(lambda: opt.step([(p, p.data * comm.rank) for p in params]))

    for calls in run_ranks(2, train):
        check_order(order_of("step.md"), calls)


def test_a_loss_has_the_order_of_its_page():
    def train(comm):
        me, comm = comm.rank, Elastic(comm)
        params = [Parameter(f"p{k}", np.ones(30, np.float32)) for k in range(3)]
        opt = DistOpt(SGD(0.1), comm)
        opt.step([(p, p.data * me) for p in params])
        # rank 1 returns, and thereby leaves
        return calls_of(lambda: opt.step([(p, p.data * me) for p in params])) if me != 1 else []

    first, _, last = run_ranks(3, train)
    for calls in first, last:
        check_order(order_of("loss.md"), calls)
