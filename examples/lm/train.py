"""Train a small language model, on any number of ranks, in any of the methods that the study compares.

    python examples/lm/train.py [--mode sparseloco] [--size 0.05] [--steps 100] [--ranks 4]
    distopt run -n 2 examples/lm/train.py [--mode topk] ...
    torchrun --nproc-per-node 2 examples/lm/train.py ...

Started by a launcher its ranks train, else virtual ones.  The text is that of Python's standard library; the loss is on
files of it that are held out, in nats a byte.
"""

import argparse

from methods import METHODS, Run
from model import SIZES, parameters
from trainings import on_one_core, train_here, train_rank

import distopt
from distopt.comm import Metered


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=METHODS, default="dense", metavar="MODE", help=", ".join(METHODS))
    parser.add_argument("--size", choices=SIZES, default="0.05", help="millions of parameters")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="default: those of 20 bytes a parameter")
    parser.add_argument("--ranks", type=int, default=4, metavar="P", help="virtual ones, if no launcher starts others")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, help="the largest learning rate")
    parser.add_argument("--outer", type=float, help="the outer rate of local steps")
    given = parser.parse_args()
    on_one_core()
    world, of = distopt.world(), METHODS[given.mode]
    ranks = world.size if world.size > 1 else given.ranks
    rates = given.rate or of.rates[1], given.outer or of.outers[0]
    run = Run(given.mode, given.size, ranks, given.seed, *rates, given.steps)

    def tell(step, loss, wire):
        print(f"step {step:5}  loss {loss:.4f}  {wire / 1e6:.2f} MB sent", flush=True)

    if world.rank == 0:
        print(f"{of.title}: {parameters(run.size):,} parameters, {ranks} ranks, {run.length()} steps", flush=True)
    if world.size > 1:
        train_rank(run, Metered(world), tell)
    else:
        train_here(run, tell)


if __name__ == "__main__":
    main()
