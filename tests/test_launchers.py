"""Who started this process, what a launcher is told, and how an end is made known: in this process."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from distopt import guard, job
from distopt.cli import doctor, run, segments
from distopt.cli.ends import Ends, exit_code
from distopt.cli.launcher import Launcher
from distopt.comm import mpi_start
from distopt.comm.world import _check_alone
from distopt.watch import Limits, Log, Recorder, watchman
from test_watch import Mail, Watched

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_several_processes_without_mpi_are_refused():
    with pytest.raises(RuntimeError, match=r"RANK=1, WORLD_SIZE=2.*Start with: distopt run -n N script.py, or mpirun"):
        _check_alone(TORCHRUN)


@pytest.mark.parametrize("stale", [{"WORLD_SIZE": "1"}, {"RANK": ""}, {"WORLD_SIZE": "2", "RANK": None}, {}])
def test_one_process_may_have_stale_variables(stale):
    given = (TORCHRUN | stale) if stale else {}
    environment = {name: value for name, value in given.items() if value is not None}
    if stale == {"RANK": ""}:
        environment = {"WORLD_SIZE": "8", "RANK": ""}  # of a batch system's own
    _check_alone(environment)


@pytest.mark.parametrize(("library", "kind"), [("MPICH 5.0.2", "pmi2"), ("Open MPI 5.0.11", "pmix")])
@pytest.mark.parametrize("told", [{}, {"PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_srun_must_be_told_how_it_starts_a_library(monkeypatch, library, kind, told):
    monkeypatch.setattr(mpi_start, "brand", lambda: library)
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"} | told
    with pytest.raises(RuntimeError, match=f"{library}, sees 1: srun .*: srun --mpi={kind} -n 2 python script.py"):
        mpi_start.check_launcher(1, environment)


def test_a_launcher_of_another_brand_inside_a_slurm_step_is_not_srun(monkeypatch):
    monkeypatch.setattr(mpi_start, "brand", lambda: "MPICH 5.0.2")
    with pytest.raises(RuntimeError, match="different brands"):
        mpi_start.check_launcher(1, {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"})
    mpi_start.check_launcher(4, {"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.parametrize("brand", ["MPICH", "Open MPI"])
def test_ranks_are_started_here_unless_somebody_says_otherwise(monkeypatch, brand):
    """Not by Slurm, which would wait for itself."""
    for name in ("HYDRA_LAUNCHER", "UCX_NET_DEVICES", "OMPI_MCA_btl"):
        monkeypatch.delenv(name, raising=False)
    found = Launcher("mpiexec", brand).environment(2)
    assert (found.get("HYDRA_LAUNCHER"), found.get("HYDRA_RMK")) == (
        ("fork", "user") if brand == "MPICH" else (None,) * 2
    )
    assert found.get("OMPI_MCA_btl") == ("self,sm" if brand == "Open MPI" else None)
    monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    found = Launcher("mpiexec", brand).environment(2)
    assert (found["HYDRA_LAUNCHER"], found["OMPI_MCA_btl"]) == ("ssh", "tcp,self")


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def hooks(monkeypatch):
    """Those of a process that says nothing, and the codes with which it would have ended the job."""
    said, codes = [], []

    def abort(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(guard, "ending", threading.Event())
    monkeypatch.setattr(guard, "say", said.append)
    return said, codes, abort


def test_other_hooks_are_called_once_each_whenever_they_came(hooks):
    said, codes, abort = hooks
    called = []

    def add(name):
        before = sys.excepthook
        sys.excepthook = lambda *error: (called.append(name), before is sys.__excepthook__ or before(*error))

    add("first")
    guard.abort_on_exception(1, abort)
    add("second")
    guard.abort_on_exception(1, abort)
    with pytest.raises(Ended):
        sys.excepthook(KeyError, KeyError("lost"), None)
    assert called == ["second", "first"]
    assert [text.strip() for text in said] == ["rank 1: KeyError: 'lost'"]
    assert codes == [1]


def test_a_hook_that_fails_does_not_stop_the_end(hooks):
    said, codes, abort = hooks
    sys.excepthook = lambda *error: 1 / 0
    guard.abort_on_exception(0, abort)
    with pytest.raises(Ended):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert codes == [130]
    assert "the hook for exceptions failed: ZeroDivisionError" in said[-1]


def test_what_is_said_goes_to_the_file_and_not_to_what_replaced_it(capfd):
    """All of it, whatever a pipe takes at once."""
    with contextlib.redirect_stderr(io.StringIO()) as replaced:
        guard._say("x" * 300_000 + "\ud800\n")
    assert capfd.readouterr().err == "x" * 300_000 + "\\ud800\n"
    assert replaced.getvalue() == ""


def test_who_does_not_answer_is_named_although_nothing_is_limited(monkeypatch):
    said = []
    monkeypatch.setattr(watchman, "say", said.append)
    recorder, boxes = Recorder(), [[], []]
    mail = Mail(0, boxes)
    watched = Watched(0, recorder, Limits(0.2, 0.2), [mail])
    with Log(recorder, "the end", [0], mail, limited=False)("the end of the others"):
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    watched.stop()
    assert "rank 1: no answer (stopped, dead, or holding the interpreter lock)" in said[0]
    assert not watched.ended.is_set()


def test_marks(tmp_path, monkeypatch):
    assert job.entered(tmp_path) == []
    for name in ("_rank", "_folder", "_process", "_page", "_votes"):
        monkeypatch.setattr(job, name, getattr(job, name))
    monkeypatch.setattr(job.atexit, "register", lambda *given: None)
    job.mark(job.STOPS)
    assert os.listdir(tmp_path) == []  # no rank of distopt run
    job.enter(3, tmp_path)
    job.mark(job.EXIT, 5)
    job.mark(job.SEGMENT, "a.b")
    job.note("step 7")
    (rank,) = job.entered(tmp_path)
    assert (rank.rank, rank.pid, rank.votes, rank.last) == (3, os.getpid(), 1, "step 7")
    assert (rank.marks[job.EXIT], rank.marks[job.SEGMENT]) == ({"5"}, {"a.b"})
    assert job.absent() == "  rank 3: has not come to it (it runs)"
    job.mark(job.MPI)
    assert job.absent() == ""


def test_exit_codes_as_a_shell_has_them():
    assert [exit_code(status) for status in (0, 3, 256, -9, -15)] == [0, 3, 0, 137, 143]


@pytest.mark.faults
@pytest.mark.parametrize("handles", [True, False])
def test_ends_are_known_in_their_order(tmp_path, monkeypatch, handles):
    """Even if they are looked at late, where the system has handles of processes."""
    if not handles:
        monkeypatch.delattr(os, "pidfd_open")
    processes = [subprocess.Popen(["sh", "-c", "read x; kill -TERM $$"], stdin=subprocess.PIPE) for _ in range(3)]
    for rank, process in enumerate(processes):
        (tmp_path / f"{rank}.{job.PID}.{process.pid}").touch()
        (tmp_path / f"{rank}.{job.VOTES}").write_bytes(bytes(job.PAGE))
    ends = Ends(tmp_path, 3, os.getpid())
    assert ends.fault(ends.look(0)) is None
    for rank in (2, 0, 1):
        processes[rank].stdin.close()
        processes[rank].wait(20)
    fault = ends.fault(ends.look(0.1))
    ends.close()
    assert "before distopt.world()" in fault.text
    if handles:
        assert fault.text.startswith("rank 2 ")
        assert fault.code in (0, 128 + 15)  # 0: this kernel does not tell


def test_a_signal_that_is_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in run._asking()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in run._asking()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_segments_that_nobody_maps_are_found_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", tmp_path)
    assert segments.left() == []
    (tmp_path / "mpich_shm_1").write_bytes(bytes(2_000_000))
    (tmp_path / "another").write_bytes(bytes(100))
    assert segments.left() == [(tmp_path / "mpich_shm_1", 2_000_000)]
    told = [finding for finding in doctor.machine() if "are left" in finding.text]
    assert told[0].text == f"1 segments of jobs that failed are left in {tmp_path}: 2.0 MB"
    assert f"rm {tmp_path}/mpich_shm_*" in told[0].fix
    rank = job.Rank(0, 1, {job.SEGMENT: {"mpich_shm_1"}}, 0, "")
    segments.sweep([rank, rank])
    assert [file.name for file in tmp_path.iterdir()] == ["another"]
