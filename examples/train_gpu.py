"""Train handwritten digits on GPUs by Deep Gradient Compression, lose a rank, and go on with the same bits.

    mpirun -n 4 python examples/train_gpu.py
    mpirun -n 4 python examples/train_gpu.py --folder runs/gpu --kill 15
    mpirun -n 4 python examples/train_gpu.py --folder runs/gpu

Each rank has a GPU; ``torchrun`` and ``distopt run`` start them too.  The first job trains from begin to end.  In the
second one the last rank is killed, as by a machine that fails: all ranks had saved some steps before.  The third one
goes on from there, and its parameters end with the bits of the first one's.
"""

import argparse
import hashlib
import os
import signal

import cupy
import numpy as np
from digits import MODELS, accuracy, backward, digits, forward, loss_and_slope

import distopt
from distopt.compress import DeepGradientCompression, TopK
from distopt.optim import LARS, SGD, AdaGrad, RMSProp

OPTIMIZERS = {  # the compressor has the momentum: an optimizer's would act on what is late
    "sgd": lambda: SGD(lr=0.1),
    "lars": lambda: LARS(lr=10.0, momentum=0.0),
    "rmsprop": lambda: RMSProp(lr=0.001),
    "adagrad": lambda: AdaGrad(lr=0.01),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--model", choices=MODELS, default="wide")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="samples per step of each rank")
    parser.add_argument("--folder", help="save there, and go on from what is saved there")
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    parser.add_argument("--kill", type=int, help="the step in which the last rank is killed")
    return parser.parse_args()


def main():
    given = arguments()
    world = distopt.world("cuda")
    (images, labels), test = digits(cupy)
    layers = MODELS[given.model](np.random.default_rng(1), cupy)
    params = [p for layer in layers for p in layer.params]
    compressor = DeepGradientCompression(TopK(0.01), momentum=0.9, warmup=[0.75, 0.94, 0.99], steps_per_epoch=10)
    opt = distopt.DistOpt(OPTIMIZERS[given.optimizer](), world, deterministic=True)
    if given.folder:
        opt.load(given.folder, params)
    if world.rank == 0:
        print(f"from step {opt.step_counter} of {given.steps}, {world}", flush=True)

    for step in range(opt.step_counter, given.steps):
        mine = cupy.asarray(np.random.default_rng([step, world.rank]).integers(len(labels), size=given.batch))
        loss, slope = loss_and_slope(forward(layers, images[mine]), labels[mine])
        if step == given.kill and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.step(backward(layers, slope), compressor)
        if given.folder and (step + 1) % given.every == 0:
            opt.save(given.folder, params)
        if world.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{given.steps}  loss {loss:.4f}", flush=True)

    opt.wait()
    if world.rank == 0:
        bits = hashlib.sha256(b"".join(cupy.asnumpy(p.data).tobytes() for p in params)).hexdigest()
        print(f"test accuracy {accuracy(layers, *test):.4f} after {opt.step_counter} steps, parameters {bits[:16]}")
    opt.close()


if __name__ == "__main__":
    main()
