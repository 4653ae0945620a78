"""Start of MPI and end of its jobs: launchers, time limits, and what happens if a rank fails before MPI has started."""

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
from typing import Any, NoReturn

from distopt.kernels import signatures
from distopt.resilience import job, membership
from distopt.resilience.abort import abort_on_exception, announce_exit, ending, wait_until_read
from distopt.resilience.environment import MPI_OF_SRUN, SPAWNED, SRUN, STARTERS, has_pmi_line, launched
from distopt.resilience.operation_log import START, OperationLog, recorder
from distopt.resilience.report import waiting
from distopt.resilience.timeouts import Limits, limits
from distopt.resilience.watchdog import Mailbox, Watchdog, say

# thread levels, in the order of MPI's constants
LEVELS = ("single", "funneled", "serialized", "multiple")
LEAVING = 4711  # MPI tag of ranks that end before they have met the others
TAG_SECONDS = 2.0  # for all ranks to send that tag
# seconds for other ranks to connect to prterun, which hangs if it ends a job while one of them does so
CONNECT = 1.0
STUCK = 5.0  # seconds for Open MPI's launcher to end

mailboxes: list[Mailbox] = []  # read by the watchdog


@functools.cache
def mpi() -> Any:
    """Import mpi4py's MPI, which starts MPI, and return it."""
    try:
        import mpi4py

        if mpi4py.rc.initialize and "mpi4py.MPI" not in sys.modules:
            _start(mpi4py.rc)
        from mpi4py import MPI
    except (ImportError, OSError, RuntimeError) as error:  # mpi4py without a library of MPI raises the last one
        raise ImportError(
            f"MPI is not usable here ({error}): pip install 'distopt[mpi]', or 'distopt[torch]', with which ranks of "
            "torchrun or srun need no MPI"
        ) from error
    return MPI


def brand() -> str:
    """Return the name and version of the MPI library that mpi4py uses, such as 'MPICH 5.0.2'."""
    name, version = mpi().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def number() -> int:
    """This process's number in its job: in COMM_WORLD, unless ranks have started it later."""
    return int(os.environ.get(SPAWNED) or mpi().COMM_WORLD.rank)


def check_launcher(size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the launcher started as many processes as the MPI library sees; RuntimeError if not."""
    # The numbers differ if `mpirun` and the MPI library are of different brands, or if `srun` was not told how to start
    # the library's ranks; each process would then train alone.
    launch = launched(environ)
    if not launch or launch.size == size:
        return
    mismatch = (
        f"the launcher started {launch.size} processes ({launch.reason}), but the MPI library of mpi4py, {brand()}, "
        f"sees {size}"
    )
    if launch.by == SRUN.name:
        kind = MPI_OF_SRUN["Open MPI" if brand().startswith("Open MPI") else "MPICH"]
        raise RuntimeError(
            f"{mismatch}: srun has not started them as ranks of this library, and every process would train alone. "
            f"Start with: srun --mpi={kind} -n {launch.size} python script.py; or, without MPI: "
            f"pip install 'distopt[torch]' && srun --mpi=none -n {launch.size} python script.py"
        )
    raise RuntimeError(
        f"{mismatch}: launcher and library are of different brands, and every process would train alone. "
        "Start with this environment's own launcher: distopt run -n N script.py (distopt doctor shows both)"
    )


def has_thread_multiple() -> bool:
    """Return whether any thread may call MPI at any time."""
    return bool(mpi().Query_thread() == mpi().THREAD_MULTIPLE)


def is_running() -> bool:
    """Return whether MPI has been started by mpi4py and has not been finalized."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()


def _start(rc: Any) -> None:
    """Call MPI_Init_thread, which waits for all ranks, with a time limit and without the interpreter lock."""
    # mpi4py's import would hold the lock during that wait, so that the watchdog's thread could not run.
    spec = importlib.util.find_spec("mpi4py.MPI")
    if spec is None or spec.origin is None:
        return
    library = ctypes.CDLL(spec.origin)
    # a rank that ends in an elastic job must not wait for the others, which may go on for long, or be lost
    if rc.finalize is not False and not membership.wanted():
        _end_mpi_at_exit(library)
    if has_pmi_line(os.environ):
        # another launcher's, with which MPICH refuses to start
        os.environ.pop("PMIX_NAMESPACE", None)
    level = LEVELS.index(rc.thread_level) if rc.threads else 0
    with _limited_start():
        library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))


def _end_mpi_at_exit(library: ctypes.CDLL) -> None:
    """Register MPI_Finalize for the very end of this process, as mpi4py does, but not for a forked child's."""
    # It would hang in a forked child.
    host = signatures.library()
    functions = (library.MPI_Initialized, library.MPI_Finalized, library.MPI_Finalize)
    host.end_mpi_with(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    ctypes.pythonapi.Py_AtExit(host.end_mpi)


@contextlib.contextmanager
def _limited_start() -> Iterator[None]:
    """Set a time limit for the start of MPI, if there are other ranks to wait for."""
    launch = launched()
    if not launch or launch.size == 1:
        yield
        return
    rank = launch.rank
    try:
        start_watchdog(rank)
    except RuntimeError:  # the interpreter is shutting down, and starts no thread any more
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil((limits() or Limits()).first))
    with OperationLog(recorder, f"the start of rank {rank}", [rank], others=job.absent)(START):
        yield


@functools.cache
def start_watchdog(rank: int) -> Watchdog | None:
    """Start the watchdog of this process at the first call, and return it; None if there are no time limits."""
    allowed = limits()
    if allowed is None:
        return None
    watchdog = Watchdog(rank, recorder, allowed, _abort_from_thread, mailboxes)
    # runs after the other ranks have heard of the end, before MPI is finalized
    atexit.register(watchdog.stop)
    return watchdog


