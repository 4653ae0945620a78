"""The program that ``distopt bench`` starts on every rank: collectives with known results, and their times."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import distopt
from distopt import device
from distopt.comm import Communicator
from distopt.lab import fit
from distopt.lab.fit.measure import Case, case_of, elements, timed

BUSY = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1, "reduce_scatter": 1}  # times (P - 1) / P
CUT = ("all_gather", "all_to_all", "reduce_scatter")  # whose count is that of one rank's part
LEAST_CALLS = 3


def main() -> int:
    """Measure what the JSON text on the command line asks for; rank 0 writes the results."""
    request = json.loads(sys.argv[1])
    world = distopt.world(request["device"])
    if "fit" in request:
        fitted = fit.fit(world, request["seconds"])
        if world.rank == 0:
            fitted.write(request["fit"])
        rows = []
    else:
        rows = list(collectives(world, request["verbs"], request["sizes"], np.dtype(request["dtype"])))
    if world.rank == 0:
        about = {"distopt": distopt.__version__, "ranks": world.size}
        name = f"{type(world).__name__}: {world.reason}"
        Path(request["file"]).write_text(json.dumps({**about, "communicator": name, "rows": rows}))
    return 0


def collectives(comm: Communicator, verbs: list[str], sizes: list[int], dtype: np.dtype) -> Iterator[dict[str, Any]]:
    """Yield a row per verb and size: bytes, seconds, bytes per second, and elements that were wrong on any rank."""
    n = -(-max(sizes) // dtype.itemsize) + comm.size
    x, room = comm.alloc(n, dtype), comm.alloc(n, dtype)
    for verb in verbs:
        cases = {(case := case_of(comm, verb, size, x, room)).nbytes: case for size in sizes}  # whole elements
        for case in cases.values():
            yield _row(comm, case, verb, x)


def _row(comm: Communicator, case: Case, verb: str, x: np.ndarray) -> dict[str, Any]:
    n = elements(verb, case.nbytes, x.itemsize, comm.size)
    mine = x[:n]
    device.copy(mine, sent(comm.rank, comm.size, n, x.dtype))
    got = case.call()
    wrong = sum(map(int, comm.control.gather(str(_wrong(comm, verb, mine, got)))))
    device.clear(mine)  # zeros stay what they are, however often they are added up
    case.taken = timed(comm, case.call, 1)
    case.taken = timed(comm, case.call, max(LEAST_CALLS, case.repeats))
    seconds = case.seconds
    if comm.rank == 0 and (sys.stderr.isatty() or os.environ.get("DISTOPT_TTY")):  # somebody watches
        print(f"{verb} {case.nbytes:,} bytes: {seconds * 1e6:.1f} us", file=sys.stderr, flush=True)
    count = case.nbytes // x.itemsize
    return {
        "verb": verb,
        "size": case.nbytes,
        "count": count // comm.size if verb in CUT else count,
        "type": x.dtype.name,
        "redop": "sum" if "reduce" in verb else "none",
        "seconds": seconds,
        "algbw": case.nbytes / seconds,
        "busbw": case.nbytes / seconds * busy(verb, comm.size),
        "wrong": wrong,
    }


def busy(verb: str, size: int) -> float:
    """Return the bytes on the busiest link for each byte that is handed over, as nccl-tests count them."""
    return 1.0 if verb == "broadcast" else BUSY[verb] * (size - 1) / size


def sent(rank: int, size: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Return what a rank hands over, (n,): small integers, whose sums over up to 128 ranks are exact in every dtype."""
    return np.resize(_period(rank, size), n).astype(dtype)


def _period(rank: int, size: int) -> np.ndarray:
    most = max(2, 256 // size)
    return (np.arange(most) + 5 * rank) % most


def _wrong(comm: Communicator, verb: str, mine: np.ndarray, got: Any) -> int:
    """Return how many elements of a result are wrong."""
    size, dtype, n = comm.size, mine.dtype, mine.size
    total = np.resize(sum(_period(r, size) for r in range(size)), n).astype(dtype)
    part = slice(n // size * comm.rank, n // size * (comm.rank + 1))
    if "reduce" in verb:
        expected = [total[part] if verb == "reduce_scatter" else total]
    elif verb == "broadcast":
        expected = [sent(0, size, n, dtype)]
    else:
        every = [sent(r, size, n, dtype) for r in range(size)]
        expected = [x[part] for x in every] if verb == "all_to_all" else every
    comm.wait()
    results = [mine] if got is None else [got] if device.is_array(got) else got
    return sum(int((device.host_copy(f) != w).sum()) for f, w in zip(results, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main())
