"""Start ranks on this machine as ``srun -K --mpi=none`` does, for tests: ``python step_launch.py N COMMAND...``.

Like Slurm it sets variables for each, and ends all when one has failed; its exit code is then that one's.
"""

import os
import socket
import subprocess
import sys
import time


def variables(rank, size):
    """The environment of a task of a step, on one node."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),  # of no other step that runs now
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": socket.gethostname(),
    }


def main():
    size, command = int(sys.argv[1]), sys.argv[2:]
    ranks = [subprocess.Popen(command, env=dict(os.environ) | variables(rank, size)) for rank in range(size)]
    codes = [None]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in ranks]
    if any(codes):
        time.sleep(1)  # for the others to say what they see
    for process in ranks:
        process.kill()
        process.wait()
    sys.exit(next((code for code in codes if code), 0))


if __name__ == "__main__":
    main()
