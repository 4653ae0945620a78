"""What the benchmarks on a GPU share: events instead of clocks, and the copy that everything is compared with."""

import datetime
import importlib.metadata
import importlib.util
import statistics
import sys

import numpy as np

from benchmarks.measure import Times
from distopt import device
from distopt.comm import nccl_library as nccl


def need() -> None:
    """End the process, in good order, where there is no GPU."""
    state = device.gpu_state()
    if state != "ok":
        print(f"no GPU, so nothing to measure: {state}")
        sys.exit(0)


def elements_that_fit(bytes_each, most):
    """How many elements, ``most`` or fewer, find room in the memory that is free now: a multiple of 2^20."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    return min(most, int(0.9 * free) // bytes_each >> 20 << 20)


def interleaved(cases, rounds=15, calls=3) -> Times:
    """Seconds per call of every case, by the GPU's own clock, one number per round; cases take turns."""
    import cupy

    times: Times = {name: [] for name in cases}
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for counted in [False] * 2 + [True] * rounds:
        for name, case in cases.items():
            begin.record()
            for _ in range(calls):
                case()
            end.record()
            end.synchronize()
            if counted:
                times[name].append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3 / calls)
    return times


def filled(n, dtype=np.float32, seed=0):
    """An array on the GPU with normally distributed numbers."""
    x = device.gpu_zeros(n, dtype)
    values = np.random.default_rng(seed).standard_normal(min(n, 1 << 20)).astype(dtype)
    for start in range(0, n, values.size):
        device.copy(x[start : start + values.size], values[: min(values.size, n - start)])
    return x


def copy_case(n):
    """The ceiling: a copy of n float32; returns (its bytes, the case)."""
    x, y = filled(n), device.gpu_zeros(n, np.float32)
    return 8 * n, lambda: device.copy(y, x)


def fractions(title, times, nbytes, ceiling, budgets):
    """One line per case: milliseconds, TB/s, and the fraction of the ceiling's speed, as median [min - max]."""
    lines = [title, f"  {'':36} {'ms':>9} {'TB/s':>7} {'of copy':>8}  [min - max]"]
    for name, seconds in times.items():
        speeds = [nbytes[name] / t for t in seconds]
        of = [s / (nbytes[ceiling] / c) for s, c in zip(speeds, times[ceiling], strict=True)]
        middle, budget = statistics.median(of), budgets.get(name)
        verdict = "" if budget is None else f"  budget {budget:g}: {'met' if middle >= budget else 'MISSED'}"
        speed = statistics.median(speeds) / 1e12
        lines.append(
            f"  {name:36} {statistics.median(seconds) * 1e3:9.4f} {speed:7.3f} {middle:8.3f}  "
            f"[{min(of):.3f} - {max(of):.3f}]{verdict}"
        )
    return "\n".join(lines)


def versions():
    """What a figure depends on."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    packages = [f"{p} {importlib.metadata.version(p)}" for p in ("numpy", "torch") if importlib.util.find_spec(p)]
    if nccl.nccl_state() == "ok":
        packages.append(f"NCCL {nccl.version_text(nccl.nccl_version())}")
    runtime = cupy.cuda.runtime
    return "\n".join(
        [
            f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}, {properties['name'].decode()}, "
            f"driver for CUDA {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}",
            f"cupy {cupy.__version__}, NVRTC {cupy.cuda.nvrtc.getVersion()}, {', '.join(packages)}",
        ]
    )
