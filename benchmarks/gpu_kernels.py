"""Every kernel on a GPU, as a fraction of the speed of a copy: python -m benchmarks.gpu_kernels [--save]

Arrays of 2^28 float32, far larger than any cache, or of as many as there is room for; bytes are those that the
equations must move.
"""

import argparse
import functools
import itertools
from statistics import NormalDist

import numpy as np

from benchmarks import gpu
from benchmarks.measure import report
from distopt import device, kernels, optim
from distopt.compress import ALL, BucketContext, DeviceContext, ExchangeContext
from distopt.compress.base import sketched
from distopt.kernels.layout import BucketLayout

ELEMENTWISE, SELECT = 0.9, 0.8  # budgets, of the copy
RANKS = 4  # whose payloads or parts are added up
ELEMENTS, BYTES_EACH = 1 << 28, 92  # of GPU memory: the copy's, and the states of all rules in turn
RULES = {name: timed for about in optim.ALL.values() for name, timed in about().timed.items()}


def elementwise(n):
    """(bytes, case) by name."""
    x, y = gpu.filled(n), gpu.filled(n, seed=1)
    half, bad = device.gpu_zeros(n, np.float16), device.gpu_zeros(1, np.int64)
    table = BucketLayout(["x"], [(n,)], [0], "float32").point_to([x])
    home = BucketLayout(["y"], [(n,)], [0], "float32").point_to([y])
    cases = {
        "pack": (8 * n, lambda: kernels.pack(table, y, 1.0, bad, np.inf)),
        "pack, a view: look only": (4 * n, lambda: kernels.pack(home, y, 1.0, bad, np.inf)),
        "unpack": (8 * n, lambda: kernels.unpack(table, y, 0.5)),
        "lerp": (12 * n, lambda: kernels.lerp(table, y, 0.5)),
        "accumulate": (12 * n, lambda: kernels.accumulate(x, y)),
        "clip": (8 * n, lambda: kernels.clip(x, 3.0)),
        "encode_half": (10 * n, lambda: kernels.encode_half(x, half, x[:0], 0.5, 65504.0)),
        "decode_half": (6 * n, lambda: kernels.decode_half(half, y, 0.5)),
        "from_half": (6 * n, lambda: kernels.from_half(half, y)),
    }
    for name, (make, arrays) in RULES.items():
        opt = make()
        opt.prepare(0.5)
        cases[name] = (4 * arrays * n, lambda opt=opt: opt.update_bucket(table, [(0, 1, y)]))
    narrow = BucketLayout(["h"], [(n,)], [0], "float16").point_to([half])
    mixed = optim.SGD(1e-6, momentum=0.9, multi_precision=True)
    mixed.prepare(0.5)
    cases["momentum sgd, float16 and master"] = (24 * n, lambda: mixed.update_bucket(narrow, [(0, 1, y)]))
    return cases


def timed_compressors():
    """(compressor, what is timed of it) by name."""
    every = [item for about in ALL.values() for item in about().timed.items()]
    # gradients are normal
    return {name: (timed.make(NormalDist().inv_cdf(1 - timed.density / 2)), timed) for name, timed in every}


def context_of(n):
    """What compressors of a matrix of n elements are given: DGC leaves what has one dimension as it is."""
    kept, constants = {}, {}

    def scratch(name, nbytes):
        if name not in kept or kept[name].size < nbytes:
            kept[name] = device.gpu_zeros(nbytes, np.uint8)
        return kept[name][:nbytes]

    def constant(name, make):
        if name not in constants:
            constants[name] = device.DeviceMirror(make())
        return constants[name]

    bucket = BucketLayout(["x"], [(1, n)], [0], "float32")
    return ExchangeContext(
        bucket=BucketContext(bucket, scratch=scratch, constant=constant), device=DeviceContext(capacity=n // 32)
    )


def selection(n):
    """(bytes, case) by name: the gradient and the residual are read, the residual is written; by one bit twice.

    DGC reads and writes velocities too.

    For a threshold gradients take turns with their opposites, so that after two calls the residual is what it was,
    zero, and the same entries are found every time.
    """
    grad, opposite, context, cases = gpu.filled(n), gpu.filled(n), context_of(n), {}
    kernels.scale(opposite, -1.0)
    for name, (compressor, timed) in timed_compressors().items():
        turns = itertools.cycle([grad, opposite] if compressor.traits.bounded else [grad])
        cases[name] = (
            int((timed.moved + timed.sent) * n),
            functools.partial(compress, compressor, turns, {}, context),
        )
    return cases


def summation(n):
    """(bytes, case) by name: the payloads, or parts, of some ranks are read, and the sum is written."""
    grad, out, context, cases = gpu.filled(n), gpu.filled(n), context_of(n), {}
    for name, (compressor, _) in timed_compressors().items():
        if not compressor.traits.summable:
            payload = compressor.compress(grad, {}, context)
            payloads = [device.copied(payload) for _ in range(RANKS)]
            cases[f"sum of {name}"] = (
                RANKS * payload.nbytes + 4 * n,
                functools.partial(compressor.decompress_all, payloads, out, context),
            )
    table = BucketLayout(["x"], [(n,)], [0], "float32").point_to([out])
    parts, bad = [gpu.filled(n) for _ in range(RANKS)], device.gpu_zeros(RANKS + 1, np.int64)
    halves = [device.gpu_zeros(n, np.float16) for _ in range(RANKS)]
    of_parts, of_halves, of_out = (
        device.DeviceMirror(np.array([device.address(x) for x in arrays], np.uintp))
        for arrays in (parts, halves, [out])
    )
    # held: mirrors have nothing but addresses
    cases["add_parts"] = (4 * (RANKS + 1) * n, lambda held=parts: kernels.add_parts(table, of_parts, of_out, bad))
    cases["sum_half"] = (2 * (RANKS + 1) * n, lambda held=halves: kernels.sum_half(held[0], of_halves))
    cases["add_half_parts"] = (
        (2 * RANKS + 4) * n,
        lambda held=halves: kernels.add_half_parts(table, of_halves, out, 1.0),
    )
    return cases


def compress(compressor, turns, state, context):
    x = next(turns)
    compressor.compress(x, state, sketched(compressor, x, state, context))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, help=f"of an array; by default {ELEMENTS}, or as many as fit")
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    args = parser.parse_args()
    gpu.need()
    tables, elements = [gpu.versions()], args.elements or gpu.elements_that_fit(BYTES_EACH, ELEMENTS)
    ceiling = gpu.copy_case(elements)
    for kind, cases, n, budget in (
        ("elementwise", elementwise, elements, ELEMENTWISE),
        ("selection", selection, elements, SELECT),
        ("selection", selection, 25_600_000, SELECT),
        ("summation", summation, 25_600_000, SELECT),
    ):
        timed = {"copy": ceiling if n == elements else gpu.copy_case(n), **cases(n)}
        times = gpu.interleaved({name: case for name, (_, case) in timed.items()})
        nbytes = {name: b for name, (b, _) in timed.items()}
        del timed  # and its memory, which the next table needs
        tables.append(gpu.fractions(f"{kind}, {n:,} float32", times, nbytes, "copy", dict.fromkeys(cases(1), budget)))
    report("gpu_kernels", "\n\n".join(tables), args.save)


if __name__ == "__main__":
    main()
