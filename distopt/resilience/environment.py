"""What launchers tell a process by environment variables, in one place: their names, and what reads them.

It needs only the standard library, since the runner of ranks (``rank.py``) loads it by its path.
"""

import os
import re
import stat
from collections.abc import Mapping
from typing import NamedTuple

# -- of distopt run

# '1' in a job that goes on without the ranks it loses
WANTED = "DISTOPT_ELASTIC"
# ranks that live in the processes of a job, if these are not one each
LOGICAL = "DISTOPT_LOGICAL"
# number of the file descriptor of the socket to the launcher
LINE = "DISTOPT_LINE"
# number of this process among all that the launcher has started: set where distopt run starts the ranks itself, maybe
# under another launcher
MEMBER = "DISTOPT_MEMBER"
# the same of one that ranks of MPI have started in the place of a lost one
SPAWNED = "DISTOPT_SPAWNED"
# address of this machine by which ranks of others reach it
ADDRESS = "DISTOPT_ADDRESS"
# number of the file descriptor of the socket over which the launcher asks a process for forks
WARM = "DISTOPT_WARM"
# '1' for a process that takes the place of a lost rank
JOINS = "DISTOPT_JOINS"
# the process that has become a rank, and a digest of what made it one
OWNER = "DISTOPT_OWNER"

# -- of launchers of MPI, of Slurm and of torch

# Steps of Slurm that are a shell, in which one process runs: of sbatch, and of salloc.
SHELLS = {"4294967291", "4294967290", "batch", "interactive"}
MPI_OF_SRUN = {"MPICH": "pmi2", "Open MPI": "pmix"}  # option --mpi of srun for each MPI library
# by which an MPI finds its ranks
PMI = {"PMI_RANK", "PMI_FD", "PMIX_RANK", "PMI_CONTROL_PORT", "I_MPI_PMI_LIBRARY"}
# By which a launcher of MPI tells a process which of its ranks it is, and what it must talk to.
IDENTITY = re.compile(
    r"(OMPI_(COMM_WORLD|UNIVERSE|APP_CTX|FIRST|FILE|NUM_APP)|PMI|MV2_COMM_WORLD|PMIX_(RANK|NAMESPACE|ID|SERVER))(_|$)"
    r"|MPI_LOCALN?RANK"
)


class LauncherVariables(NamedTuple):
    """The names of a launcher's environment variables."""

    size: str
    rank: str
    name: str


OPEN_MPI = LauncherVariables("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "an Open MPI mpirun")
MPICH = LauncherVariables("PMI_SIZE", "PMI_RANK", "an MPICH-like mpiexec")
SRUN = LauncherVariables("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun")
TORCHRUN = LauncherVariables("WORLD_SIZE", "RANK", "torchrun")
RUN_ID = "TORCHELASTIC_RUN_ID"  # of torchrun alone: scripts set the others themselves, too
# By what else an environment with these two shows who has set them.
TORCHS_LAUNCHERS = {RUN_ID: "torchrun", "RAY_JOB_ID": "Ray"}
# As IDENTITY, for ranks that meet by torch.
TORCHS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", RUN_ID, "SLURM_PROCID"}
# Kernel names of the processes that start ranks; a process with another parent was started by a rank, or by a script.
STARTERS = ("hydra_pmi_proxy", "pmi_proxy", "prterun", "prted", "orted", "mpirun", "mpiexec", "slurmstepd")


class Launch(NamedTuple):
    """What a launcher announced."""

    by: str
    size: int
    rank: int
    # whether an MPI library can learn from the launcher where the ranks are; srun does not always tell
    pmi: bool
    reason: str


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what a launcher of MPI, or srun, announced in the environment; None without one.

    Example:
        >>> launched({"PMI_SIZE": "2", "PMI_RANK": "0"}).reason
        'an MPICH-like mpiexec set PMI_SIZE=2'
        >>> launched({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}).reason
        'srun without PMI set SLURM_STEP_NUM_TASKS=2'
    """
    tasks = "" if environ.get("SLURM_STEP_ID") in SHELLS else environ.get(SRUN.size, "")
    # one around the other
    of_mpi = (MPICH, OPEN_MPI) if has_pmi_line(environ) else (OPEN_MPI, MPICH)
    for launcher in (*of_mpi, SRUN):
        size = tasks if launcher is SRUN else environ.get(launcher.size, "")
        if size.isdigit():
            # which set PMI_SIZE too
            by = SRUN if launcher is MPICH and size == tasks != "1" else launcher
            pmi = launcher is not SRUN or not PMI.isdisjoint(environ)
            name = f"srun with{'' if pmi else 'out'} PMI" if by is SRUN else by.name
            reason = f"{name} set {launcher.size}={size}"
            return Launch(by.name, int(size), int(environ.get(launcher.rank) or 0), pmi, reason)
    return None


def has_pmi_line(environ: Mapping[str, str]) -> bool:
    """Tell if this process has the connection to MPICH's launcher that PMI_FD names; its children do not have it."""
    try:
        return stat.S_ISSOCK(os.fstat(int(environ["PMI_FD"])).st_mode)
    except (KeyError, ValueError, OSError):
        return False


def torchs(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what torchrun, Ray, or a script, announced for ``torch.distributed``; None without it.

    Example:
        >>> torchs({"RANK": "0", "WORLD_SIZE": "2", "RAY_JOB_ID": "01000000"}).reason
        'Ray set RANK=0, WORLD_SIZE=2'
        >>> torchs({"RANK": "0", "WORLD_SIZE": "2"}).reason
        'the environment has RANK=0, WORLD_SIZE=2'
    """
    size, rank = environ.get(TORCHRUN.size, ""), environ.get(TORCHRUN.rank, "")
    if not (size.isdigit() and rank.isdigit()):
        return None
    told = f"RANK={rank}, WORLD_SIZE={size}"
    by = next((by for name, by in TORCHS_LAUNCHERS.items() if name in environ), "")
    return Launch(by, int(size), int(rank), False, f"{by} set {told}" if by else f"the environment has {told}")


def number_in_job(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process in a job of ``distopt run``, which has started it, or had MPI start it."""
    return next(int(environ[name]) for name in (MEMBER, SPAWNED, OPEN_MPI.rank, MPICH.rank) if name in environ)


def of_no_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a launcher around this process, or before it in this shell, has set."""
    names = {RUN_ID, OWNER, JOINS, WANTED, LINE, MEMBER, ADDRESS, SPAWNED, WARM}
    return {name: value for name, value in environ.items() if name not in names and not IDENTITY.match(name)}
