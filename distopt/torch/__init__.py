"""distopt in PyTorch: gradients of any model are means over ranks when ``backward()`` returns."""

from distopt.comm.process_group import ProcessGroupCommunicator
from distopt.torch.exchange import GradientExchange
from distopt.torch.synchronize import Synchronizer, compress, synchronize

__all__ = ["GradientExchange", "ProcessGroupCommunicator", "Synchronizer", "compress", "synchronize"]
