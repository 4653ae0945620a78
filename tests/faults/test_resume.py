"""Runs ended by signals, which resume: real processes, either MPI brand."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distopt.checkpoint import folder, header
from distopt.resilience.signals import SAME
from distopt.run.launcher import find_launcher
from distopt.run.processes import RANK, descendants
from launch import distopt_run, finish

pytestmark = pytest.mark.faults
TRAINING = Path(__file__).parent / "saving.py"
KILLS = int(os.environ.get("DISTOPT_KILLS", 2))
STEPS = 150 * KILLS  # more than there can be between two of them


def digests(output):
    return re.findall(r"digest (\w+) after (\d+) steps", output)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What a run of a mode has that nothing ends, once for each mode."""

    def run(mode):
        folder = tmp_path_factory.mktemp("unbroken")
        code, output = distopt_run(2, TRAINING, folder, STEPS, 0, mode, timeout=20 * KILLS)
        assert code == 0, output
        return sorted(digests(output))

    return functools.cache(run)


def start(command, log):
    """A job in a session of its own, whose output goes to a file; returns when all of it has begun to train."""
    job = logged(command, log)
    wait_for(lambda: log.read_text(errors="replace").count("from step") >= 2, log)
    return job


def logged(command, log):
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(true, log, patience=20.0):
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < patience, log.read_text(errors="replace")
        time.sleep(0.01)


def ended(job, log, patience=20.0):
    """(exit code, output); nobody is left."""
    family = descendants(job.pid)
    try:
        job.wait(patience)
    finally:
        for pid in (job.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return job.wait(), log.read_text(errors="replace")


def launched():
    return [sys.executable, "-m", "distopt", "run", "-n", "2"]


def bare():
    launcher = find_launcher()
    return [*launcher.command(2), sys.executable]


def only_checkpoint(path):
    """The step of the one checkpoint in a folder, which all of its files have."""
    (name,) = folder.names(path)
    steps = {header(file).about["step"] for file in (path / name).iterdir() if file.suffix != ".json"}
    assert len(steps) == 1
    return steps.pop()


@pytest.mark.parametrize(
    ("mode", "number"),
    [("topk", signal.SIGTERM), ("topk", signal.SIGINT), ("local", signal.SIGTERM), ("streaming", signal.SIGINT)],
)
def test_a_signal_ends_in_one_checkpoint(mode, number, unbroken, tmp_path):
    """Under distopt run, with either brand; and the run goes on from there to the same bits."""
    expected = unbroken(mode)
    job = start([*launched(), TRAINING, tmp_path / "saved", str(STEPS), "0", mode], tmp_path / "log")
    time.sleep(0.2)
    job.send_signal(number)
    code, output = ended(job, tmp_path / "log")
    assert code == 128 + number, output
    step = only_checkpoint(tmp_path / "saved")
    assert f"ended by {number.name} after step {step}" in output
    assert "Traceback" not in output
    code, output = distopt_run(2, TRAINING, tmp_path / "saved", STEPS, 0, mode)
    assert f"from step {step} with {{'ended after': {step}}}" in output
    assert sorted(digests(output)) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_bare_launcher_leaves_a_checkpoint_that_resumes(number, tmp_path):
    """MPICH's gives the ranks time; Open MPI's kills them, and what was saved before is still good."""
    every = "0" if find_launcher().brand == "MPICH" else "20"
    environment = find_launcher().environment(2)
    log = tmp_path / "log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delenv("DISTOPT_RUN")
        job = start([*bare(), TRAINING, tmp_path / "saved", "5000", every], log)
    if every != "0":
        wait_for(lambda: folder.names(tmp_path / "saved"), log)
    job.send_signal(number)
    code, output = ended(job, log)
    assert code != 0, output
    found = folder.names(tmp_path / "saved")
    assert found, output
    step = int(found[0].rpartition("-")[2])
    if every == "0":
        assert code == 128 + number, output
        assert only_checkpoint(tmp_path / "saved") == step
    code, output = distopt_run(2, TRAINING, tmp_path / "saved", step + 3, 0)
    assert (code, len(digests(output))) == (0, 2), output
    assert f"from step {step} with" in output


def test_a_job_whose_ranks_get_a_batch_systems_signal_too_saves(tmp_path):
    """Slurm sends a signal to all processes of a step: to the launcher, which passes it on, and to each rank."""
    job = start([*launched(), TRAINING, tmp_path / "saved", "100000", "0"], tmp_path / "log")
    ranks = ranks_of(job)
    assert len(ranks) == 2
    for _ in range(20):  # some between two steps
        for pid in (*ranks, job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.0005)
    code, output = ended(job, tmp_path / "log")
    assert code == 143, output
    assert only_checkpoint(tmp_path / "saved") > 0


def test_a_second_signal_ends_a_rank_that_never_comes_to_its_next_step(tmp_path):
    """A rank that never comes to its next step."""
    script = tmp_path / "stuck.py"
    script.write_text(
        "import sys, time, numpy as np, distopt\n"
        "opt, w = distopt.DistOpt(distopt.optim.SGD(0.1)), distopt.Parameter('w', np.zeros(3))\n"
        "opt.save_when_stopped(sys.argv[1], [w])\n"
        "opt([(w, np.ones(3))])\n"
        "print('from step', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    job = start([*launched(), script, tmp_path / "saved"], tmp_path / "log")
    job.send_signal(signal.SIGTERM)
    time.sleep(SAME + 0.2)
    assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    code, output = ended(job, tmp_path / "log")
    assert code != 0, output
    assert not folder.names(tmp_path / "saved")


def ranks_of(job):
    """The process ids of a job's ranks."""
    found = []
    for pid in descendants(job.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[1:2] == [str(RANK).encode()]:
                found.append(pid)
    return found


@pytest.mark.parametrize("mode", ["topk", "partial", "local", "streaming"])
def test_runs_killed_at_any_instant_restart_and_end_with_the_bits_of_an_unbroken_run(mode, unbroken, tmp_path):
    """The job is started again each time, from its last good checkpoint, and ends with the bits of an unbroken run."""
    expected = unbroken(mode)
    log, rng = tmp_path / "log", random.Random(mode)
    command = [*launched(), "--restarts", str(KILLS), TRAINING, tmp_path / "saved", str(STEPS), "1", mode]
    job = logged(command, log)
    for kill in range(KILLS):
        wait_for(lambda kill=kill: log.read_text(errors="replace").count("from step") >= 2 * (kill + 1), log)
        time.sleep(rng.uniform(0.05, 0.4))
        os.kill(rng.choice(ranks_of(job)), signal.SIGKILL)
    code, output = ended(job, log, 20 * KILLS)
    assert code == 0, output
    assert len(re.findall("rank . (was killed by SIGKILL|ended without a word)", output)) == KILLS
    assert sorted(digests(output)) == expected
    assert not list((tmp_path / "saved").glob("**/*.tmp.*"))


@pytest.mark.parametrize("mode", ["topk", "local"])
def test_a_checkpoint_of_four_goes_on_with_one(mode, tmp_path):
    code, output = distopt_run(4, TRAINING, tmp_path / "saved", 20, 10, mode)
    assert code == 0, output
    code, output = finish([sys.executable, TRAINING, tmp_path / "saved", "30", "0", mode], 30)
    assert code == 0, output
    assert "4 ranks saved it, 1 go on" in output
    assert "after 30 steps" in output
