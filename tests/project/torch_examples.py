"""What the examples for PyTorch train, one after the other in the same ranks, which take long to start."""

import sys

import numpy as np
import torch

from launch import PROJECT

sys.path.append(str(PROJECT / "examples"))
import torch_digits
import torch_singa

DIGITS = {
    **{mode: ["--mode", mode, "--density", "0.05"] for mode in torch_digits.MODES},
    "dense by DDP": ["--ddp"],
    "top-K by DDP": ["--ddp", "--mode", "topk", "--density", "0.05"],
    "DDP without distopt": ["--reference"],
    "PowerSGD by DDP": ["--powersgd", "1"],
}
SINGA = {
    **{option: ["--dist-option", option, "--sparsification", "0.02"] for option in torch_singa.DIST_OPTIONS},
    "plain, fused": ["--fused"],
    "partialUpdate, fused": ["--dist-option", "partialUpdate", "--fused"],
}
CASES = [*(f"digits: {name}" for name in DIGITS), *(f"SINGA: {name}" for name in SINGA)]


def digits(comm, options):
    """(training loss, test accuracy) of every epoch."""
    sys.argv = ["torch_digits.py", *options, "--epochs", "6"]
    return list(torch_digits.train(torch_digits.arguments(), comm))


def singa(options):
    """(training loss, training accuracy, evaluation accuracy) of every epoch."""
    sys.argv = ["torch_singa.py", *options, "--max-epoch", "5", "--batch-size", "32", "--learning-rate", "0.1"]
    given = torch_singa.arguments()
    torch.manual_seed(given.seed)
    model = torch_singa.CNN()
    return list(torch_singa.run(torch_singa.optimizer(given, model), model, given))


def train_all(comm):
    """Every case's rows, as 'digits: half'."""
    rows = {f"digits: {name}": np.array(digits(comm, options)) for name, options in DIGITS.items()}
    return rows | {f"SINGA: {name}": np.array(singa(options)) for name, options in SINGA.items()}
