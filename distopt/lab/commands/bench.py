"""``distopt bench -n N``: the times of collectives, and checks of their results; with --kernels, the kernels."""

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distopt import formatting
from distopt.checks import check_one_of, check_positive
from distopt.comm.communicator import NUMBERS
from distopt.lab import fit
from distopt.lab.commands import bench_kernels, plotting
from distopt.lab.cost import ALGORITHMS
from distopt.run import run

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
HEAD = [
    ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"),
    ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
]
USUAL = {"verbs": ",".join(ALGORITHMS), "min": "8", "max": "64M", "factor": 4.0, "dtype": "float32"}
MAX_BYTES, MAX_SIZES = 1 << 32, 1000  # bytes, and sizes
WIDTHS = (12, 12, 9, 6, 11, 8, 8, 7)


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("bench", help="time the collectives, or the kernels", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, help="number of ranks")
    parser.add_argument("--verbs", default=USUAL["verbs"], help="default: all, " + ", ".join(ALGORITHMS))
    parser.add_argument("--min", default=USUAL["min"], metavar="BYTES", help="the smallest size, default %(default)s")
    parser.add_argument("--max", default=USUAL["max"], metavar="BYTES", help="the largest one, default %(default)s")
    parser.add_argument("--factor", type=float, default=USUAL["factor"], help="from one size to the next, default 4")
    parser.add_argument("--dtype", default=USUAL["dtype"], help="of the elements, default %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit latency and bandwidth instead, and write them")
    parser.add_argument("--seconds", type=float, default=20.0, help="that a fit may take, default 20")
    parser.add_argument("--kernels", action="store_true", help="the kernels of this host instead; without ranks")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Print the tables; return 1 if a result was wrong, 2 for a bad argument."""
    try:
        plotting.check_outputs({"--json": args.json}, [])
        if args.kernels:
            return bench_kernels.show(args.json)
        ranks = _ranks(args.ranks, 2 if args.fit else 1)
        return _fit(args, ranks) if args.fit else _collectives(args, ranks)
    except (ValueError, OSError) as error:
        print(f"distopt bench: {error}", file=sys.stderr)
        return 2


def size_of(name: str, text: str) -> int:
    """Parse bytes from '8', '64K', '1.5M' or '2G', in powers of 1024; ValueError that names the option otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    nbytes = float(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 1 <= nbytes <= MAX_BYTES:
        raise ValueError(f"{name} must be from 1 byte to {MAX_BYTES}, as 8, 64K, 1.5M or 2G, got {text!r:.60}")
    return int(nbytes)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Return a geometric ladder of sizes; ValueError if it does not climb, or has too many steps."""
    if not 1 < factor <= 1e9:
        raise ValueError(f"--factor must be above 1 and at most 1e9, got {factor:g}")
    if most < least:
        raise ValueError(f"--max must be at least --min, {least} bytes, got {most}")
    steps = math.floor(math.log(most / least, factor) + 1e-9)
    if steps >= MAX_SIZES:
        raise ValueError(f"--factor must make at most {MAX_SIZES} sizes, got {factor:g}, which makes {steps + 1}")
    return list(dict.fromkeys(round(least * factor**k) for k in range(steps + 1)))


def _ranks(ranks: int | None, least: int) -> int:
    """Check the number of ranks; ValueError if it is missing or too small."""
    if ranks is None or ranks < least:
        got = "" if ranks is None else f", got {ranks}"
        raise ValueError(f"-n must be at least {least}, the number of ranks{got}")
    return ranks


def _collectives(args: argparse.Namespace, ranks: int) -> int:
    """Time the collectives on ranks of their own, and print the tables."""
    least, most = size_of("--min", args.min), size_of("--max", args.max)
    verbs = [check_one_of("--verbs", name.strip(), ALGORITHMS) for name in args.verbs.split(",")]
    request: dict[str, Any] = {
        "verbs": verbs,
        "sizes": sizes(least, most, args.factor),
        "dtype": check_one_of("--dtype", args.dtype, [np.dtype(d).name for d in NUMBERS]),
    }
    code, results = _on_ranks(args, ranks, request)
    if code:
        return code
    print(f"# {results['communicator']}, {ranks} ranks; times are the slowest rank's, of which a tenth was faster")
    for verb in request["verbs"]:
        print("\n".join(table(verb, [row for row in results["rows"] if row["verb"] == verb])))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row["wrong"] for row in results["rows"]))


def table(verb: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines that nccl-tests would print, with their definitions of sizes and bandwidths."""
    lines = [f"# {verb}", *("#" + _line(cells)[1:] for cells in HEAD)]
    for r in rows:
        speeds = (f"{r['seconds'] * 1e6:.2f}", f"{r['algbw'] / 1e9:.3f}", f"{r['busbw'] / 1e9:.3f}")
        lines.append(_line((f"{r['size']}", f"{r['count']}", r["type"], r["redop"], *speeds, f"{r['wrong']}")))
    return lines


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _fit(args: argparse.Namespace, ranks: int) -> int:
    """Fit on ranks of their own, and print a summary."""
    seconds = check_positive("--seconds", args.seconds)
    plotting.check_writable(args.fit)
    if args.json or any(getattr(args, name) != usual for name, usual in USUAL.items()):
        others = ", ".join(f"--{name}" for name in ("json", *USUAL))
        raise ValueError(f"--fit must be given without {others}, got one of them; leave it out")
    code, _ = _on_ranks(args, ranks, {"fit": str(args.fit.resolve()), "seconds": seconds})
    if code:
        return code
    fitted = fit.read(args.fit)
    print(f"{args.fit}: {ranks} ranks, {fitted.about['communicator']}")
    print(f"  as one link: {fitted.link.latency * 1e6:.1f} us, {fitted.link.bandwidth / 1e9:.3f} GB/s")
    for verb, line in fitted.lines.items():
        most, share = formatting.nbytes(line.points[-1][0]), f"{100 * line.residual:.1f} %"
        print(f"  {verb:14}  up to {most}, {len(line.pieces)} pieces, {share} off where it was measured")
    return 0


def _on_ranks(args: argparse.Namespace, ranks: int, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run ``bench_ranks`` on new ranks; return the exit code, and, if that is 0, what rank 0 has written."""
    with tempfile.TemporaryDirectory(prefix="distopt-") as folder:
        file = Path(folder) / "found.json"
        text = json.dumps(request | {"device": args.device, "file": str(file)})
        code = run.start(["-m", "distopt.lab.commands.bench_ranks", text], ranks)
        return code, {} if code else json.loads(file.read_text())
