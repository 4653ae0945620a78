"""What 16-bit numbers cost a host: python -m benchmarks.half [--save]

At every SIMD level that this CPU has, in a process of its own, one thread: the conversions, the sum of two ranks'
numbers, and what a step adds up to in shared memory, that is to write this rank's numbers once and to form its share of
the sum; and torch's conversions of the same array, which take turns with them.  The anchor is a copy of the float32
array, and times are the thread's own, since others use this machine too.
"""

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time

import ml_dtypes
import numpy as np

from benchmarks.measure import Times, interleaved, report, table, versions
from distopt import kernels
from distopt.device import zeros
from distopt.kernels.layout import BucketLayout
from distopt.kernels.signatures import SIMD_NAMES, library

N = 1 << 24
RANKS = 2
BUDGETS = dict.fromkeys(("half, in shared memory", "bfloat16, in shared memory"), 2.5)
VERBS = "copy_{}", "encode_{}", "decode_{}", "sum_{}", "add_{}_parts"
KINDS = {"half": (np.float16, 65504.0), "bfloat16": (ml_dtypes.bfloat16, 1e38)}


def cases(n):
    """Calls by name."""
    x, y = zeros(n, np.float32), zeros(n, np.float32)
    x[:] = 1e-3 * np.random.default_rng(0).standard_normal(n, np.float32)
    still = zeros(n, np.float32)  # what is left of what is left is no number that anybody sends
    calls = {"copy": lambda: np.copyto(y, x)}
    for name, (dtype, most) in KINDS.items():
        wires = [zeros(n, dtype) for _ in range(RANKS)]
        for wire in wires:
            wire[:] = x
        send, encode, decode, add, parts = (getattr(kernels, verb.format(name)) for verb in VERBS)
        share = BucketLayout(["x"], [(n,)], [0], np.float32).shard(0, RANKS)
        calls[f"to {name}"] = functools.partial(send, x, wires[0], 0.5, most)
        calls[f"to {name}, and its error"] = functools.partial(encode, still, wires[1], 0.5, most)
        calls[f"from {name}"] = functools.partial(decode, wires[0], y, 0.5)
        calls[f"sum of two, {name}"] = functools.partial(add, wires[1], wires)
        calls[f"a share of the sum, {name}"] = functools.partial(parts, share, wires, y, 0.5)
    return calls | torch_cases(x)


def torch_cases(x):
    """torch's own, to memory that is there already; none without torch."""
    if not importlib.util.find_spec("torch"):
        return {}
    import torch

    torch.set_num_threads(1)
    wide = torch.from_numpy(x)
    back = torch.empty_like(wide)
    times = {}
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        narrow = wide.to(dtype)
        times[f"torch, to {name}"] = functools.partial(narrow.copy_, wide)
        times[f"torch, from {name}"] = functools.partial(back.copy_, narrow)
    return times


def measured(rounds):
    """Seconds by case, and with them those of a step's two passes."""
    times: Times = interleaved(cases(N), rounds, calls=1, clock=time.thread_time)
    for name in KINDS:
        pairs = zip(times[f"to {name}"], times[f"a share of the sum, {name}"], strict=True)
        times[f"{name}, in shared memory"] = [a + b for a, b in pairs]
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="keep the tables as results/half.txt")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measured(args.rounds)))
        return
    tables = []
    for level, name in SIMD_NAMES.items():
        if level <= library().cpu_level().decode():
            command = [sys.executable, "-m", "benchmarks.half", "--here", "--rounds", str(args.rounds)]
            env = os.environ | {"DISTOPT_SIMD": level}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            budgets = BUDGETS if level != "v1" else {}
            title = f"{name}: {N:,} float32, one thread, {args.rounds} rounds"
            tables.append(table(title, json.loads(done.stdout), "copy", budgets))
    report("half", "\n\n".join([versions("numpy", "torch"), *tables]), args.save)


if __name__ == "__main__":
    main()
