"""How MPI starts and how its jobs end: who launched this process, and nobody waits for a rank that does not come."""

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import math
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distopt import job, texts
from distopt.guard import abort_on_exception, announce_exit, ending, wait_until_read
from distopt.watch import Limits, Log, Mail, Watchman, limits, recorder
from distopt.watch.recorder import START
from distopt.watch.report import waiting
from distopt.watch.watchman import say


class Launcher(NamedTuple):
    """How a launcher tells a process of its world: two variables, and what the launcher is called."""

    size: str
    rank: str
    name: str


LAUNCHERS = (
    Launcher("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "an Open MPI mpirun"),
    Launcher("PMI_SIZE", "PMI_RANK", "an MPICH-like mpiexec"),
    Launcher("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
)
# What starts ranks, as the kernel names it; a process with another parent was started by a rank, or by a script.
STARTERS = ("hydra_pmi_proxy", "pmi_proxy", "prterun", "prted", "orted", "mpirun", "mpiexec", "slurmstepd")
SRUN = {"MPICH": "pmi2", "Open MPI": "pmix"}  # what srun must be told to start a library's ranks
LEVELS = ("single", "funneled", "serialized", "multiple")  # of threads, as MPI numbers them
LEAVING = 4711  # the tag of those who end without having trained
PATIENCE = 2.0  # seconds for all ranks to say so
CONNECT = 1.0  # seconds for other ranks to connect to prterun, which hangs if it ends a job while one of them does so
STUCK = 5.0  # seconds for Open MPI's launcher to end

mails: list[Mail] = []  # that the watchman reads


def launched(environ: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """The world size that a launcher announced in the environment, and how; None if there was no launcher."""
    for launcher in LAUNCHERS:
        size = environ.get(launcher.size, "")
        if size.isdigit():
            return int(size), f"{launcher.name} set {launcher.size}={size}"
    return None


def _rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's number, as the launcher announced it."""
    return next(int(environ.get(known.rank, "0")) for known in LAUNCHERS if environ.get(known.size, "").isdigit())


@functools.cache
def mpi() -> Any:
    """mpi4py's MPI, which starts MPI.  ImportError that says what to do if it is not usable."""
    try:
        import mpi4py

        if mpi4py.rc.initialize and "mpi4py.MPI" not in sys.modules:
            _start(mpi4py.rc)
        from mpi4py import MPI
    except (ImportError, OSError) as error:
        raise ImportError(f"MPI is not usable here ({error}): pip install 'distopt[mpi]'") from error
    return MPI


def brand() -> str:
    """The MPI library that mpi4py runs on, as 'MPICH 5.0.2'."""
    name, version = mpi().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def check_launcher(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """RuntimeError if the launcher started another number of processes than the MPI library sees.

    That happens when ``mpirun`` and the MPI library are of different brands, or ``srun`` was not told how to start the
    library's ranks: N processes would each train alone.
    """
    world = launched(environ)
    if not world or world[0] == size:
        return
    found = (
        f"the launcher started {world[0]} processes ({world[1]}), but the MPI library of mpi4py, {brand()}, sees {size}"
    )
    if environ.get("SLURM_STEP_NUM_TASKS") == str(world[0]):
        kind = SRUN["Open MPI" if brand().startswith("Open MPI") else "MPICH"]
        raise RuntimeError(
            f"{found}: srun has not started them as ranks of this library, and every process would train alone. "
            f"Start with: srun --mpi={kind} -n {world[0]} python script.py"
        )
    raise RuntimeError(
        f"{found}: launcher and library are of different brands, and every process would train alone. "
        "Start with this environment's own launcher: distopt run -n N script.py (distopt doctor shows both)"
    )


def any_thread() -> bool:
    """May any thread call MPI at any time?"""
    return bool(mpi().Query_thread() == mpi().THREAD_MULTIPLE)


def runs() -> bool:
    """Is MPI between its start and its end, as far as this process knows?"""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()


def _start(rc: Any) -> None:
    """MPI_Init, which waits for all ranks: within the time limit, and without the interpreter lock.

    mpi4py's import would keep the lock meanwhile, so that no thread could look after it.
    """
    spec = importlib.util.find_spec("mpi4py.MPI")
    if spec is None or spec.origin is None:
        return
    library = ctypes.CDLL(spec.origin)
    if rc.finalize is not False:
        _end_mpi_at_exit(library)
    level = LEVELS.index(rc.thread_level) if rc.threads else 0
    with _limited_start():
        library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))


def _end_mpi_at_exit(library: ctypes.CDLL) -> None:
    """As mpi4py does it, at the very end of this process, but not at the end of a forked child, where it would hang."""
    host = texts.library()
    known = (library.MPI_Initialized, library.MPI_Finalized, library.MPI_Finalize)
    host.end_mpi_with(*(ctypes.cast(function, ctypes.c_void_p) for function in known))
    ctypes.pythonapi.Py_AtExit(host.end_mpi)


@contextlib.contextmanager
def _limited_start() -> Iterator[None]:
    """A time limit, if there are others to wait for."""
    started = launched()
    if not started or started[0] == 1:
        yield
        return
    rank = _rank()
    try:
        watch(rank)
    except RuntimeError:  # Python comes to its end, and starts no thread any more
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil((limits() or Limits()).first))
    with Log(recorder, f"the start of rank {rank}", [rank], others=job.absent)(START):
        yield


@functools.cache
def watch(rank: int) -> Watchman | None:
    """The watchman of this process, once there is one; None if there are no limits."""
    allowed = limits()
    if allowed is None:
        return None
    watchman = Watchman(rank, recorder, allowed, _abort_from_thread, mails)
    atexit.register(watchman.stop)  # after the farewell, before MPI's own end
    return watchman


def _abort_from_thread(code: int) -> None:
    """As ``abort``; without MPI_THREAD_MULTIPLE this process ends alone, which the launcher notices."""
    if runs() and not any_thread():
        os._exit(code)
    abort(code)


def abort(code: int) -> None:
    """End all processes of the job; this one has said why."""
    ending.set()
    job.mark(job.SPOKEN, code)
    if runs():
        mpi().COMM_WORLD.Abort(code)
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())  # what MPI_Abort says to MPICH's
        time.sleep(PATIENCE)
    if not (runs() or job.is_rank() or "PMI_FD" in os.environ):
        time.sleep(CONNECT)
        _end_stuck_launcher()
    os._exit(code)  # Open MPI's launcher ends the others


