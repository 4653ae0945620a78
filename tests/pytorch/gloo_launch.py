"""Run ranks of torch's process group from a test, as ``launch.run_mpi`` runs those of MPI."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import launch


def run_torch(size, function, folder, *args, timeout=120):
    """Call ``function(comm, *args)`` on ``size`` ranks; returns the ranks' dicts of arrays, in rank order."""
    import forks

    command = [__file__, launch.name_of(function), folder, json.dumps(args)]
    code, output = forks.run(forks.torchruns(), size, command, timeout)
    assert code == 0, output
    return launch.results(size, folder)


if __name__ == "__main__":
    from distopt.comm.process_group import ProcessGroupCommunicator

    launch.extend_path()
    launch.answer(ProcessGroupCommunicator())
