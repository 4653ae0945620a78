"""Real ranks, one of which does not come: it is named with its place in time, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import distopt_run, find_launcher, finish

pytestmark = pytest.mark.faults
SCRIPT = Path(__file__).with_name("train.py")
LIMIT = 1.5
NO_ANSWER = "no answer (stopped, dead, or holding the interpreter lock)"


def line_of(mark):
    """Where the script says this."""
    return next(k for k, line in enumerate(SCRIPT.read_text().splitlines(), 1) if mark in line)


@pytest.fixture
def job(tmp_path):
    """Run the script on three ranks, of which none may be left: (exit code, output)."""

    def run(fault, culprit=1, ranks=3, limit=LIMIT, **environment):
        environment = {"DISTOPT_TIMEOUT": str(limit), "DISTOPT_FLIGHT": str(tmp_path), **environment}
        return checked(*distopt_run(ranks, SCRIPT, fault, culprit, timeout=30, env=environment))

    return run


def checked(code, output, stopped=0):
    """The same, if all ranks that said who they are have gone, soon after a fault and ``stopped`` seconds of rest."""
    ended, pids = time.time(), [int(pid) for pid in re.findall(r"pid (\d+)", output)]
    left = [pid for pid in pids if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, output
    assert "without a word" not in output  # the report was one
    for fault in re.findall(r"fault at ([\d.]+)", output) if code else ():  # of a job that a limit has ended
        assert ended - float(fault) < LIMIT + 10 + stopped, f"not by the limit:\n{output}"
    return code, output


def runs(pid):
    """Is there such a process, which is not just waiting to be collected?"""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def trace(folder):
    code, output = finish([sys.executable, "-m", "distopt", "trace", str(folder)], 30)
    assert code == 0, output
    return output


BACKWARD = "the vote on step 8"
PLACES = {
    "sleep": ("# asleep", "in no operation; barrier after the vote on step 7 ended"),
    "loop": ("# in a loop", "in no operation; barrier after the vote on step 7 ended"),
    "verb": ("# alone", "for all_reduce of 24 bytes after the vote on step 7"),
}


@pytest.mark.parametrize(("fault", "culprit"), [("sleep", 1), ("loop", 0), ("verb", 0), ("verb", 1)])
def test_a_rank_that_does_not_come_is_named_with_its_line_after_the_limit(job, fault, culprit, tmp_path):
    code, output = job(fault, culprit)
    mark, doing = PLACES[fault]
    at = rf"at train\.py:{line_of(mark)} in go_wrong"
    assert code == 75, output
    assert output.count("distopt: rank ") == 1, output
    who = re.search(r"distopt: rank (\d) waits since [12]\.\d s for (.*?); (at .*)", output)
    others = [r for r in range(3) if r != culprit]
    if int(who[1]) == culprit:  # it waits as well, and was the first to find that
        assert who[2] in doing
        assert re.fullmatch(at, who[3])
        for r in others:  # in one line if they have waited equally long
            assert re.search(rf"  ranks? [\d, ]*{r}[\d, ]*: waits since .* for {BACKWARD}; at train.py:", output), (
                output
            )
    else:
        assert who[2] == BACKWARD
        assert re.search(rf"  rank {culprit}: .*{doing}.*; {at}", output), output
        assert "waits for the same" in output
    assert "distopt trace reads the flight records of ranks 0 to 2 in " + str(tmp_path) in output
    story = trace(tmp_path)
    assert re.search(f"ranks {others[0]}, {others[1]} began {BACKWARD}; rank {culprit} did not: {at}", story), story
    assert ("all_reduce of 24 bytes" in story) == (fault == "verb")


@pytest.mark.parametrize("fault", ["stop", "interpreter lock"])
def test_a_rank_that_cannot_answer(job, fault, tmp_path):
    code, output = job(fault)
    assert code == 75, output
    assert output.count("distopt: rank ") == 1, output
    assert f"  rank 1: {NO_ANSWER}" in output
    assert "the flight records of ranks 0, 2" in output
    late = tmp_path / "distopt-flight.1.json"
    late.unlink(missing_ok=True)  # a launcher may let a stopped rank go on before it kills it
    assert {"distopt-flight.0.json", "distopt-flight.2.json"} <= {p.name for p in tmp_path.iterdir()}
    story = trace(tmp_path)
    assert f"ranks 0, 2 began {BACKWARD}, which not all ended" in story, story
    assert "no record of rank 1" in story


def test_a_rank_that_stops_between_two_buckets_is_named(job, tmp_path):
    """Buckets have gone, and some have not; ranks wait in their threads."""
    code, output = job("stop halfway", ranks=2)
    assert code == 75, output
    assert "for all_reduce of bucket 1 in step 8" in output
    assert f"  rank 1: {NO_ANSWER}" in output


def test_the_time_limit_holds_under_a_bare_launcher(tmp_path):
    """Both brands' launchers hand MPI_Abort's code on."""
    launcher = find_launcher()
    command = [*launcher.command(3), sys.executable, str(SCRIPT), "stop", "2"]
    environment = launcher.environment(3) | {"DISTOPT_TIMEOUT": str(LIMIT), "DISTOPT_FLIGHT": str(tmp_path)}
    code, output = checked(*finish(command, 30, env=environment))
    assert code == 75, output
    assert f"  rank 2: {NO_ANSWER}" in output


def test_the_first_step_may_take_longer_than_the_limit_of_later_steps(job):
    code, output = job("slow start")
    assert code == 0, output
    assert output.count("is done") == 3
    code, output = job("slow step")
    assert code == 75, output
    assert "the limit is 1 s" in output


def test_late_is_not_too_late(job):
    """Many short steps, with one rank half a second late in some of them."""
    code, output = job("late", limit=1)
    assert code == 0, output
    assert "distopt: rank" not in output
    assert output.count("is done") == 3


def test_ranks_that_wait_for_one_that_has_ended_run_into_the_limit(job):
    """An ended rank waits for the others without a limit; those that wait for it have one."""
    code, output = job("leave", ranks=2)
    assert code == 75, output
    assert "rank 0 waits since 1." in output
    assert re.search(r"for barrier after the vote on step 7; at train.py:\d+ in <module>", output), output
    assert re.search(r"  rank 1: waits since .* s for the end of the others after the vote on step 7", output), output


@pytest.mark.parametrize("given", ["soon", "-3"])
def test_a_time_limit_that_is_no_number_of_seconds_is_refused(job, given):
    code, output = job("none", limit=given)
    assert code not in (0, 75), output
    assert f"ValueError: DISTOPT_TIMEOUT must be a number of seconds, 0 or 'never', got '{given}'" in output


@pytest.mark.parametrize("given", ["0", "never"])
def test_a_time_limit_of_0_or_never_lets_ranks_wait(given, tmp_path):
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", "--timeout", "2.5", str(SCRIPT), "sleep", "1"]
    code, output = finish(command, 30, env={"DISTOPT_TIMEOUT": given, "DISTOPT_FLIGHT": str(tmp_path)})
    assert code == 124, output
    assert "distopt: rank" not in output


def test_time_while_the_whole_job_was_stopped_does_not_count(tmp_path):
    """As by Ctrl-Z."""
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", str(SCRIPT), "late", "1"]
    environment = dict(os.environ) | {"DISTOPT_TIMEOUT": "3", "DISTOPT_FLIGHT": str(tmp_path)}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines = [job.stdout.readline() for _ in range(2)]
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", "".join(lines))]
    assert len(pids) == 2, lines
    time.sleep(0.7)  # one waits, the other sleeps
    stopped = 4
    for number, seconds in ((signal.SIGSTOP, stopped), (signal.SIGCONT, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    _, output = checked(0, "".join(lines) + job.communicate(timeout=30)[0], stopped)
    assert job.returncode == 0, output
    assert "distopt: rank" not in output


def test_flight_records_are_written_at_an_exception_if_a_folder_is_named(job, tmp_path):
    """If a folder was named."""
    code, output = job("raise", limit=30)
    assert code == 1, output
    assert "ZeroDivisionError: boom" in output
    assert "rank 1" in trace(tmp_path)
    code, output = job("raise", limit=30, DISTOPT_FLIGHT=str(tmp_path / "none") * 0)
    assert code == 1, output
    assert not (Path.cwd() / "distopt-flight.1.json").exists()