def _end_stuck_launcher() -> None:
    """Leave a process behind that kills the launcher if that does not end by itself.

    Before it ends the other ranks, prterun wakes those that were stopped.  One that then connects to it can leave it in
    PMIx_server_finalize for ever, waiting for a lock, when no rank is left (3 of 20 jobs with a stopped rank).
    """
    launcher = os.getppid()
    if not _is_launcher(launcher):
        return
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(launcher)  # of that process alone, whoever gets its number later
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 3)  # which the launcher reads to their end
            ended, _, _ = select.select([handle], [], [], STUCK)
            if not ended:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os._exit(0)


# ------------------------------------------------------------------------------------------- before the ranks have met


def guard_start() -> None:
    """From now on a rank that fails before it has met the others ends the job, in which they would wait for it."""
    started = launched()
    if not started or started[0] == 1 or not (job.is_rank() or _was_started_by_launcher()):
        return
    abort_on_exception(_rank(), abort)
    announce_exit(_rank())
    if not job.is_rank():
        atexit.register(_leave_before_start if "PMI_FD" in os.environ else _linger_before_start, os.getpid())


def _was_started_by_launcher() -> bool:
    return multiprocessing.parent_process() is None and _is_launcher(os.getppid())


def _is_launcher(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip().partition(".")[0] in STARTERS
    except OSError:
        return False


def _linger_before_start(process: int) -> None:
    """At exit, if MPI was never started: the launcher sees it by itself, if it is not too early."""
    if os.getpid() == process and "mpi4py.MPI" not in sys.modules:
        time.sleep(CONNECT)


def _leave_before_start(process: int) -> None:
    """At exit, if MPI was never started: nothing is lost if all ranks end so, but others may wait in its start."""
    if os.getpid() != process or "mpi4py.MPI" in sys.modules:
        return
    world = mpi().COMM_WORLD
    others = set(range(world.size)) - {world.rank}
    sent = [world.Isend(bytearray(0), other, LEAVING) for other in others]
    deadline, status = time.monotonic() + PATIENCE, mpi().Status()
    while others and time.monotonic() < deadline:
        if world.Iprobe(tag=LEAVING, status=status):
            world.Recv(bytearray(0), status.source, LEAVING)
            others.discard(status.source)
        else:
            time.sleep(0.01)
    if others:
        say(f"rank {world.rank}: ended before distopt.world(), where {waiting(others)}\n")
        wait_until_read(PATIENCE)
        abort(1)
    for request in sent:
        request.Wait()
