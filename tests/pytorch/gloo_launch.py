"""Run real ranks of ``torchrun`` from a test, as ``launch.run_mpi`` runs those of MPI."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import launch


def run_torch(size, function, folder, *args, timeout=120, environment=None):
    """Call ``function(comm, *args)`` on ``size`` ranks; returns the ranks' dicts of arrays, in rank order."""
    name = f"{function.__module__}:{function.__name__}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += [__file__, name, str(folder), json.dumps(args)]
    code, output = launch.finish(command, timeout, env={"OMP_NUM_THREADS": "1"} | (environment or {}))
    assert code == 0, output
    results = []
    for rank in range(size):
        with np.load(Path(folder) / f"{rank}.npz") as saved:
            results.append(dict(saved))
    return results


def main():
    from distopt.comm.process_group import ProcessGroupCommunicator

    name, folder, args = sys.argv[1:]
    module, function = name.split(":")
    comm = ProcessGroupCommunicator()
    result = getattr(importlib.import_module(module), function)(comm, *json.loads(args))
    np.savez(Path(folder) / f"{comm.rank}.npz", **(result or {}))


if __name__ == "__main__":
    launch.extend_path()
    main()
