"""Plant faults into kernels, and count how many the tests of the device's text find.

``python tests/ptx/plant.py [--seed S] [--kinds KIND ...]`` plants each kind of fault into the PTX of several kernels,
at a place that the seed chooses, runs the tests on it in a process of its own until the first that fails, and prints
what that was: a trap, a test, or a crash.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launch

launch.extend_path()

from test_device_text import PLANTED  # noqa: E402

import ptx  # noqa: E402
from benchmarks import gpu_sass  # noqa: E402
from ptx.translate import translate  # noqa: E402

SECONDS = 400.0  # for the tests on one fault

Edit = Callable[[random.Random, str], str]


def at_one(pattern: str, to: str | Callable[["re.Match[str]"], str]) -> Edit:
    """Replace one of the places where a pattern matches."""

    def edit(rng: random.Random, source: str) -> str:
        places = list(re.finditer(pattern, source))
        if not places:
            raise LookupError(pattern)
        place = rng.choice(places)
        new = to(place) if callable(to) else place.expand(to)
        return source[: place.start()] + new + source[place.end() :]

    return edit


def swapped_parameters(rng: random.Random, source: str) -> str:
    """Let two arguments of one width change places."""
    loads = list(re.finditer(r"ld\.param\.u64 \t(%rd\d+), \[(\w+_param_\d+)\];", source))
    a, b = sorted(rng.sample([load for load in loads if load[2] != loads[0][2]], 2), key=lambda load: load.start())
    parts = source[: a.start(2)], b[2], source[a.end(2) : b.start(2)], a[2], source[b.end(2) :]
    return "".join(parts)


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        edit: of an entry's PTX.
        entries: into which it is planted.
    """

    edit: Edit
    entries: tuple[str, ...]


KINDS = {
    "a lost barrier": Kind(
        at_one(r"\tbar\.sync \t0;", ""),
        ("decode_int8", "select_chunks", "transform_tiles", "partial_squares", "pack_planes"),
    ),
    "a stride too large by one block": Kind(
        at_one(r"mov\.u32 \t(%r\d+), %nctaid\.x;", r"mov.u32 \t\1, %nctaid.x;\n\tadd.s32 \t\1, \1, 1;"),
        ("adam", "accumulate", "pack", "encode_half"),
    ),
    "two arguments swapped": Kind(swapped_parameters, ("adagrad", "lerp", "decode_sparse")),
    "a wide access beside where it is aligned": Kind(
        at_one(r"(ld\.global\.v[24]\.\w+ \t\{[^}]*\}, \[%rd\d+)\]", r"\1+4]"), ("adam", "accumulate", "adamw")
    ),
    "a shuffle under a branch": Kind(
        at_one(
            r"\tshfl\.sync[^;]*;",
            r"\t{ .reg .pred %half; .reg .b32 %mine; mov.u32 %mine, %tid.x; and.b32 %mine, %mine, 16;"
            r" setp.eq.s32 %half, %mine, 0; @%half \g<0> }",
        ),
        ("pack", "sift_above", "count_nonfinite"),
    ),
    "an address as an int": Kind(
        at_one(r"cvta\.to\.global\.u64 \t(%rd\d+), (%rd\d+);", r"and.b64 \t\1, \2, 4294967295;"), ("sgd", "unpack")
    ),
    "one turn too many": Kind(at_one(r"setp\.lt\.s64", "setp.le.s64"), ("lamb", "sgd", "encode_two_bits")),
    "a store left out": Kind(at_one(r"\n\tst\.global[^;]*;", "\n"), ("sgd", "encode_bfloat16", "pack_planes")),
    "the other value chosen": Kind(
        at_one(r"selp\.(\w+) \t(%\w+), ([^,]+), ([^,]+), ", r"selp.\1 \t\2, \4, \3, "), ("encode_one_bit", "lars")
    ),
    "an addition that does not wait for others": Kind(
        at_one(r"atom\.(\w+)\.add\.(\w+) \t(%\w+), \[(%\w+)\], (%?\w+);", r"ld.\1.\2 \t\3, [\4];"),
        ("count_nonfinite", "count_digits"),
    ),
}


def planted(name: str, kind: Kind, rng: random.Random) -> tuple[str, str]:
    """(the text, its PTX for float32) with a fault in an entry."""
    entry = f"{name}_float"
    text = next(t for t in gpu_sass.TEXTS if f"KERNEL({name})" in (gpu_sass.NATIVE / t).read_text())
    source = gpu_sass.compiled(text, "float", ptx.ARCHITECTURE)[1]
    start = source.index(f".visible .entry {entry}(")
    end = source.index("\n}\n", start)
    return text, source[:start] + kind.edit(rng, source[start:end]) + source[end:]


def found(folder: Path) -> str:
    """The first test that does not pass with these libraries; '' if all do."""
    command = [sys.executable, "-m", "pytest", "-qxs", "-p", "no:cacheprovider", "-m", "ptx and not full"]
    command += ["-k", "not outside_of", str(launch.TESTS / "kernels" / "test_device_text.py")]
    with tempfile.TemporaryFile("w+") as output:
        env = {**os.environ, PLANTED: str(folder)}
        try:
            done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return "no end"
        output.seek(0)
        said = output.read()
    if done.returncode == 0:
        return ""
    trap = re.search(r"simt: block \d+: (.*)", said)
    failed = re.search(r"FAILED \S*::(\w+)", said)
    return f"trap: {trap[1]}" if trap else f"test: {failed[1]}" if failed else "a crash"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        whole = Path(made)
        doubles = ptx.build(whole, "double")
        entries = {text: ptx.entries("float", [text]) for text in gpu_sass.TEXTS}
        count = missed = 0
        for title in given.kinds:
            for name in KINDS[title].entries:
                begin, folder = time.monotonic(), whole / f"{count}"
                folder.mkdir()
                text, source = planted(name, KINDS[title], random.Random(f"{given.seed} {title} {name}"))
                changed = {**entries, text: translate(source, f"{text[:-3]}-float.ptx")}
                ptx.library(folder, "ptx-float", [entry for each in changed.values() for entry in each])
                shutil.copy(doubles, folder)
                answer = found(folder)
                count, missed = count + 1, missed + (not answer)
                print(f"{title} in {name}: {answer or 'NOT FOUND'}  ({time.monotonic() - begin:.0f} s)", flush=True)
                shutil.rmtree(folder)
    print(f"{count - missed} of {count} found")


if __name__ == "__main__":
    main()
