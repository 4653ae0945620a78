"""Choice of the communicator for this process."""

import atexit
import os
import sys
from collections.abc import Callable

from distopt import device as gpus
from distopt.comm import owner
from distopt.comm.communicator import Communicator
from distopt.comm.elastic import Elastic
from distopt.comm.launchers import Process, transport
from distopt.comm.local import LocalCommunicator
from distopt.comm.logical import with_ranks
from distopt.comm.mpi import MpiCommunicator
from distopt.comm.nccl import NcclCommunicator
from distopt.comm.nccl_library import nccl_state
from distopt.comm.shared_memory import SharingCommunicator
from distopt.comm.threads import current_rank
from distopt.resilience import membership
from distopt.resilience.environment import LOGICAL, SPAWNED

_worlds: list[Communicator] = []


def world(device: str = "auto", logical: int | None = None) -> Communicator:
    """Return the communicator of all ranks that the launcher started, the same object at every call.

    Under ``mpirun``, ``distopt run`` or ``srun --mpi=...`` the ranks find each other by MPI; under ``torchrun``, under
    ``srun`` without PMI or without mpi4py, and where the script has initialized the process group of
    ``torch.distributed`` without a launcher of MPI, by gloo.  A process without a launcher is one rank alone, and
    imports neither.  In a thread of ``run_ranks`` it is that thread's communicator, for numpy arrays.  The ``repr`` of
    the communicator gives the reason for the choice.  The first call for a device is collective.  Under
    ``distopt run --elastic`` it goes on without the ranks it loses (``comm.Elastic``).

    Args:
        device: one of

            * 'cpu': numpy arrays, over MPI.
            * 'cuda': cupy arrays, over NCCL; every rank has a separate GPU.
            * 'auto': that of the first call; in the first one 'cuda' if on every rank the script has imported cupy and
              there are a GPU and NCCL, else 'cpu'.
        logical: ranks that live in these processes, at least as many as there are of these (``comm.Logical``), so that
            what a job learns does not depend on its processes; default: as before, at first that of ``distopt run
            --logical``, else each process is one rank.

    Raises:
        TypeError: ``logical`` is no integer.
        ImportError: there is a launcher but no mpi4py, or torchrun but no torch.
        RuntimeError: launcher and MPI library do not belong together, ranks of ``srun`` cannot meet, or ``device`` is
            'cuda' and there is no cupy, driver, GPU or NCCL; or this process, started in the place of a lost rank,
            has a GPU; or a rank has started this process, which is none.
        ValueError: ``device`` is none of these, two ranks are on one GPU, or ``device`` is 'cuda' in ``run_ranks``; or
            ``logical`` is below the number of processes, or another one than before.

    Example:
        >>> from distopt.comm import run_ranks, world
        >>> run_ranks(2, lambda comm: (world() is comm, world().size))
        [(True, 2), (True, 2)]
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    asked = os.environ.get(LOGICAL) if logical is None else logical
    rank = current_rank()
    if rank is not None and device == "cuda":
        raise ValueError("device must be 'auto' or 'cpu' in run_ranks, whose ranks have numpy arrays, got 'cuda'")
    processes = _processes(device) if rank is None else rank
    if asked is None:
        return processes._logical or processes
    if isinstance(asked, str) and not asked.isdigit():
        raise ValueError(f"{LOGICAL} must be a number of ranks, got {asked!r}")
    return with_ranks(processes, int(asked) if isinstance(asked, str) else asked)


def _processes(device: str) -> Communicator:
    """Return the communicator of all processes."""
    for known in _worlds:
        # A second communicator of the same processes would not know which of them the first one has lost, or let in.
        if device == "auto" or (device == "cuda") == (known.gpu is not None):
            return known
    if membership.joins() and not _lacks_gpu(device, alone=False):
        raise RuntimeError(
            "a process cannot take the place of a lost rank that had a GPU yet: start without --restarts, or call "
            "distopt.world('cpu') on all ranks"
        )
    comm = _waiting() if membership.joins() else _pick(device)
    if membership.wanted() and (comm.size > 1 or comm.outside):
        comm = Elastic(comm)
        atexit.register(comm.leave)
    _worlds.append(comm)
    return comm


def _waiting() -> Communicator:
    """Return the communicator of a process that takes the place of a lost rank."""
    reason = "distopt run --elastic started this rank in the place of a lost one"
    if SPAWNED in os.environ:
        return MpiCommunicator.waiting(reason)
    from distopt.comm.process_group import ProcessGroupCommunicator

    return ProcessGroupCommunicator.waiting(reason)


def _pick(device: str) -> Communicator:
    """Return the communicator over what the ranks meet."""
    process = Process.now()
    over, reason = transport(os.environ, process)
    if over:
        if not (process.group_made or process.mpi_imported):
            owner.check(over, reason)
        if over == "gloo":
            comm = _pick_group(device, reason)
        else:
            comm = _over_nccl_or(MpiCommunicator, NcclCommunicator.from_mpi, device, reason)
        owner.claim(over)
        return comm
    missing = _lacks_gpu(device, alone=True)
    if device == "cuda" and missing:
        raise RuntimeError(f"device='cuda': {missing}")
    if missing:
        return LocalCommunicator(reason=f"{reason}; {missing}")
    return LocalCommunicator(reason=f"{reason}; GPU 0", gpu=gpus.current_gpu())


def _pick_group(device: str, started: str) -> Communicator:
    """Return the communicator over torch's process group, or over NCCL between its ranks.  Collective."""
    # started: how the ranks were started, for `repr`.
    try:
        from distopt.comm.process_group import ProcessGroupCommunicator
    except ImportError as error:
        raise ImportError(
            f"{started}, and torch is not usable here ({error}): pip install 'distopt[torch]', or start with: "
            "distopt run -n N script.py"
        ) from error
    return _over_nccl_or(ProcessGroupCommunicator, NcclCommunicator.from_process_group, device, started)


def _over_nccl_or(
    host: Callable[..., SharingCommunicator], nccl: Callable[..., Communicator], device: str, started: str
) -> Communicator:
    """Return a communicator over NCCL if every rank can use it, else over the host.  Collective."""
    if device == "cuda" and not membership.wanted():
        return nccl(reason=started)
    comm = host(reason=started)
    lacks = ["device='cpu'" if device == "cpu" else ""] * comm.size
    if device == "auto":
        lacks = comm.control.gather(_lacks_gpu(device, alone=False))
    without = next((rank for rank, reason in enumerate(lacks) if reason), None)
    if without is None and membership.wanted():
        return NcclCommunicator.over(comm)
    if without is None:
        comm.close()
        return nccl(reason=started)
    comm.explain(lacks[without] if lacks[comm.rank] else f"rank {without}: {lacks[without]}")
    return comm


def _lacks_gpu(device: str, alone: bool) -> str:
    """Return why this process does not use a GPU, '' if it does."""
    if device == "cpu":
        return "device='cpu'"
    if device == "auto" and "cupy" not in sys.modules:
        return "the script has not imported cupy"
    state = gpus.gpu_state()
    if state == "ok" and not alone:
        state = nccl_state()
    return "" if state == "ok" else state
