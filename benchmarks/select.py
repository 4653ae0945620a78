"""What selection and codes cost, in passes over memory: python -m benchmarks.select [--save] [millions of elements ...]

One thread, float32.  The anchor is one read pass: a sum in C over the same residual, compiled here for this CPU.  Ours
is what a step calls: ``ErrorFeedback(...).compress`` with its Python, residual included.  Three gradients take turns,
and a residual starts where many steps of them would have brought it, evenly between zero and the entry's turn to be
sent; so every step sends other entries, and a guess from one step's values is as hard as it is in training.
"""

import argparse
import itertools

import numpy as np

from benchmarks import measure
from benchmarks.floor import read_pass
from benchmarks.models import MODELS
from distopt import kernels
from distopt.buckets import plan
from distopt.compress import ALL, BucketContext, ErrorFeedback, ExchangeContext, Packed, TopK
from distopt.compress.base import sketched
from distopt.device import DeviceMirror, zeros
from distopt.kernels.layout import BucketLayout

DENSITIES = (0.001, 0.01)
BUDGETS = {f"threshold {100 * d:g} %": 2.2 + 0.2 * (d > 0.001) for d in DENSITIES} | {
    f"top-K {100 * d:g} %": 3.0 for d in DENSITIES
}
BUDGETS |= {f"packed top-K {100 * d:g} %": 3.1 + 0.6 * (d > 0.001) for d in DENSITIES}  # top-K, and 6 ns an entry
BUDGETS |= {f"unpack and add {100 * d:g} %": 0.15 + 0.75 * (d > 0.001) for d in DENSITIES}  # once for each rank
BUDGETS |= {"two bits": 2.5, "int8": 4.0, "int4": 4.0, "one bit": 4.0}  # one pass, and two: the mean comes first


def filled(values):
    """Values in memory as a bucket has it."""
    x = zeros(values.size, values.dtype)
    x[:] = values
    return x


def lasting():
    """Scratch memory that is there again in the next step."""
    scratch = {}

    def kept(name, nbytes):
        if name not in scratch or scratch[name].size < nbytes:
            scratch[name] = zeros(nbytes, np.uint8)
        return scratch[name][:nbytes]

    return kept


def lasting_numbers():
    """Constants of kernels that are there again in the next step."""
    numbers = {}

    def kept(name, make):
        if name not in numbers:
            numbers[name] = DeviceMirror(make())
        return numbers[name]

    return kept


class Steps:
    """Gradients that take turns, and residuals as they are after many steps at some density."""

    def __init__(self, n):
        self.rng = np.random.default_rng(0)
        self.gradients = [filled(self.rng.standard_normal(n, np.float32)) for _ in range(3)]
        self.drift = np.add.reduce(self.gradients) / 3
        self.speed = float(np.abs(self.drift).mean(dtype=np.float64))
        self.turns = itertools.cycle(self.gradients)

    def threshold(self, density):
        """The magnitude that this share of the entries reaches in a step."""
        return self.speed / density

    def residual(self, density):
        x = self.rng.random(self.drift.size, np.float32) * np.float32(self.threshold(density))
        return filled(np.copysign(x, self.drift))

    def compression(self, compressor, density, bucket=None):
        """A step's call; the first ones bring the residual to where it stays, and the scratch memory to its size."""
        context = ExchangeContext(bucket=BucketContext(bucket, None, lasting(), lasting_numbers()))
        state = {"residual": self.residual(density)}

        def step():
            x = next(self.turns)
            return compressor.compress(x, state, sketched(compressor, x, state, context))

        for _ in range(6):
            step()
        return step

    def decompression(self, compressor, density):
        """What is done with every rank's payload of a step."""
        payload, out = self.compression(ErrorFeedback(compressor), density)(), zeros(self.drift.size, np.float32)
        context = ExchangeContext(bucket=BucketContext(scratch=lasting()))
        return lambda: compressor.decompress(payload, out, context)


def ours(n):
    steps, total = Steps(n), zeros(n, np.float32)
    cases = {"read pass": lambda: read_pass(total), "r += g": lambda: kernels.accumulate(next(steps.turns), total)}
    for about in ALL.values():
        for name, timed in about().timed.items():
            compressor = timed.make(steps.threshold(timed.density))
            if not compressor.traits.corrects_momentum:  # whose state has velocities, too
                cases[name] = steps.compression(compressor, timed.density)
    for d in DENSITIES:
        cases[f"unpack and add {100 * d:g} %"] = steps.decompression(Packed(TopK(d)), d)
        cases[f"add as it is {100 * d:g} %"] = steps.decompression(TopK(d), d)
    return measure.interleaved(cases, rounds=9, calls=3)


def peers(n):
    """Without a residual, which ours include.  Needs torch."""
    import torch

    torch.set_num_threads(1)
    steps = Steps(n)
    x = steps.residual(0.01)
    tensor, magnitudes = torch.from_numpy(x), np.empty_like(x)
    cases = {"read pass": lambda: read_pass(x)}
    for d in DENSITIES:
        k, least = int(d * n), float(np.quantile(np.abs(x[: 1 << 20]), 1 - d))
        cases[f"numpy argpartition {100 * d:g} %"] = lambda k=k: np.argpartition(np.abs(x, out=magnitudes), -k)[-k:]
        cases[f"torch.topk {100 * d:g} %"] = lambda k=k: torch.topk(tensor.abs(), k, sorted=False)
        cases[f"torch nonzero {100 * d:g} %"] = lambda t=least: tensor[torch.nonzero(tensor.abs() >= t).ravel()]
    return measure.interleaved(cases, rounds=3, calls=1)


def per_tensor():
    """Every tensor's own largest entries, in one call for the bucket."""
    tables = []
    for name, model in MODELS.items():
        sizes = [int(np.prod(shape)) for _, shape in model()]
        bucket = plan([n for n, _ in model()], sizes, ["float32"] * len(sizes), 10**9).buckets[0]
        steps = Steps(bucket.size)
        cases = {"read pass": lambda s=steps: read_pass(s.drift)}
        table = BucketLayout(bucket.names, [(size,) for size in bucket.sizes], bucket.offsets, bucket.dtype)
        cases |= {
            f"top-K {100 * d:g} %": steps.compression(ErrorFeedback(TopK(d, per_tensor=True)), d, table)
            for d in DENSITIES
        }
        tables.append(measure.table(f"per tensor, {name}: {len(sizes)}", measure.interleaved(cases), "read pass"))
    return tables


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("millions", nargs="*", type=float, default=[25, 100])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    tables = [measure.versions("numpy", "torch")]
    for n in (int(1e6 * millions) for millions in options.millions):
        tables.append(measure.table(f"{n:,} elements", ours(n), "read pass", BUDGETS))
        tables.append(measure.table(f"{n:,} elements, no residual", peers(n), "read pass"))
    measure.report("select", "\n".join([*tables, *per_tensor()]), options.save)


if __name__ == "__main__":
    main()