def _abort_from_thread(code: int) -> None:
    """End all processes of the job, from any thread."""
    # Without MPI_THREAD_MULTIPLE it only ends this process, and the launcher ends the others.
    if is_running() and not has_thread_multiple():
        os._exit(code)
    abort(code)


def abort(code: int) -> None:
    """End all processes of the job with an exit code; the caller must have printed the reason."""
    ending.set()
    job.mark(job.SPOKEN, code)
    if not (job.is_rank() or "PMI_FD" in os.environ):
        if not is_running():
            time.sleep(CONNECT)
        _end_stuck_launcher()
    if is_running():
        mpi().COMM_WORLD.Abort(code)
    _tell_launcher(code)
    os._exit(code)  # Open MPI's launcher ends the others


def _tell_launcher(code: int) -> None:
    # Has MPICH's launcher end the job, as MPI_Abort does.
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(TAG_SECONDS)


def tell_of_exit(code: int) -> None:
    """Tell MPICH's launcher of a rank that is about to leave without ``MPI_Finalize``, for which the others wait."""
    # Of one that leaves with 0 it makes a success as often as not, and once it has not ended the others in 30 seconds.
    # Before MPI has started, and after its end, what PMI_FD names is not this rank's, or not the launcher's.
    if is_running() and not job.is_rank():
        _tell_launcher(code or 1)


def fail_by_signal() -> None:
    """From now on this process ends by a signal instead of a code other than 0; only for Open MPI's elastic jobs."""
    # Open MPI's launcher does not tell the other ranks of one that ends with such a code, whatever its options: they
    # would wait for it for ever.  The code stands in the marks that `distopt run` reads.
    signatures.library().fail_by_signal()  # at C's exit, which knows the code
    leave, process = os._exit, os.getpid()

    def by_signal(status: int) -> NoReturn:
        if status and os.getpid() == process:
            job.mark(job.OS_EXIT, status)
            os.kill(process, signal.SIGKILL)
        leave(status)

    os._exit = by_signal


def end_alone(code: int) -> None:
    """End this process alone with an exit code; the caller must have printed the reason."""
    ending.set()
    job.mark(job.SPOKEN, code)
    os._exit(code)


def _end_stuck_launcher() -> None:
    """Fork a process that kills the launcher if it does not end within ``STUCK`` seconds."""
    # Before it ends the other ranks, prterun continues those that were stopped.  If one of them then connects to it, it
    # can hang in PMIx_server_finalize, waiting for a lock, when no rank is left (3 of 20 jobs with a stopped rank).  It
    # has hung too when a rank called MPI_Abort while another one ended with a code.
    launcher = os.getppid()
    if _starter(launcher) in (None, "slurmstepd"):  # which has time limits of its own
        return
    with contextlib.suppress(OSError):
        # stays valid for this process only, if its id is used again
        handle = os.pidfd_open(launcher)
        if os.fork() == 0:
            os.setsid()
            # of the pipes and sockets that the launcher reads until they are closed
            os.closerange(0, handle)
            os.closerange(handle + 1, os.sysconf("SC_OPEN_MAX"))
            if not select.select([handle], [], [], STUCK)[0]:
                with contextlib.suppress(OSError):  # this process must not go on as a second rank
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            os._exit(0)


# ------------------------------------------------------------------------------------------- before the ranks have met


def guard_start() -> None:
    """From now on, a rank that fails before it has met the others ends the job; they would wait for it."""
    launch = launched()
    if not launch or launch.size == 1:
        return
    if not (job.is_rank() or (multiprocessing.parent_process() is None and _starter(os.getppid()))):
        return
    abort_on_exception(launch.rank, abort)
    announce_exit(launch.rank, tell_of_exit)
    if not job.is_rank() and launch.pmi and importlib.util.find_spec("mpi4py"):
        atexit.register(_leave_before_start if "PMI_FD" in os.environ else _linger_before_start, os.getpid())


def _starter(process: int) -> str | None:
    # the kernel's name of a process that starts ranks
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{process}/comm").read_text().strip().partition(".")[0]
        return name if name in STARTERS else None
    return None


def _linger_before_start(process: int) -> None:
    """Delay the exit of a process that never started MPI by ``CONNECT`` seconds."""
    # The launcher notices the exit, unless other ranks are connecting to it at that time.
    if os.getpid() == process and "mpi4py.MPI" not in sys.modules:
        time.sleep(CONNECT)


def _leave_before_start(process: int) -> None:
    """End the job at exit if this process never started MPI, unless all other ranks end in the same way."""
    # Ranks that go on would wait for this one in MPI's start.
    if os.getpid() != process or "mpi4py.MPI" in sys.modules:
        return
    world = mpi().COMM_WORLD
    missing = set(range(world.size)) - {world.rank}
    requests = [world.Isend(bytearray(0), other, LEAVING) for other in missing]
    deadline, status = time.monotonic() + TAG_SECONDS, mpi().Status()
    while missing and time.monotonic() < deadline:
        if world.Iprobe(tag=LEAVING, status=status):
            world.Recv(bytearray(0), status.source, LEAVING)
            missing.discard(status.source)
        else:
            time.sleep(0.01)
    if missing:
        say(f"rank {world.rank}: ended before distopt.world(), where {waiting(missing)}\n")
        wait_until_read(TAG_SECONDS)
        abort(1)
    for request in requests:
        request.Wait()
