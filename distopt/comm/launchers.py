"""Launchers: which one started this process, and over what its ranks meet.  It reads the environment, and imports none.

``transport`` decides; ``distopt.world()`` and ``distopt doctor`` ask it.
"""

import importlib.util
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distopt.resilience import membership

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 32000)  # below those that the kernel gives away
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


class Launch(NamedTuple):
    """What a launcher of MPI, or srun, announced."""

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


class Process(NamedTuple):
    """What this process has, apart from its environment."""

    mpi4py: bool = True  # it is installed
    torch: bool = True  # it is installed
    mpi_imported: bool = False  # the script has imported `mpi4py.MPI`
    group_made: bool = False  # the script has initialized the process group of `torch.distributed`
    has_line: bool = False

    @classmethod
    def now(cls) -> "Process":
        """Return what this process has now."""
        distributed = sys.modules.get("torch.distributed")
        return cls(
            mpi4py=importlib.util.find_spec("mpi4py") is not None,
            torch=importlib.util.find_spec("torch") is not None,
            mpi_imported="mpi4py.MPI" in sys.modules,
            group_made=bool(distributed and distributed.is_available() and distributed.is_initialized()),
            has_line=membership.line() is not None,
        )


class Transport(NamedTuple):
    """Over what ranks meet, and why."""

    over: str  # 'MPI'; 'gloo', a process group of torch; '' for one rank alone
    reason: str  # who started this process, in words


def transport(environ: Mapping[str, str], process: Process) -> Transport:
    """Decide over what the ranks meet that were started with this one.

    Example:
        >>> srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
        >>> transport(srun, Process())
        Transport(over='gloo', reason='srun without PMI set SLURM_STEP_NUM_TASKS=2')
        >>> transport(srun | {"PMIX_RANK": "1"}, Process()).over
        'MPI'
        >>> torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}
        >>> transport(srun | {"DISTOPT_LINE": "3"}, Process())
        Transport(over='gloo', reason='distopt run --elastic started this rank')
        >>> transport(srun | torchrun, Process())  # srun started torchrun, which started this process
        Transport(over='gloo', reason='torchrun set RANK=0, WORLD_SIZE=2')
    """
    return next(_transports(environ, process))


def _transports(environ: Mapping[str, str], process: Process) -> Iterator[Transport]:
    """Yield what fits, best first."""
    # The innermost launcher comes first: torchrun, then those of MPI and srun.
    if process.has_line or membership.LINE in environ:
        yield Transport("gloo", "distopt run --elastic started this rank")
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    by_torch = rank.isdigit() and size.isdigit() and bool(environ.keys() & {"LOCAL_RANK", "MASTER_ADDR"})
    torchrun = Transport("gloo", f"torchrun set RANK={rank}, WORLD_SIZE={size}")
    if rank.isdigit() and size.isdigit() and "TORCHELASTIC_RUN_ID" in environ:
        if int(size) > 1 or process.group_made:
            yield torchrun
        yield Transport("", "torchrun started one process")
    launch = launched(environ)
    if launch:
        by_srun = launch.by == SRUN.name
        if process.mpi_imported or (launch.pmi and process.mpi4py and not (by_srun and launch.size == 1)):
            yield Transport("MPI", launch.reason)
        if launch.size > 1:
            if process.group_made or (by_srun and process.torch):
                yield Transport("gloo", launch.reason)
            yield Transport("MPI", launch.reason)  # which raises, and says what to do
    if by_torch and int(size) > 1:
        yield torchrun
    if process.group_made:
        yield Transport("gloo", "the process group was initialized")
    if process.mpi_imported:
        yield Transport("MPI", "mpi4py.MPI was imported")
    if launch:
        yield Transport("", launch.reason)
    tasks = environ.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" in environ and tasks not in ("", "1"):
        yield Transport("", f"no launcher, as srun has not started this one of {tasks} tasks")
    yield Transport("", "no launcher")


class Meeting(NamedTuple):
    """Where the ranks of a Slurm step meet, if neither MPI nor torchrun tells them."""

    rank: int
    size: int
    host: str  # where rank 0 is, as the other ranks know it; 127.0.0.1 if all are on one machine
    port: int
    name: str  # name of the step


def meeting(environ: Mapping[str, str] = os.environ) -> Meeting | None:
    """Return where the ranks of a Slurm step meet; None if RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT tell torch.

    Example:
        >>> step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2"}
        >>> meeting(step | {"SLURM_STEP_NODELIST": "gpu[07-08,11]"})
        Meeting(rank=3, size=4, host='gpu07', port=20570, name='71.2')
        >>> meeting(step | {"SLURM_STEP_NODELIST": "gpu07"}).host
        '127.0.0.1'
    """
    # MASTER_ADDR and MASTER_PORT, if they are set, take the place of the step's first host and of a port that follows
    # from the numbers of job and step.
    launch = launched(environ)
    if launch is None or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    alone = environ.get("SLURM_STEP_NUM_NODES") == "1" or (nodes and not set(nodes) & set("[,"))
    host = environ.get("MASTER_ADDR") or (LOOPBACK if alone else first_host(nodes))
    if not host:
        raise RuntimeError(f"{launch.reason}, and neither SLURM_STEP_NODELIST nor MASTER_ADDR tells where rank 0 is")
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    port = PORTS[(8 * int(job) + int(step)) % len(PORTS)]
    return Meeting(launch.rank, launch.size, host, int(environ.get("MASTER_PORT") or port), f"{job}.{step}")


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    Example:
        >>> first_host("rack[3-4]n[01-16],login"), first_host("a-1,b"), first_host("gpu[7,9-12]")
        ('rack3n01', 'a-1', 'gpu7')
    """
    expanded = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes)
    return expanded.partition(",")[0]
