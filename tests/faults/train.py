"""A script of which one rank goes wrong before step 8: train.py FAULT RANK."""

import ctypes
import os
import signal
import sys
import time

import numpy as np

import distopt
from distopt.comm import mpi_start
from distopt.resilience.timeouts import Limits

fault, culprit = sys.argv[1], int(sys.argv[2])
given = mpi_start.limits


def limits():
    """As given, but for the start, in which a busy machine may keep ranks apart."""
    found = given()
    return found and Limits(usual=1.0 if fault.startswith("slow") else found.usual, first=20.0)


mpi_start.limits = limits
world = distopt.world()
opt = distopt.DistOpt(threshold=4, overlap=fault == "stop halfway")
params = [distopt.Parameter(f"p{k}", np.ones(8)) for k in range(3)]
x = np.ones(3)


def backward(step):
    if world.rank == culprit:
        time.sleep(2.0 * (step == 0 and fault == "slow start") + 0.5 * (fault == "late" and step < 4))
        if step == 7 and fault != "stop halfway":
            go_wrong()
    for k, p in enumerate(params):
        if world.rank == culprit and (step, k, fault) == (7, 1, "stop halfway"):
            time.sleep(0.3)  # the first bucket is on its way
            go_wrong()
        yield p, np.ones(8)


def go_wrong():
    print(f"fault at {time.time()}", flush=True)
    if fault.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault in ("sleep", "slow step"):
        time.sleep(60)  # asleep
    elif fault == "loop":
        while True:  # in a loop
            pass
    elif fault == "verb":
        world.all_reduce(x)  # alone
    elif fault == "interpreter lock":
        ctypes.PyDLL(None).sleep(60)
    elif fault == "leave":
        sys.exit(0)
    elif fault == "raise":
        raise ZeroDivisionError("boom")


print(f"pid {os.getpid()}", flush=True)
for step in range(10 if fault != "late" else 300):
    opt(backward(step))
    if fault == "leave" and step == 6 and world.rank != culprit:
        world.barrier()
print("rank", world.rank, "is done")
