"""Which communicator this process is meant to use."""

import sys

from distopt.comm.communicator import Communicator
from distopt.comm.local import LocalCommunicator
from distopt.comm.mpi import MpiCommunicator, launched
from distopt.device import gpu_state

_worlds: dict[str, Communicator] = {}


def world(device: str = "auto") -> Communicator:
    """The communicator of all ranks that the launcher started, the same object at every call; its repr says why.

    ``device`` is 'auto' or 'cpu'.  Under ``mpirun``, ``srun`` or ``distopt run`` this is MPI, with numpy arrays; in a
    process that nobody launched it is one rank alone, and MPI is not even imported.

    Raises ImportError if there is a launcher but no mpi4py, RuntimeError if launcher and MPI library do not belong
    together or if ``device='cuda'``, which does not exist yet, and ValueError for another device.
    """
    if device == "cuda":
        raise RuntimeError("device='cuda' is not there yet: NCCL is not spoken in this version; use device='cpu'")
    if device not in ("auto", "cpu"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device not in _worlds:
        _worlds[device] = _pick("device='cpu'" if device == "cpu" else _without_gpu())
    return _worlds[device]


def _pick(place: str) -> Communicator:
    started = launched()
    if started:
        return MpiCommunicator(why=f"{started[1]}; {place}")
    if "mpi4py.MPI" in sys.modules:
        return MpiCommunicator(why=f"mpi4py.MPI was imported; {place}")
    return LocalCommunicator(why=f"no MPI launcher; {place}")


def _without_gpu() -> str:
    state = gpu_state()
    return "a GPU is there, but NCCL is not spoken in this version" if state == "ok" else state
