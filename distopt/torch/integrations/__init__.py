"""distopt inside of trainers, whose loop is not the script's: accelerate, transformers, Lightning.

Each module imports one of them, and nobody else does.
"""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distopt.comm import world
from distopt.compress import Compressor
from distopt.torch.ddp import compress
from distopt.torch.exchange import GradientExchange
from distopt.torch.synchronize import synchronize
from distopt.torch.tensors import is_dtensor

# of a checkpoint of theirs: the folder with what belongs to the exchange
FOLDER = "distopt"


def exchange_of(model: torch.nn.Module, compressor: Compressor | None, options: dict[str, Any]) -> GradientExchange:
    """Exchange the gradients of a model as a trainer has prepared it; alone, it is the script's own.  Collective."""
    if isinstance(model, DistributedDataParallel) or any(map(is_dtensor, model.parameters())):
        return compress(model, compressor, **options)
    if "group" not in options and (ranks := world()).size > 1:
        raise ValueError(
            f"the trainer must train a DistributedDataParallel, got a {type(model).__name__} in {ranks!r}; if it takes "
            "itself for one process of one, start it by torchrun, and ask for all of them (Lightning: strategy='ddp', "
            "devices=, num_nodes=)"
        )
    return synchronize(model, compressor, **options)
