"""Run real ranks of ``torchrun`` from a test, as ``launch.run_mpi`` runs those of MPI."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import launch


def run_torch(size, function, folder, *args, timeout=120, environment=None):
    """Call ``function(comm, *args)`` on ``size`` ranks; returns the ranks' dicts of arrays, in rank order."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), __file__]
    environment = {"OMP_NUM_THREADS": "1"} | (environment or {})
    return launch.results(command, size, function, folder, args, timeout, environment)


if __name__ == "__main__":
    from distopt.comm.process_group import ProcessGroupCommunicator

    launch.extend_path()
    launch.answer(ProcessGroupCommunicator())
