"""Launchers: which one started this process, its environment for ranks, and how the end of a rank is reported."""

import contextlib
import fcntl
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_watchdog import Mail, Watched

from distopt.comm import mpi_start
from distopt.comm.world import _pick_group
from distopt.resilience import abort as job_end
from distopt.resilience import job, watchdog
from distopt.resilience.operation_log import OperationLog, OperationRecorder
from distopt.resilience.timeouts import Limits
from distopt.run import doctor, job_folder, processes, segments
from distopt.run.exit_watch import ExitWatch, exit_code
from distopt.run.launcher import Launcher
from launch import distopt_run, needs_mpi


def test_torchrun_without_torch_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "distopt.comm.process_group", None)
    with pytest.raises(ImportError, match=r"RANK=1, and torch is not usable.*pip install 'distopt\[torch\]', or start"):
        _pick_group("auto", "torchrun set RANK=1")


@pytest.mark.parametrize(("library", "kind"), [("MPICH 5.0.2", "pmi2"), ("Open MPI 5.0.11", "pmix")])
@pytest.mark.parametrize("told", [{}, {"PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_srun_without_the_right_mpi_option_is_refused(monkeypatch, library, kind, told):
    monkeypatch.setattr(mpi_start, "brand", lambda: library)
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"} | told
    text = f"{library}, sees 1: srun .*: srun --mpi={kind} -n 2 python script.py; or, .* srun --mpi=none"
    with pytest.raises(RuntimeError, match=text):
        mpi_start.check_launcher(1, environment)


def test_a_launcher_of_another_brand_inside_a_slurm_step_is_not_srun(monkeypatch):
    monkeypatch.setattr(mpi_start, "brand", lambda: "MPICH 5.0.2")
    with pytest.raises(RuntimeError, match="different brands"):
        mpi_start.check_launcher(1, {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"})
    mpi_start.check_launcher(4, {"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.parametrize("brand", ["MPICH", "Open MPI"])
def test_ranks_are_forked_on_this_machine_unless_the_environment_says_otherwise(monkeypatch, brand):
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
    monkeypatch.setattr(job_end, "ending", threading.Event())
    monkeypatch.setattr(job_end, "say", said.append)
    return said, codes, abort


def test_exception_hooks_of_others_are_called_once_each_in_any_order(hooks):
    said, codes, abort = hooks
    called = []

    def add(name):
        before = sys.excepthook
        sys.excepthook = lambda *error: (called.append(name), before is sys.__excepthook__ or before(*error))

    add("first")
    job_end.abort_on_exception(1, abort)
    add("second")
    job_end.abort_on_exception(1, abort)
    with pytest.raises(Ended):
        sys.excepthook(KeyError, KeyError("lost"), None)
    assert called == ["second", "first"]
    assert [text.strip() for text in said] == ["rank 1: KeyError: 'lost'"]
    assert codes == [1]


@pytest.mark.parametrize("speaks", [True, False])
def test_where_others_go_on_a_rank_that_raises_ends_alone(hooks, monkeypatch, speaks):
    said, codes, abort = hooks
    monkeypatch.setenv("DISTOPT_ELASTIC", "1")
    monkeypatch.setattr(os, "_exit", abort)
    job_end.abort_on_exception(1, lambda code: pytest.fail("the others go on"))
    error = ValueError("differs")
    error.agreed = (speaks, 0.0)
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(Ended):
        threading.excepthook(threading.ExceptHookArgs([ValueError, error, None, None]))
    assert (codes, [text.strip() for text in said]) == ([1], ["rank 1: ValueError: differs"])
    assert 5 not in slept, "no other rank is to end it"


def test_a_hook_that_fails_does_not_stop_the_end(hooks):
    said, codes, abort = hooks
    sys.excepthook = lambda *error: 1 / 0
    job_end.abort_on_exception(0, abort)
    with pytest.raises(Ended):
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert codes == [130]
    assert "the hook for exceptions failed: ZeroDivisionError" in said[-1]


def test_messages_go_to_the_standard_error_file_and_not_to_its_replacement(capfd):
    """All of a long message, although a pipe takes only a part of it at once."""
    with contextlib.redirect_stderr(io.StringIO()) as replaced:
        job_end._say("x" * 300_000 + "\ud800\n")
    assert capfd.readouterr().err == "x" * 300_000 + "\\ud800\n"
    assert replaced.getvalue() == ""


def test_a_rank_that_does_not_answer_is_named_in_a_wait_without_a_limit(monkeypatch):
    said = []
    monkeypatch.setattr(watchdog, "say", said.append)
    recorder, boxes = OperationRecorder(), [[], []]
    mailbox = Mail(0, boxes)
    watched = Watched(0, recorder, Limits(0.05, 0.05), [mailbox])
    with OperationLog(recorder, "the end", [0], mailbox, limited=False)("the end of the others"):
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    watched.stop()
    assert "rank 1: no answer (stopped, dead, or holding the interpreter lock)" in said[0]
    assert not watched.ended.is_set()


def test_marks_of_a_rank_are_read_back_by_the_launcher(tmp_path, monkeypatch):
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


def test_what_a_rank_would_lose_and_how_long_it_waits_is_read_by_the_launcher(tmp_path, monkeypatch):
    for name in ("_rank", "_folder", "_process", "_page", "_votes"):
        monkeypatch.setattr(job, name, getattr(job, name))
    monkeypatch.setattr(job.atexit, "register", lambda *given: None)
    job.tell("nothing")  # no rank of distopt run
    job.enter(1, tmp_path)
    (tmp_path / job.AWAITED).touch()  # is no mark
    (rank,) = job.entered(tmp_path)
    assert (rank.unsent, rank.where) == ("", "before distopt.world()")
    job.note("step " + "7" * 300)
    job.tell("its residual (norm 0.31 after step 10)")
    job.complain()
    job.complain()
    (rank,) = job.entered(tmp_path)
    assert (rank.unsent, rank.where[:12]) == ("its residual (norm 0.31 after step 10)", "after step 7")
    assert {text.partition(".")[0] for text in rank.marks[job.LATE]} == {"1"}
    assert len(rank.marks[job.LATE]) == 2, "each wait is heard"
    job.tell("ü" * 300)
    job.note("step 8")
    (rank,) = job.entered(tmp_path)
    assert (rank.unsent.rstrip("\ufffd"), rank.where) == ("ü" * 124, "after step 8")


def test_exit_codes_as_a_shell_has_them():
    assert [exit_code(status) for status in (0, 3, 256, -9, -15)] == [0, 3, 0, 137, 143]


@pytest.mark.faults
@pytest.mark.parametrize("handles", [True, False])
def test_the_first_of_several_ended_ranks_is_named(tmp_path, monkeypatch, handles):
    """Even if they are checked late, where the system has pidfds."""
    if not handles:
        monkeypatch.delattr(os, "pidfd_open")
    processes = [subprocess.Popen(["sh", "-c", "read x; kill -TERM $$"], stdin=subprocess.PIPE) for _ in range(3)]
    for rank, process in enumerate(processes):
        (tmp_path / f"{rank}.{job.PID}.{process.pid}").touch()
        (tmp_path / f"{rank}.{job.VOTES}").write_bytes(bytes(job.PAGE))
    ends = ExitWatch(tmp_path, 3, os.getpid())
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


@pytest.mark.faults
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_ended_before_it_was_seen_is_named(tmp_path, late):
    """Not the one that the launcher ends because of it: that one came further, and is seen to end first."""
    processes = []
    for rank, votes in enumerate((2, 1)):
        pipe = tmp_path / f"{rank}.{job.ALIVE}"
        os.mkfifo(pipe)
        hold = ["sh", "-c", f"exec 3<>{pipe}; echo ready; read x; kill -KILL $$"]
        processes.append(subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert processes[rank].stdout.readline() == b"ready\n"
        (tmp_path / f"{rank}.{job.PID}.{processes[rank].pid}").touch()
        (tmp_path / f"{rank}.{job.VOTES}").write_bytes(job.HEAD.pack(votes, 0).ljust(job.PAGE, b"\0"))
    ends = ExitWatch(tmp_path, 2, os.getpid())
    processes[1].communicate()
    if late:  # both are gone when they are seen
        processes[0].communicate()
    ranks = ends.look(0)
    processes[0].communicate()
    fault = ends.fault(ranks) or ends.fault(ends.look(5))
    ends.close()
    assert fault.text.startswith("rank 1 "), fault


@pytest.mark.faults
def test_a_rank_that_crashed_is_named_although_another_was_seen_to_end_first(tmp_path):
    """A launcher under load may end the others before the kernel tells of the end of the one that crashed."""
    processes = [subprocess.Popen(["sh", "-c", "read x"], stdin=subprocess.PIPE) for _ in range(2)]
    for rank, process in enumerate(processes):
        (tmp_path / f"{rank}.{job.PID}.{process.pid}").touch()
        (tmp_path / f"{rank}.{job.VOTES}").write_bytes(bytes(job.PAGE))
        (tmp_path / f"{rank}.{job.CRASH}").touch()
    ends = ExitWatch(tmp_path, 2, os.getpid())
    assert ends.fault(ends.look(0)) is None
    (tmp_path / f"1.{job.CRASH}").write_text("Fatal Python error: Bus error\n\nStack (most recent call first):\n")
    processes[0].kill()
    fault = ends.fault(ends.look(5))
    assert fault.text.startswith("rank 1 crashed before distopt.world()\nFatal Python error: Bus error\n")
    assert fault.code == 128 + signal.SIGBUS
    ends.close()
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.faults
def test_a_rank_that_has_said_its_exit_code_is_named_with_it_before_the_kernel_tells_of_its_end(tmp_path):
    with subprocess.Popen(["sh", "-c", "read x"], stdin=subprocess.PIPE) as process:
        for rank in range(2):
            (tmp_path / f"{rank}.{job.PID}.{process.pid}").touch()
            (tmp_path / f"{rank}.{job.VOTES}").write_bytes(bytes(job.PAGE))
        for name in (f"0.{job.MPI}.", f"1.{job.EXIT}.1", f"1.{job.DONE}."):
            (tmp_path / name).touch()
        ends = ExitWatch(tmp_path, 2, os.getpid())
        fault = ends.fault(ends.look(0))
        ends.close()
    assert fault == ("rank 1 ended by exit code 1 before distopt.world()", 1)


def test_an_ignored_signal_is_not_handled():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in processes.asking()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in processes.asking()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_shared_memory_segments_left_by_failed_jobs_are_reported_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", tmp_path)
    assert segments.left() == []
    (tmp_path / "mpich_shm_1").write_bytes(bytes(2_000_000))
    (tmp_path / "sm_segment.host.1").write_bytes(bytes(1_000_000))
    (tmp_path / "another").write_bytes(bytes(100))
    assert segments.left() == [(tmp_path / "mpich_shm_1", 2_000_000), (tmp_path / "sm_segment.host.1", 1_000_000)]
    told = [finding for finding in doctor.machine() if "are left" in finding.text]
    assert told[0].text == f"2 segments of jobs that failed are left in {tmp_path}: 3.0 MB"
    assert f"rm {tmp_path}/mpich_shm_* {tmp_path}/sm_segment.*" in told[0].fix
    rank = job.Rank(0, 1, {job.SEGMENT: {"mpich_shm_1", "sm_segment.host.1"}}, 0, "", "")
    segments.sweep([rank, rank])
    assert [file.name for file in tmp_path.iterdir()] == ["another"]


def leave(folder, pid, *names):
    """The folder of a job whose rank had this process ID."""
    folder.mkdir(parents=True)
    (folder / f"0.{job.VOTES}").write_bytes(bytes(job.PAGE))
    for name in (f"0.{job.PID}.{pid}", f"0.{job.SEGMENT}.mpich_shm_1", *names):
        (folder / name).touch()
    return folder


def test_folders_of_jobs_whose_launcher_was_killed_are_removed_with_their_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FOLDER", tmp_path)
    nobody = 2**22 + 1  # above Linux's most
    place = f"{tmp_path}/{job_folder.PREFIX}{{}}".format
    left = leave(Path(place("left")), nobody, job.AWAITED)
    (left / job.REQUESTS).mkdir()
    (left / job.REQUESTS / "3").touch()
    alive = leave(Path(place("alive")), os.getpid())
    begun = Path(place("begun"))
    begun.mkdir()
    foreign = leave(tmp_path / "distopt-mine", nobody)
    locked = leave(Path(place("locked")), nobody)
    handle = os.open(locked, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    Path(place("link")).symlink_to(foreign)
    (tmp_path / "mpich_shm_1").touch()
    job_folder.sweep(tmp_path)
    os.close(handle)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {
        alive,
        begun,
        foreign,
        locked,
        Path(place("link")),
    }
    assert list(foreign.iterdir())
    assert not (tmp_path / "mpich_shm_1").exists()


@needs_mpi
def test_a_job_removes_what_one_before_it_has_left_whose_launcher_was_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import distopt, sys, time\ndistopt.world().barrier()\nprint('met', flush=True)\ntime.sleep(60)")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", str(script)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        assert "met" in launcher.stdout.readline()
        (left,) = tmp_path.glob(f"{job_folder.PREFIX}*")
        (memory,) = {name for rank in job.entered(left) for name in rank.marks[job.SEGMENT]}
        pids = [rank.pid for rank in job.entered(left)]
        launcher.kill()
    while any(job.state(pid) not in "ZX" for pid in pids):
        time.sleep(0.05)
    assert left.exists()
    script.write_text("import distopt\ndistopt.world().barrier()")
    assert distopt_run(2, script, env=env)[0] == 0
    assert not left.exists()
    assert not (segments.FOLDER / memory).exists()


def test_ranks_get_the_settings_of_a_launcher_around_this_one_and_not_its_numbers(monkeypatch):
    numbers = ["OMPI_COMM_WORLD_RANK", "OMPI_UNIVERSE_SIZE", "PMI_RANK", "PMI_FD", "PMI_CONTROL_PORT", "PMIX_RANK"]
    numbers += ["PMIX_SERVER_URI41", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK"]
    settings = ["OMPI_MCA_btl_base_verbose", "PMIX_MCA_gds", "PRTE_MCA_x", "HYDRA_DEBUG", "SLURM_JOB_ID", "PMIXER"]
    for name in numbers + settings:
        monkeypatch.setenv(name, "1")
    for brand in ("MPICH", "Open MPI"):
        found = Launcher("mpiexec", brand).environment(2)
        assert not found.keys() & set(numbers)
        assert found.keys() >= set(settings)
