"""distopt in PyTorch: gradients of any model are means over ranks when ``backward()`` returns."""

from distopt.comm.process_group import ProcessGroupCommunicator
from distopt.torch.ddp import compress
from distopt.torch.exchange import GradientExchange
from distopt.torch.local_steps import OuterSteps, local_steps
from distopt.torch.state import RankState
from distopt.torch.synchronize import Synchronizer, synchronize

__all__ = [
    "GradientExchange",
    "OuterSteps",
    "ProcessGroupCommunicator",
    "RankState",
    "Synchronizer",
    "compress",
    "local_steps",
    "synchronize",
]
