"""``distopt bench --kernels``: the library's kernels on this host, as a fraction of the speed of a copy.

Bytes are those that the equations make the memory move: bytes read, bytes written, and once more the bytes written
without having been read, since a cache reads a line before it changes it.  So a copy of n bytes moves 3 n.  It is no
hard limit: a kernel that writes to the lines that it has read may be faster, and some processors spare the read.  Times
are the thread's own, which stand still while others have its core.
"""

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from distopt import device, kernels, optim
from distopt.compress import ALL, BucketContext, ExchangeContext
from distopt.compress.base import sketched
from distopt.formatting import table
from distopt.kernels.layout import BucketLayout
from distopt.kernels.signatures import simd_level

N = 1 << 24  # elements of float32: no cache holds them
ROUNDS = 7
RANKS = 4  # whose payloads are added

Case = tuple[int, Callable[[], object]]  # bytes that the memory must move, and the call


def show(file: Path | None, n: int = N) -> int:
    """Measure the kernels and print a table; write the same to ``file`` as JSON, if given."""
    rows = fractions(passes(n) | selection(n), ROUNDS)
    print(f"# {n:,} float32 on one thread, {simd_level()}; bytes are those that the memory moves")
    cells = [("kernel", "time (ms)", "GB/s", "of copy")]
    for row in rows:
        gigabytes = row["bytes"] / row["seconds"] / 1e9
        cells.append((row["kernel"], f"{row['seconds'] * 1e3:.3f}", f"{gigabytes:.2f}", f"{row['of copy']:.3f}"))
    print("\n".join(table(cells)))
    if file:
        file.write_text(json.dumps({"elements": n, "rows": rows}, indent=1) + "\n")
    return 0


def fractions(cases: dict[str, Case], rounds: int) -> list[dict[str, Any]]:
    """Return a row per case: the median seconds, and the median of the speed relative to 'copy' in the same round."""
    # cases take turns, so that a slow second slows all of them; the first round is not counted
    ceiling = cases["copy"][0]
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number, (name, (_, call)) in itertools.product(range(rounds + 1), cases.items()):
        begin = time.thread_time()
        call()
        taken[name].append(time.thread_time() - begin)
        if sys.stderr.isatty():
            print(f"\rround {number} of {rounds}: {name:30}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    rows = []
    for name, (nbytes, _) in cases.items():
        pairs = zip(taken[name][1:], taken["copy"][1:], strict=True)
        share = statistics.median(nbytes / seconds * copy / ceiling for seconds, copy in pairs)
        rows.append({"kernel": name, "bytes": nbytes, "seconds": statistics.median(taken[name][1:]), "of copy": share})
    return rows


def passes(n: int) -> dict[str, Case]:
    """Return the cases of one pass over the arrays: the copy, packing, conversions and updates."""
    x, y = _filled(n, 0), _filled(n, 1)
    still, bad = device.zeros(n, np.float32), np.zeros(1, np.int64)  # errors of errors would become denormal
    halves = {"half": device.zeros(n, np.float16), "bfloat16": device.zeros(n, ml_dtypes.bfloat16)}
    layout = BucketLayout(["x"], [(n,)], [0], np.float32).point_to([x])
    home = BucketLayout(["y"], [(n,)], [0], np.float32).point_to([y])
    cases: dict[str, Case] = {
        "copy": (12 * n, lambda: np.copyto(y, x)),
        "pack": (12 * n, lambda: kernels.pack(layout, y, 1.0, bad, np.inf)),
        "pack, in place": (4 * n, lambda: kernels.pack(home, y, 1.0, bad, np.inf)),
        "unpack": (12 * n, lambda: kernels.unpack(layout, y, 1.0)),
        "accumulate": (12 * n, lambda: kernels.accumulate(x, y)),
    }
    for name, wire in halves.items():
        encode, decode = getattr(kernels, f"encode_{name}"), getattr(kernels, f"decode_{name}")
        cases[f"to {name}, and its error"] = (12 * n, functools.partial(encode, still, wire, still[:0], 0.5, 65504.0))
        cases[f"from {name}"] = (10 * n, functools.partial(decode, wire, y, 0.5))
    for name, timed in (row for about in optim.ALL.values() for row in about().timed.items()):
        opt = timed.make()
        opt.prepare(0.5)
        cases[name] = (4 * timed.arrays * n, functools.partial(opt.update_bucket, layout, [(0, 1, y)]))
    return cases


def selection(n: int) -> dict[str, Case]:
    """Return the cases of compressors, which read the gradient and the residual, and write the residual.

    One bit reads the gradient twice; DGC also reads and writes velocities.  The bytes of codes of all elements
    count twice, as memory is read before it is written; where codes cannot be summed, their decoded sum is a case too.
    """
    gradient = _filled(n, 2)
    speed = float(np.abs(gradient).mean())
    cases: dict[str, Case] = {}
    for name, timed in (row for about in ALL.values() for row in about().timed.items()):
        magnitude = speed / timed.density
        compressor = timed.make(magnitude)
        cases[name] = (int((timed.moved + 2 * timed.sent) * n), _step(compressor, gradient, magnitude))
        if timed.sent and not compressor.traits.summable:
            payload, total = compressor.compress(gradient.copy(), {}, ExchangeContext()), _filled(n, 4)
            decode = functools.partial(compressor.decompress_all, [payload] * RANKS, total, _context(n))
            cases[f"{name}, sum of {RANKS}"] = (int((8 + RANKS * timed.sent) * n), decode)
    return cases


def _step(compressor: Any, gradient: np.ndarray, threshold: float) -> Callable[[], object]:
    """Return a call that compresses a step, with the residual of many steps: uniform between 0 and the threshold."""
    rng = np.random.default_rng(3)
    residual = device.zeros(gradient.size, np.float32)
    np.copysign(rng.random(gradient.size, np.float32) * np.float32(threshold), gradient, out=residual)
    given = gradient, {"residual": residual}
    context = _context(gradient.size)
    return lambda: compressor.compress(*given, sketched(compressor, *given, context))


def _context(n: int) -> ExchangeContext:
    """Return the call for a bucket of n elements, whose memory is the same at every call."""
    scratch: dict[str, np.ndarray] = {}
    constants: dict[str, device.DeviceMirror] = {}

    def kept(name: str, nbytes: int) -> np.ndarray:
        if name not in scratch or scratch[name].size < nbytes:
            scratch[name] = device.zeros(nbytes, np.uint8)
        return scratch[name][:nbytes]

    def constant(name: str, make: Callable[[], np.ndarray]) -> device.DeviceMirror:
        if name not in constants:
            constants[name] = device.DeviceMirror(make())
        return constants[name]

    layout = BucketLayout(["x"], [(1, n)], [0], np.float32)  # a matrix: DGC leaves what has one dimension as it is
    return ExchangeContext(bucket=BucketContext(layout, scratch=kept, constant=constant))


def _filled(n: int, seed: int) -> np.ndarray:
    """Return (n,) float32 numbers from a normal distribution, in memory like a bucket's."""
    x = device.zeros(n, np.float32)
    x[:] = np.random.default_rng(seed).standard_normal(n, np.float32)
    return x
