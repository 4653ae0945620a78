"""The wire.  Adding a communicator is one file here, one test file, and one line below."""

from distopt.comm.communicator import Communicator
from distopt.comm.local import LocalCommunicator
from distopt.comm.metered import Metered
from distopt.comm.mpi import MpiCommunicator
from distopt.comm.nccl import NcclCommunicator
from distopt.comm.nccl_library import nccl_unique_id
from distopt.comm.ordered import Ordered, in_rank_order
from distopt.comm.threads import ThreadCommunicator, run_ranks
from distopt.comm.world import world

__all__ = [
    "Communicator",
    "LocalCommunicator",
    "Metered",
    "MpiCommunicator",
    "NcclCommunicator",
    "Ordered",
    "ThreadCommunicator",
    "in_rank_order",
    "nccl_unique_id",
    "run_ranks",
    "world",
]
