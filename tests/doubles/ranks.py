"""Ranks that have a double of a GPU each."""

from distopt import run_ranks
from distopt.comm import NcclCommunicator


def on_gpus(size, main, first=0):
    """Call main(comm) on this many ranks, each with a GPU of its own, from the number ``first`` on."""

    def rank(comm):
        there = NcclCommunicator(comm.control, gpu=first + comm.rank)
        result = main(there)
        there.close()
        return result

    return run_ranks(size, rank)
