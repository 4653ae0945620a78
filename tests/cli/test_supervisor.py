"""Whom the supervisor of distopt run --elastic ends when ranks have waited for too long: without processes."""

import signal
import time
from types import SimpleNamespace

import pytest

from distopt.resilience import job
from distopt.run import supervisor
from distopt.run.exit_watch import End
from distopt.run.supervisor import Supervisor


@pytest.fixture
def elastic(monkeypatch):
    """Makes a job whose ranks have come to some votes; returns whom it ends if some of them complain, and its words."""
    ended, said = [], []
    monkeypatch.setattr(supervisor, "say", said.append)
    monkeypatch.setattr(supervisor, "HEARING", 0.0)

    def elastic(votes, late, stopped=(), awaited=(), lost_before=60.0):
        started = SimpleNamespace(
            send=lambda rank, number: ended.append(rank.rank),
            is_stopped=lambda rank: rank.rank in stopped,
            awaited=lambda: set(awaited),
            end=lambda grace: ended.append("all"),
        )
        made = Supervisor(started, len(votes), elastic=True)
        made._lost_at = time.monotonic() - lost_before
        marks = [{job.LATE: {f"{late[rank]}.0"}} if rank in late else {} for rank in range(len(votes))]
        made._living = [
            job.Rank(rank, 1000 + rank, marks[rank], count, f"step {count}", "") for rank, count in enumerate(votes)
        ]
        made._hear()
        made._hear()  # a complaint is heard once
        return sorted(ended, key=str), said, made._code

    return elastic


def test_who_has_come_to_fewer_votes_is_ended(elastic):
    ended, said, code = elastic([5, 5, 4, 3], late={0: 5, 1: 5})
    assert (ended, said, code) == ([2, 3], [], 0)


def test_who_is_stopped_is_ended_and_nobody_else(elastic):
    assert elastic([5, 5, 5], late={0: 5}, stopped=[2])[0] == [2]


def test_who_has_not_asked_for_an_epoch_that_others_wait_for_is_ended(elastic):
    assert elastic([5, 5, 5], late={0: 5}, awaited=[1])[0] == [1]


def test_who_waits_for_too_long_itself_is_not_ended(elastic):
    """Ranks that have done a step again may have come to one vote more than others."""
    assert elastic([6, 5, 4], late={0: 6, 1: 5}, awaited=[1])[0] == [2]


def test_a_complaint_of_a_rank_that_has_gone_on_is_none(elastic):
    assert elastic([6, 5, 5], late={0: 5}) == ([], [], 0)


def test_if_nobody_is_behind_the_job_ends(elastic):
    ended, said, code = elastic([5, 5, 5], late={0: 5, 1: 5, 2: 5})
    assert (ended, code) == (["all"], 75)
    assert said == ["ranks 0 to 2 wait for too long, and no rank is behind; ended the job"]


def test_if_a_rank_has_just_been_lost_others_have_the_time_to_notice(elastic):
    assert elastic([5, 5], late={0: 5, 1: 5}, lost_before=0.0) == ([], [], 0)


# ------------------------------------------------------------------------------------------- processes that come


@pytest.fixture
def growing(monkeypatch):
    """Makes a job of two ranks whose marks are given look by look; returns whom it ends, its words and its code."""
    killed, said = [], []
    monkeypatch.setattr(supervisor, "say", said.append)
    monkeypatch.setattr(supervisor, "HEARING", 0.0)

    def growing(*looks, meet_all=True):
        """A look: the ranks' marks, and the codes of those that have ended."""
        given, seen, codes = iter(looks), {}, {}

        def look(seconds):
            marks, ended = next(given, looks[-1])
            codes.update(ended)
            seen.update(marks)
            return [job.Rank(r, 100 + r, m, int(r < 2), "step 1", "") for r, m in seen.items()]

        started = SimpleNamespace(
            look=look,
            ended=lambda ranks: sorted((r for r in ranks if r.rank in codes), key=lambda r: list(codes).index(r.rank)),
            end_of=lambda rank: End(rank.rank, codes[rank.rank] == 0, f"rank {rank.rank} ended", codes[rank.rank]),
            is_stopped=lambda rank: False,
            send=lambda rank, number: killed.append(rank.rank),
            meet_all=meet_all,
            lose=lambda rank: None,
            replace=lambda: 2,
            missing=lambda: 0,
            awaited=set,
            processes=[SimpleNamespace(returncode=3)],
            end=lambda grace: killed.append("all"),
        )
        made = Supervisor(started, 2, elastic=True, restarts=1)
        for _ in looks:
            made._look(0.0)
        return sorted(set(killed)), said, made._code_of_last()

    return growing


@pytest.mark.parametrize(
    ("numbers", "most", "limits", "started", "ended"),
    [
        ([signal.SIGUSR1], 9, [1], 1, []),
        ([signal.SIGUSR1] * 3, 4, [1], 1, []),
        ([signal.SIGUSR2], 9, [-1], 0, [2]),
        ([signal.SIGUSR2] * 5, 9, [-2], 0, [1, 2]),
        ([signal.SIGUSR1, signal.SIGUSR2], 9, [], 0, []),
        ([signal.SIGUSR1], 3, [0], 0, []),
    ],
)
def test_signals_start_processes_and_end_those_of_the_highest_numbers(
    numbers, most, limits, started, ended, monkeypatch
):
    given, replaced, killed = [], [], []
    monkeypatch.setattr(supervisor, "say", lambda text: None)
    fake = SimpleNamespace(
        limit=given.append,
        replace=lambda: replaced.append(3) or 3,
        send=lambda rank, number: killed.append(rank.rank),
    )
    made = Supervisor(fake, 3, elastic=True, restarts=9, most=most)
    made._living = [job.Rank(rank, 100 + rank, {}, 1, "step 1", "") for rank in range(3)]
    for number in numbers:
        made._ask_for_size(number)
    made._resize_as_signalled()
    made._resize_as_signalled()
    assert (given, len(replaced), killed) == (limits, started, ended)
    assert made._dismissed == set(ended)


def test_a_process_that_nobody_is_left_to_let_in_is_ended_and_the_code_is_a_members(growing):
    """Though it has voted, alone, on what it has made."""
    killed, said, code = growing(({0: {}, 1: {}}, {}), ({2: {}}, {1: 137}), ({}, {0: 0}), ({}, {2: 137}))
    assert (killed, code) == ([2], 0)
    assert said[-1] == "rank 2 was ended before distopt.world(), as nobody is left who could let it in"


def test_a_process_that_was_let_in_goes_on_when_the_others_have_ended(growing):
    came = {job.CAME: {""}}
    looks = ({0: {}, 1: {}, 2: {}}, {1: 137}), ({2: came}, {}), ({}, {0: 0}), ({}, {2: 5})
    assert growing(*looks)[::2] == ([], 5)


@pytest.mark.parametrize("started", [False, True])
def test_mpis_start_of_a_process_that_a_rank_has_started_has_a_limit(growing, monkeypatch, started):
    monkeypatch.setenv("DISTOPT_TIMEOUT", "1e-9")
    marks = {job.MPI: {""}, **({job.STARTED: {""}} if started else {})}
    killed, _, _ = growing(*[({0: {}, 1: {}, 2: marks}, {1: 137})] * 3)
    assert killed == ([] if started else [2])


def test_a_process_that_waits_for_too_long_to_be_let_in_ends_nobody_else(growing):
    killed, _, _ = growing(*[({0: {}, 1: {}, 2: {job.LATE: {"0.0"}}}, {1: 137})] * 3)
    assert killed == [2]
