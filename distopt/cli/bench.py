"""``distopt bench -n N``: what collectives take, and whether their results are right; or the kernels with --kernels."""

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

from distopt import fit, units
from distopt.cli import bench_kernels, picture, run
from distopt.comm.communicator import NUMBERS
from distopt.cost import ALGORITHMS
from distopt.names import one_of
from distopt.numbers import positive

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
HEAD = [
    ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"),
    ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
]
USUAL = {"verbs": ",".join(ALGORITHMS), "min": "8", "max": "64M", "factor": 4.0, "dtype": "float32"}
MOST, MANY = 1 << 32, 1000  # bytes, and sizes
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


def main(given: argparse.Namespace) -> int:
    """Print the tables; 1 if a result was wrong, 2 for a bad argument."""
    try:
        picture.check_outputs(given.json, None, [])
        if given.kernels:
            return bench_kernels.show(given.json)
        ranks = _ranks(given.ranks, 2 if given.fit else 1)
        return _fit(given, ranks) if given.fit else _collectives(given, ranks)
    except (ValueError, OSError) as error:
        print(f"distopt bench: {error}", file=sys.stderr)
        return 2


def size_of(name: str, text: str) -> int:
    """Bytes from '8', '64K', '1.5M' or '2G', in powers of 1024; ValueError that names the option for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    nbytes = float(found[1]) * UNITS[found[2].upper()] if found else 0
    if not 1 <= nbytes <= MOST:
        raise ValueError(f"{name} must be from 1 byte to {MOST}, as 8, 64K, 1.5M or 2G, got {text!r:.60}")
    return int(nbytes)


def sizes(least: int, most: int, factor: float) -> list[int]:
    """A geometric ladder; ValueError for one that does not climb."""
    if not 1 < factor <= 1e9:
        raise ValueError(f"--factor must be above 1 and at most 1e9, got {factor:g}")
    if most < least:
        raise ValueError(f"--max must be at least --min, {least} bytes, got {most}")
    steps = math.floor(math.log(most / least, factor) + 1e-9)
    if steps >= MANY:
        raise ValueError(f"--factor {factor:g} makes {steps + 1} sizes, of at most {MANY}")
    return list(dict.fromkeys(round(least * factor**k) for k in range(steps + 1)))


def verbs_of(text: str) -> list[str]:
    """Names with commas between them; ValueError, with the closest one, for a name that is no verb."""
    found = [name.strip() for name in text.split(",")]
    for name in found:
        one_of("--verbs", name, ALGORITHMS)
    return found


def _ranks(given: int | None, least: int) -> int:
    if given is None or given < least:
        got = "" if given is None else f", got {given}"
        raise ValueError(f"-n must be at least {least}, the number of ranks{got}")
    return given


def _collectives(given: argparse.Namespace, ranks: int) -> int:
    """Time them on ranks of their own, and print what they have found."""
    least, most = size_of("--min", given.min), size_of("--max", given.max)
    wanted: dict[str, Any] = {
        "verbs": verbs_of(given.verbs),
        "sizes": sizes(least, most, given.factor),
        "dtype": one_of("--dtype", given.dtype, [np.dtype(d).name for d in NUMBERS]),
    }
    code, found = _on_ranks(given, ranks, wanted)
    if code:
        return code
    print(f"# {found['communicator']}, {ranks} ranks; times are the slowest rank's, of which a tenth was faster")
    for verb in wanted["verbs"]:
        print("\n".join(table(verb, [row for row in found["rows"] if row["verb"] == verb])))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["wrong"] for row in found["rows"]))


def table(verb: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of nccl-tests, with the sizes and bandwidths that they have there."""
    lines = [f"# {verb}", *("#" + _line(cells)[1:] for cells in HEAD)]
    for r in rows:
        speeds = (f"{r['seconds'] * 1e6:.2f}", f"{r['algbw'] / 1e9:.3f}", f"{r['busbw'] / 1e9:.3f}")
        lines.append(_line((f"{r['size']}", f"{r['count']}", r["type"], r["redop"], *speeds, f"{r['wrong']}")))
    return lines


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _fit(given: argparse.Namespace, ranks: int) -> int:
    """Fit on ranks of their own, and say in short what was found."""
    seconds = positive("--seconds", given.seconds)
    picture.check_place(given.fit)
    if given.json or any(getattr(given, name) != usual for name, usual in USUAL.items()):
        raise ValueError(f"--fit measures what it needs: leave out --json, {', '.join(f'--{name}' for name in USUAL)}")
    code, _ = _on_ranks(given, ranks, {"fit": str(given.fit.resolve()), "seconds": seconds})
    if code:
        return code
    found = fit.read(given.fit)
    print(f"{given.fit}: {ranks} ranks, {found.about['communicator']}")
    print(f"  as one link: {found.link.latency * 1e6:.1f} us, {found.link.bandwidth / 1e9:.3f} GB/s")
    for verb, line in found.lines.items():
        most, share = units.nbytes(line.points[-1][0]), f"{100 * line.residual:.1f} %"
        print(f"  {verb:14}  up to {most}, {len(line.pieces)} pieces, {share} off where it was measured")
    return 0


def _on_ranks(given: argparse.Namespace, ranks: int, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The exit code, and what rank 0 has written if that is 0."""
    with tempfile.TemporaryDirectory(prefix="distopt-") as folder:
        file = Path(folder) / "found.json"
        text = json.dumps(wanted | {"device": given.device, "file": str(file)})
        code = run.start(["-m", "distopt.cli.bench_ranks", text], ranks)
        return code, {} if code else json.loads(file.read_text())
