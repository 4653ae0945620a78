"""What the host costs in a step on a GPU: python -m benchmarks.gpu_host [--save]

One of 8 ranks; every call of CUDA and NCCL is stubbed out and counted (``benchmarks.stub_cuda``), so that what is left
is the time of Python and of cupy's arrays on one core.  A real driver adds 2 to 3 us a launch and 8 us a group of NCCL.
Milliseconds are also given for a core on which a loop of 10^6 additions takes 50 ms, for which the budgets hold.
"""

import argparse
import gc
import itertools
import os
import statistics
import time

from benchmarks import stub_cuda
from benchmarks.measure import interleaved, report, versions
from benchmarks.models import MODELS
from distopt import DistOpt, LocalSteps, Parameter, optim
from distopt.compress import DCT, Chunks, DeepGradientCompression, ErrorFeedback, Packed, TopK, TwoBit

RANKS = 8
DGC = DeepGradientCompression(Packed(TopK(0.001)))
DEMO = DCT(ErrorFeedback(Packed(Chunks(32, 4096)), decay=0.999))
CHUNKS = ErrorFeedback(Packed(Chunks(), value="2bit"))
REFERENCE = 50e-3  # seconds of ``loop`` on the core for which the budgets hold


def sgd():
    """Momentum and weight decay."""
    return optim.SGD(0.1, momentum=0.9, weight_decay=1e-4)


CASES = {  # name: model, optimizer, compressor, whether gradients are new arrays in each step, exchange, budget in ms
    "ResNet-50 dense, new gradients": ("resnet50", sgd, None, True, "auto", 1.0),
    "ResNet-50 dense, gradients stay": ("resnet50", sgd, None, False, "auto", 1.0),
    "ResNet-50 dense, LAMB": ("resnet50", lambda: optim.LAMB(0.01), None, True, "auto", None),
    "BERT-base dense, new gradients": ("bert-base", sgd, None, True, "auto", 2.5),
    "ResNet-50 top-K 0.1 %, gather": ("resnet50", sgd, ErrorFeedback(TopK(0.001)), True, "gather", 3.0),
    "ResNet-50 top-K 0.1 %, two phases": ("resnet50", sgd, ErrorFeedback(TopK(0.001)), True, "auto", 3.0),
    "ResNet-50 chunks 64 of 4,096, packed": ("resnet50", sgd, CHUNKS, True, "auto", None),
    "ResNet-50 DeMo, packed": ("resnet50", lambda: optim.Signum(1e-3), DEMO, True, "auto", None),
    "ResNet-50 two bits, two phases": ("resnet50", sgd, ErrorFeedback(TwoBit()), True, "auto", None),
    "ResNet-50 DGC packed, gather": ("resnet50", lambda: optim.SGD(0.1), DGC, True, "gather", 4.0),
    "ResNet-50 DGC packed, two phases": ("resnet50", lambda: optim.SGD(0.1), DGC, True, "auto", 4.0),
}


def step_of(model, make, compressor, new, exchange):
    """A step of a rank."""
    shapes = [shape for _, shape in reversed(MODELS[model]())]
    params = [Parameter(f"p{k}", stub_cuda.array(shape)) for k, shape in enumerate(shapes)]
    sets = [[(p, stub_cuda.array(p.data.shape)) for p in params] for _ in range(3 if new else 1)]
    losses, opt = itertools.cycle(sets), DistOpt(make(), stub_cuda.communicator(RANKS))
    return lambda: opt.step(next(losses), compressor, exchange=exchange)


OTHERS = {  # of ResNet-50, with gradients that are new arrays: what is made of a communicator, and how it steps
    "a local step": (lambda comm: LocalSteps(sgd(), comm, every=10**6), lambda opt, loss: opt(loss)),
    "a local step and a dense exchange": (lambda comm: LocalSteps(sgd(), comm, every=1), lambda opt, loss: opt(loss)),
    "a local step, an exchange of chunks": (
        lambda comm: LocalSteps(sgd(), comm, every=1, outer=optim.SGD(1.0), compressor=CHUNKS),
        lambda opt, loss: opt(loss),
    ),
    "a share of 1/200 averaged": (
        lambda comm: DistOpt(sgd(), comm),
        lambda opt, loss: opt.backward_and_partial_update(loss, share=0.005),
    ),
}


def other_step_of(make, step):
    """A step of a rank that is not one of ``DistOpt.step``."""
    params = [Parameter(name, stub_cuda.array(shape)) for name, shape in reversed(MODELS["resnet50"]())]
    losses = itertools.cycle([[(p, stub_cuda.array(p.data.shape)) for p in params] for _ in range(3)])
    opt = make(stub_cuda.communicator(RANKS))
    return lambda: step(opt, next(losses))


def synchronized():
    """An exchange of ``dt.synchronize``, whose gradients are new tensors; torch's own part of a pass is not in it."""
    import torch

    import distopt.torch as dt

    stub_cuda.install_torch()
    model, shapes = torch.nn.Module(), [shape for _, shape in MODELS["resnet50"]()]
    model.all = torch.nn.ParameterList(torch.empty(shape) for shape in shapes)
    sync = dt.synchronize(model, group=stub_cuda.communicator(RANKS), overlap=False)
    sets = itertools.cycle([[torch.empty(shape) for shape in shapes] for _ in range(3)])

    def step():
        for p, gradient in zip(model.parameters(), next(sets), strict=True):
            p.grad = gradient
        sync.exchange()

    return step


def loop():
    """What measures a core."""
    x = 0
    for i in range(10**6):
        x += i
    return x


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    stub_cuda.install()
    names = ("kernels", "graphs", "NCCL calls", "NCCL groups", "copies", "memsets", "event operations")
    lines = [versions("numpy", "cupy-cuda13x", "torch"), ""]
    lines += [f"  {'one step of one of 8 ranks':46}" + "".join(f"{n:>17}" for n in names) + f"{'ms':>8}{'scaled':>8}"]
    cases = {name: (lambda case=case: step_of(*case), budget) for name, (*case, budget) in CASES.items()}
    cases |= {f"ResNet-50, {name}": (lambda case=case: other_step_of(*case), None) for name, case in OTHERS.items()}
    cases |= {"ResNet-50, dt.synchronize": (synchronized, None)}  # last: torch's tensors are on the GPU from then on
    for name, (make, budget) in cases.items():
        step = make()
        for _ in range(8):
            step()
        stub_cuda.counts.clear()
        step()
        per_step = dict(stub_cuda.counts)
        gc.collect()
        times = interleaved({"step": step, "loop": loop}, rounds=9, calls=20, clock=time.thread_time)
        scaled = [mine / this * REFERENCE * 1e3 for mine, this in zip(times["step"], times["loop"], strict=True)]
        line = f"  {name:46}" + "".join(f"{per_step.get(n, 0):17}" for n in names)
        line += f"{statistics.median(times['step']) * 1e3:8.2f}{statistics.median(scaled):8.2f}"
        if budget:
            line += f"  budget {budget:g}: {'met' if statistics.median(scaled) <= budget else 'MISSED'}"
        lines.append(line)
    report("gpu_host", "\n".join(lines), given.save)


if __name__ == "__main__":
    main()
