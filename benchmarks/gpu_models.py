"""A step's work on one GPU beside torch's, for real models: python -m benchmarks.gpu_models [--save]

ResNet-50's and BERT-base's tensors, parameters and gradients allocated one by one: pack + update, the update alone, and
pack + top-K of 0.1 % with its residual + update, eager and captured, against torch's fused and foreach optimizers on
tensors of their own, and against torch's DDP, whose backward pass has its gradients already, with the fused one.  One
rank: what NCCL does between ranks is not in it.
"""

import argparse
import importlib.util

import numpy as np

from benchmarks import gpu
from benchmarks.measure import report, table
from benchmarks.models import MODELS
from distopt import DistOpt, Parameter, device, optim
from distopt.comm import LocalCommunicator
from distopt.compress import ErrorFeedback, TopK

RULES = {
    "momentum sgd": lambda: optim.SGD(1e-6, momentum=0.9, weight_decay=1e-4),
    "adam": lambda: optim.Adam(1e-6, weight_decay=1e-4),
}
ANCHOR = "distopt, pack and update"


def model(shapes):
    """Parameters and gradients on the GPU."""
    make = [gpu.filled(int(np.prod(s)), seed=k).reshape(s) for k, s in enumerate(shapes)]
    params = [Parameter(f"p{k}", x) for k, x in enumerate(make)]
    return params, [gpu.filled(int(np.prod(s)), seed=k + 1).reshape(s) for k, s in enumerate(shapes)]


def ours(rule, shapes):
    """Steps of one rank."""
    comm = LocalCommunicator(gpu=device.current_gpu())
    cases = {}
    for name, compressor in ((ANCHOR, None), ("distopt, top-K 0.1 %", ErrorFeedback(TopK(0.001)))):
        params, grads = model(shapes)
        opt, pairs = DistOpt(RULES[rule](), comm), list(zip(params, grads, strict=True))
        cases[name] = lambda opt=opt, pairs=pairs, c=compressor: opt.step(pairs, c)
        opt, pairs = DistOpt(RULES[rule](), comm), list(zip(*model(shapes), strict=True))
        cases[f"{name}, captured"] = opt.capture(lambda pairs=pairs: pairs, compressor)
    return cases


def torch_steps(rule, shapes):
    """torch's fused and foreach optimizers."""
    import torch

    cases = {}
    for kind in ("fused", "foreach"):
        params = [torch.randn(s, device="cuda", requires_grad=True) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        options = {kind: True, "weight_decay": 1e-4}
        if rule == "adam":
            cases[f"torch, {kind}"] = torch.optim.Adam(params, 1e-6, **options).step
        else:
            cases[f"torch, {kind}"] = torch.optim.SGD(params, 1e-6, momentum=0.9, **options).step
    cases["torch, DDP and fused"] = ddp_step(rule, shapes)
    return cases


def ddp_step(rule, shapes, place="cuda", transport="nccl"):
    """A backward pass that fills DDP's buckets, its all-reduce of one rank, and a fused optimizer."""
    import torch

    from benchmarks import ddp

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(transport, store=torch.distributed.HashStore(), rank=0, world_size=1)
    gradients = [torch.randn(s, device=place) for s in shapes]
    model = ddp.distributed(ddp.Model(shapes, lambda: gradients).to(place))
    options = {"weight_decay": 1e-4, "fused": True}
    if rule == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 1e-6, **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9, **options)

    def step():
        model().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    gpu.need()
    tables = [gpu.versions()]
    for name in ("resnet50", "bert-base"):
        shapes = [shape for _, shape in reversed(MODELS[name]())]
        for rule in RULES:
            cases = ours(rule, shapes)
            if importlib.util.find_spec("torch"):
                cases |= torch_steps(rule, shapes)
            tables.append(table(f"{rule}, {name}", gpu.interleaved(cases), ANCHOR))
    report("gpu_models", "\n\n".join(tables), args.save)


if __name__ == "__main__":
    main()
