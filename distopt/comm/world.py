"""Which communicator this process is meant to use."""

import os
import sys
from collections.abc import Mapping

from distopt import device as gpus
from distopt.comm import mpi_control
from distopt.comm.communicator import Communicator
from distopt.comm.local import LocalCommunicator
from distopt.comm.mpi import MpiCommunicator
from distopt.comm.nccl import NcclCommunicator
from distopt.comm.nccl_library import nccl_state
from distopt.comm.threads import current_rank

_worlds: dict[str, Communicator] = {}


def world(device: str = "auto") -> Communicator:
    """The communicator of all ranks that the launcher started, the same object at every call; its repr says why.

    Under ``mpirun``, ``srun`` or ``distopt run`` the ranks find each other by MPI; a process that nobody launched is
    one rank alone, and MPI is not even imported.  A thread of ``run_ranks`` is the rank that it was started as, with
    numpy arrays.  ``device``:

    * 'cpu': numpy arrays, which travel over MPI.
    * 'cuda': cupy arrays, which travel over NCCL; every rank has a GPU of its own.
    * 'auto': as 'cuda' if on every rank the script has imported cupy and there are a GPU and NCCL; else as 'cpu'.

    Raises ImportError if there is a launcher but no mpi4py; RuntimeError if launcher and MPI library do not belong
    together, if torchrun started this process as one of several, or if ``device='cuda'`` and there is no cupy, driver,
    GPU or NCCL; ValueError for another device, if two ranks are on one GPU, and for a GPU in ``run_ranks``.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    rank = current_rank()
    if rank is not None:
        if device == "cuda":
            raise ValueError("device must be 'auto' or 'cpu' in run_ranks, whose ranks have numpy arrays, got 'cuda'")
        return rank
    if device not in _worlds:
        _worlds[device] = _pick(device)
    return _worlds[device]


def _pick(device: str) -> Communicator:
    started = mpi_control.launched()
    if started or "mpi4py.MPI" in sys.modules:
        return _pick_wire(device, started[1] if started else "mpi4py.MPI was imported")
    _check_alone()
    place = _lacks_gpu(device, alone=True)
    if device == "cuda" and place:
        raise RuntimeError(f"device='cuda': {place}")
    if place:
        return LocalCommunicator(why=f"no MPI launcher; {place}")
    return LocalCommunicator(why="no MPI launcher; GPU 0", gpu=gpus.current_gpu())


def _check_alone(environ: Mapping[str, str] = os.environ) -> None:
    """RuntimeError if this process was started as one of several by a launcher of torch's kind, which starts no MPI."""
    size = environ.get("WORLD_SIZE", "")
    if size.isdigit() and int(size) > 1 and "RANK" in environ and environ.keys() & {"LOCAL_RANK", "MASTER_ADDR"}:
        raise RuntimeError(
            f"a launcher such as torchrun started {size} processes (RANK={environ['RANK']}, WORLD_SIZE={size}), which "
            "cannot meet without MPI: every process would train alone. Start with: distopt run -n N script.py, or "
            "mpirun -n N python script.py; a process that is to be alone takes DistOpt(opt, comm.LocalCommunicator())"
        )


def _pick_wire(device: str, started: str) -> Communicator:
    """Ranks that differ in what they have all take what all of them have."""
    if device == "cuda":
        return NcclCommunicator.from_mpi(why=started)
    comm = MpiCommunicator(why=started)
    lacks = comm.control.gather(_lacks_gpu(device, alone=False)) if device == "auto" else ["device='cpu'"] * comm.size
    poor = next((rank for rank, text in enumerate(lacks) if text), None)
    if poor is None:
        comm.close()
        return NcclCommunicator.from_mpi(why=started)
    comm.explain(lacks[poor] if lacks[comm.rank] else f"rank {poor}: {lacks[poor]}")
    return comm


def _lacks_gpu(device: str, alone: bool) -> str:
    """Why this process does not use a GPU; '' if it does."""
    if device == "cpu":
        return "device='cpu'"
    if device == "auto" and "cupy" not in sys.modules:
        return "the script has not imported cupy"
    state = gpus.gpu_state()
    if state == "ok" and not alone:
        state = nccl_state()
    return "" if state == "ok" else state
