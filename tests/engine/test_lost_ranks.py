"""A rank ends at every instant at which it meets the others, and these go on: with the bits of a run of fewer ranks."""

import zlib

import numpy as np
import pytest

from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import Elastic, ThreadCommunicator
from distopt.compress import DCT, DeepGradientCompression, ErrorFeedback, Half, TopK
from distopt.engine import elastic
from distopt.optim import SGD
from distopt.resilience import job
from laws import inputs
from laws.fate import instants, present_fates
from laws.lost import MODES, Judge, run
from tiers import every


@pytest.fixture
def fate(monkeypatch):
    """Return a function that makes a fate the present one."""
    return present_fates(monkeypatch)


@pytest.fixture
def shared(request, monkeypatch):
    """Whether ranks share memory, as the mode wants."""
    if not MODES[request.getfixturevalue("mode")][3]:
        monkeypatch.setattr(ThreadCommunicator, "peers", lambda self, x: None)


@pytest.fixture
def large(monkeypatch):
    """Parameters of several chunks, so that shares cut through them."""
    make = inputs.parameters
    monkeypatch.setattr(inputs, "parameters", lambda **more: make([(30, 500), (130, 100), (5,)], **more))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", MODES)
def test_survivors_have_the_bits_of_fewer_ranks(mode, shared, fate):
    """One instant of a mode; the thorough tier has every mode, and below every instant."""
    judge, rng = Judge(mode, fate, run), np.random.default_rng(zlib.crc32(mode.encode()))
    counts = instants(mode, fate, 3)
    victim = int(rng.integers(2))
    judge.judge(seed=1, **{f"rank{victim}": (int(rng.integers(1, counts[victim] + 1)), bool(rng.integers(2)))})


@pytest.mark.thorough
@pytest.mark.parametrize("mode", every(2, MODES))
def test_survivors_have_the_bits_of_fewer_ranks_at_every_other_instant(mode, shared, fate):
    """Before the others meet and after it by turns; steps have odd and even numbers of meetings."""
    judge = Judge(mode, fate, run)
    for at in range(1, instants(mode, fate, 3)[0] + 1, 2):
        judge.judge(seed=at, rank0=(at, at // 2 % 2 == 0))


@pytest.mark.full
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_survivors_have_the_bits_of_fewer_ranks_whenever_one_ends(mode, shared, victim, turn, fate):
    """At every instant, before the others meet and after it by turns; the other victim the other way around."""
    judge = Judge(mode, fate, run)
    for at in range(1, instants(mode, fate, 3)[victim] + 1):
        judge.judge(seed=at, **{f"rank{victim}": (at, (at + victim + turn) % 2 == 0)})


@pytest.mark.thorough
@pytest.mark.parametrize("ends", [10, pytest.param(30, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", every(2, MODES, first=1))
def test_two_of_four_ranks_may_end_at_once_or_one_while_the_others_go_on(mode, ends, shared, fate):
    """The second one at the same meeting, or at one of the next: those of the way back are among these.

    With shared parameters none is the buddy of the other.
    """
    judge, rng = Judge(mode, fate, run, 4), np.random.default_rng(7)
    counts = instants(mode, fate, 4)
    for seed in range(ends):
        first, second = rng.choice(4, 2, replace=False)
        if mode.startswith("shared"):
            second = (first + 2) % 4
        at = int(rng.integers(1, counts[first] + 1))
        then = at + int(rng.integers(4))
        judge.judge(seed=seed, **{f"rank{first}": (at, bool(seed % 2)), f"rank{second}": (then, bool(seed // 2 % 2))})


SHARED = [mode for mode in MODES if mode.startswith("shared")]


@pytest.mark.parametrize(
    ("mode", "verbs"),
    [
        ("shared parameters of LANS with a buddy", ["all_reduce of 27 float64", "all_to_all"]),
        ("sharded Muon with a buddy", ["all_gather", "barrier"]),
    ],
)
def test_an_update_that_was_interrupted_is_made_again(mode, verbs, shared, large, fate):
    """In the last step; its norms, directions or copies have not all come, and shares cut through parameters."""
    judge, counting = Judge(mode, fate, run), fate()
    run(mode, 3)
    for verb in verbs:
        at = max(k for k, met in enumerate(counting.verbs[1], start=1) if met == verb)
        judge.judge(seed=3, rank1=(at, False))


@pytest.mark.thorough
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", SHARED)
def test_shares_cut_through_parameters_whenever_a_rank_ends(mode, turn, shared, large, fate):
    """Before the others meet and after it by turns."""
    judge = Judge(mode, fate, run, 4)
    for at in range(1, instants(mode, fate, 4)[1] + 1):
        judge.judge(seed=at, rank1=(at, (at + turn) % 2 == 0))


@pytest.mark.parametrize("mode", SHARED[1:3])
def test_a_rank_that_is_lost_with_its_buddy_takes_its_share_along(mode, shared, fate):
    """In the middle of the third step, at the same meeting."""
    at = instants(mode, fate, 4)[1] * 2 // 3
    fate(rank1=(at, False), rank2=(at, False))
    with pytest.raises(RuntimeError, match=r"share of the optimizer's state.*: rank 1 with 2 of 4; load a checkpoint"):
        run(mode, 4)


@pytest.mark.parametrize(
    ("compressor", "keeps"),
    [
        (ErrorFeedback(TopK(0.25)), True),
        (DCT(ErrorFeedback(TopK(0.25))), True),
        (DeepGradientCompression(TopK(0.25), momentum=0.5, exclude_1d=False), True),
        (ErrorFeedback(TopK(1.0)), False),
        (Half(), False),
    ],
    ids=repr,
)
def test_the_launcher_is_told_the_norm_of_all_that_a_rank_has_not_sent(compressor, keeps, monkeypatch):
    """By whatever name a compressor keeps it: of 3 and 4 one is sent."""
    told = []
    monkeypatch.setattr(job, "is_rank", lambda: True)
    monkeypatch.setattr(job, "tell", told.append)
    monkeypatch.setattr(elastic, "TELL", 1)

    def main(comm):
        comm = Elastic(comm)
        w, opt = Parameter("w", np.zeros(4)), DistOpt(SGD(1.0), comm)
        opt.step([(w, np.array([3.0, 0, 4, 0]))], compressor, False)
        comm.leave()

    run_ranks(2, main)
    assert len(told) == 2
    assert all(text.startswith("its residual (norm ") if keeps else text == "no residual" for text in told), told
