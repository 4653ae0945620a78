"""Over what the ranks meet that a launcher has started with this process.

``transport`` decides; ``distopt.world()`` and ``distopt doctor`` ask it.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from distopt.resilience import membership
from distopt.resilience.environment import LINE, RUN_ID, SRUN, launched, torchs

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 32000)  # below those that the kernel gives away


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
    if process.has_line or LINE in environ:
        yield Transport("gloo", "distopt run --elastic started this rank")
    torch = torchs(environ)
    if torch and RUN_ID in environ:
        if torch.size > 1 or process.group_made:
            yield Transport("gloo", torch.reason)
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
    if torch and torch.size > 1 and environ.keys() & {"LOCAL_RANK", "MASTER_ADDR"}:
        yield Transport("gloo", torch.reason)
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


class SlurmStep(NamedTuple):
    """Where the ranks of a Slurm step meet, if neither MPI nor torchrun tells them."""

    rank: int
    size: int
    host: str  # where rank 0 is, as the other ranks know it; 127.0.0.1 if all are on one machine
    port: int
    name: str  # name of the step


def meeting(environ: Mapping[str, str] = os.environ) -> SlurmStep | None:
    """Return where the ranks of a Slurm step meet; None if RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT tell torch.

    Example:
        >>> step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2"}
        >>> meeting(step | {"SLURM_STEP_NODELIST": "gpu[07-08,11]"})
        SlurmStep(rank=3, size=4, host='gpu07', port=20570, name='71.2')
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
    return SlurmStep(launch.rank, launch.size, host, int(environ.get("MASTER_PORT") or port), f"{job}.{step}")


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    Example:
        >>> first_host("rack[3-4]n[01-16],login"), first_host("a-1,b"), first_host("gpu[7,9-12]")
        ('rack3n01', 'a-1', 'gpu7')
    """
    expanded = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes)
    return expanded.partition(",")[0]
