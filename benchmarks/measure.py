"""Timing that can be trusted on a machine that others use too: cases take turns, and only ratios are reported.

Every case runs once per round, so that a slow minute slows all of them.  A ratio is formed within each round and the
median over rounds is shown, with the smallest and the largest.
"""

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distopt.kernels.signatures import simd_level

RESULTS = Path(__file__).parent / "results"
# With glibc's defaults every large temporary is mapped and unmapped anew, which slows MPI, the anchor, by 2.6 x.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2 << 30), "MALLOC_TRIM_THRESHOLD_": str(32 << 30)}

Times = dict[str, list[float]]


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    rounds: int = 7,
    calls: int = 3,
    start: Callable[[], object] = lambda: None,
    slowest: Callable[[float], float] = lambda seconds: seconds,
    uncounted: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds per call of every case, one number per round, after ``uncounted`` ones to warm up.

    With ranks, ``start`` is a barrier before each case and ``slowest`` the maximum over ranks.  Cases of one thread may
    be timed by the ``clock`` of that thread, which stands still while others have the core.
    """
    times: Times = {name: [] for name in cases}
    for counted in [False] * uncounted + [True] * rounds:
        for name, case in cases.items():
            start()
            begin = clock()
            for _ in range(calls):
                case()
            seconds = slowest((clock() - begin) / calls)
            if counted:
                times[name].append(seconds)
    return times


def ratios(times: Times, name: str, anchor: str) -> list[float]:
    """A case's time over the anchor's, round by round."""
    return [a / b for a, b in zip(times[name], times[anchor], strict=True)]


def table(title: str, times: Times, anchor: str, budgets: Mapping[str, float] | None = None) -> str:
    """One line per case: milliseconds, and the ratio to the anchor, as median [min - max]; budgets are ratios."""
    lines = [title, f"  {'':44} {'ms':>9}  {'x anchor':>8}  [min - max]"]
    for name, seconds in times.items():
        r = ratios(times, name, anchor)
        middle, budget = statistics.median(r), (budgets or {}).get(name)
        verdict = "" if budget is None else f"  budget {budget:g}: {'met' if middle <= budget else 'MISSED'}"
        mark = "  anchor" if name == anchor else f"{verdict}"
        lines.append(
            f"  {name:44} {statistics.median(seconds) * 1e3:9.3f}  {middle:8.3f}  [{min(r):.3f} - {max(r):.3f}]{mark}"
        )
    return "\n".join(lines)


def versions(*packages: str) -> str:
    """What a figure depends on."""
    installed = [f"{p} {importlib.metadata.version(p)}" for p in packages if importlib.util.find_spec(p)]
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return "\n".join(
        [
            f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}, {cpu or platform.machine()}, "
            f"{os.cpu_count()} cores",
            f"Python {platform.python_version()}, {', '.join(installed)}",
            f"kernels at {simd_level()}",
        ]
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def report(name: str, text: str, save: bool) -> None:
    """Print the tables, and keep them as ``results/NAME.txt``, or NAME-v3.txt at a limited SIMD level, if wanted."""
    print(text, flush=True)
    limit = os.environ.get("DISTOPT_SIMD", "")
    if save:
        limited = f"DISTOPT_SIMD={limit} " * bool(limit)
        command = limited + f"python -m benchmarks.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip()
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}{f'-{limit}' if limit else ''}.txt").write_text(f"{command}\n{text}\n")
