"""exchange="measure": each exchange that trains the same is tried, and the fastest is kept."""

import collections
import logging
import threading
import types

import numpy as np
import pytest

import laws
from distopt import DistOpt, Parameter, run_ranks
from distopt.compress import Dense, ErrorFeedback, Half, Int8, OneBit, TopK
from distopt.engine import measured as measured_module
from distopt.engine.measured import STEPS, MeasuredExchanges
from distopt.engine.reducers import NodeReducer, TwoPhaseReducer
from distopt.optim import SGD

SHAPE = (300, 300)


def trainer(comm, hosts=(0, 0, 1, 1), **options):
    """What makes a step with a compressor, and returns the last line of the plan; and its optimizer."""
    comm._hosts = hosts
    params = [Parameter(f"w{k}", np.zeros(SHAPE, np.float32)) for k in range(2)]
    opt = DistOpt(SGD(0.1), comm, threshold=SHAPE[0] ** 2, **options)

    def step(compressor, exchange="measure"):
        rng = np.random.default_rng(10 * comm.rank + opt.step_counter)
        opt.step([(p, rng.standard_normal(SHAPE, np.float32)) for p in params], compressor, exchange=exchange)
        return str(opt.plan).splitlines()[-1]

    return step, opt, params


class Clocks:
    """A clock for each rank, that stands unless a test moves it: what is measured is the test's, on any machine."""

    def __init__(self, monkeypatch):
        self.seconds = collections.Counter()
        self._here = threading.local()
        monkeypatch.setattr(measured_module, "time", types.SimpleNamespace(perf_counter=self._now))

    def of_rank(self, main):
        def here(comm):
            self._here.rank = comm.rank
            return main(comm)

        return here

    def _now(self):
        return self.seconds[self._here.rank]


@pytest.fixture
def clocks(monkeypatch):
    return Clocks(monkeypatch)


TRIED = [  # compressor, what a step may be, 'auto' first
    (Dense(), ["", "2 nodes"]),
    (Half(), ["2 nodes", ""]),
    (ErrorFeedback(Int8()), ["2 nodes", "gather", "two-phase"]),
    (ErrorFeedback(TopK(0.1)), ["two-phase", "gather"]),
    (ErrorFeedback(OneBit()), ["two-phase", "gather"]),
]


@pytest.mark.parametrize(("compressor", "kinds"), TRIED, ids=lambda x: repr(x) if hasattr(x, "traits") else "")
def test_exchanges_that_train_the_same_take_turns(compressor, kinds):
    def main(comm):
        step, opt, _ = trainer(comm)
        step(Dense(), "auto")  # the plan is not known before
        lines = [step(compressor) for _ in range(STEPS * len(kinds))]
        for number, kind in enumerate(kinds):
            for line in lines[STEPS * number : STEPS * (number + 1)]:
                assert line.startswith(f"exchange: {kind}") if kind else "exchange" not in line, (kind, lines)
        after = {step(compressor) for _ in range(4)}
        assert len(after) == 1
        return after, opt.state_dict()["measured"]

    assert all(found == ranks[0] for ranks in [run_ranks(4, main)] for found in ranks)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_fastest_for_the_slowest_rank_is_kept(rank, clocks, monkeypatch, caplog):
    for kind in (NodeReducer, TwoPhaseReducer):

        def stream(self, buckets, before=kind.stream):
            if self._step_context._comm.rank == rank:
                clocks.seconds[rank] += 1
            return before(self, buckets)

        monkeypatch.setattr(kind, "stream", stream)
    caplog.set_level(logging.INFO, "distopt")

    def main(comm):
        step, opt, params = trainer(comm)
        step(Dense(), "auto")
        lines = [step(ErrorFeedback(Int8())) for _ in range(3 * STEPS + 2)]
        assert lines[-1] == lines[-2] == "exchange: gather (measured)"
        laws.same_on_all_ranks(comm, laws.digest(params))
        return opt.state_dict()["measured"]

    assert run_ranks(4, clocks.of_rank(main))[2] == [[0, 0, 1, 1], {repr(ErrorFeedback(Int8())): "gather"}]
    assert "exchange='measure' takes gather for ErrorFeedback(Int8" in caplog.text


def test_a_step_that_is_refused_or_of_another_kind_does_not_count():
    def main(comm):
        step, opt, params = trainer(comm, nonfinite="skip")
        step(Dense(), "auto")
        for _ in range(2 * STEPS):
            assert not opt.engine.reducers.measured.state()
            bad = np.full(SHAPE, np.inf, np.float32)
            assert not opt.step([(p, bad) for p in params], Half(), exchange="measure")
            step(Dense(), "auto")
            step(Half())
        assert repr(Half()) in opt.engine.reducers.measured.state()[1]

    run_ranks(4, main)


def test_a_checkpoint_has_the_choice_and_other_hosts_are_measured_again(caplog):
    def main(comm):
        step, opt, _ = trainer(comm)
        for _ in range(2 + 2 * STEPS):
            step(Half())
        state, found = opt.state_dict(), []
        for hosts in ((0, 0, 1, 1), (0, 1, 2, 3)):
            step, opt, _ = trainer(comm, hosts)
            opt.load_state_dict(state)
            step(Half())
            step(Half())
            found.append((opt.engine.reducers.measured.trying, opt.state_dict().get("measured")))
        del state["measured"]  # as older ones are
        opt.load_state_dict(state)
        assert found[0] == (False, [[0, 0, 1, 1], {repr(Half()): found[0][1][1][repr(Half())]}])
        assert found[1] == (False, None)  # one rank on each host has one way to send halves
        with pytest.raises(ValueError, match="measured must be hosts and an exchange for each compressor, got"):
            opt.load_state_dict(state | {"measured": [[0], {"Half()": "teleport"}]})

    run_ranks(4, main)
    assert caplog.text.count("ranks are on other hosts than before: exchange='measure' measures again") == 1


def test_ranks_of_one_host_and_one_rank_have_nothing_to_measure():
    def main(comm):
        step, opt, _ = trainer(comm, hosts=(0,) * comm.size)
        for _ in range(3):
            step(Dense())
        assert not opt.engine.reducers.measured.trying
        assert "measured" not in opt.state_dict()

    run_ranks(1, main)
    run_ranks(2, main)


def test_a_deterministic_run_refuses_to_measure():
    def main(comm):
        step, _, _ = trainer(comm, deterministic=True)
        step(Half())

    with pytest.raises(ValueError, match=r"exchange must be one of .*nodes with deterministic=True, got 'measure'"):
        run_ranks(4, main)


@pytest.mark.parametrize(("gather", "chosen"), [(96.0, "auto"), (94.0, "gather"), (120.0, "auto")])
def test_another_exchange_must_win_by_five_per_cent_of_the_median(gather, chosen, clocks):
    """On the slowest rank, whatever the others take, and however long one of the three steps took."""

    def main(comm):
        measured = MeasuredExchanges(comm)
        for step, seconds in enumerate((100.0, 900.0, 100.0, gather, 1.0, gather)):
            assert measured.exchange("Half()", ["auto", "gather"]) == ("auto" if step < STEPS else "gather")
            clocks.seconds[comm.rank] += seconds if comm.rank else 1.0
            measured.end_step()
        return measured.exchange("Half()", ["auto", "gather"])

    assert run_ranks(2, clocks.of_rank(main)) == [chosen, chosen]
