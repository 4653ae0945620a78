"""Communicators: collectives over MPI, NCCL, the threads of one process, or one rank alone.

To add one, write a module with a class that defines ``exchange``, and a line in tests/transports.py.
"""

from distopt.comm.communicator import Communicator
from distopt.comm.elastic import Elastic
from distopt.comm.exact import Exact
from distopt.comm.local import LocalCommunicator
from distopt.comm.logical import Logical
from distopt.comm.metered import Metered
from distopt.comm.mpi import MpiCommunicator
from distopt.comm.nccl import NcclCommunicator
from distopt.comm.nccl_library import nccl_unique_id
from distopt.comm.ordered import Ordered, in_rank_order
from distopt.comm.threads import ThreadCommunicator, run_ranks
from distopt.comm.voted import CollectiveHandle, Voted
from distopt.comm.world import world

__all__ = [
    "CollectiveHandle",
    "Communicator",
    "Elastic",
    "Exact",
    "LocalCommunicator",
    "Logical",
    "Metered",
    "MpiCommunicator",
    "NcclCommunicator",
    "Ordered",
    "ThreadCommunicator",
    "Voted",
    "in_rank_order",
    "nccl_unique_id",
    "run_ranks",
    "world",
]
