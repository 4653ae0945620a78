"""Plant faults into kernels, and count how many the tests of the device's text find.

``python tests/ptx/plant.py [--seed S] [--kinds KIND ...] [--texts]`` plants each kind of fault, at a place that the
seed chooses, into the PTX of kernels and into texts.  It runs the tests on each in a process of its own until the first
that fails, and prints a row of a table: what the PTX's run said, what the shim's said of a fault in a text, and the
seconds.  The first row of either is of a library that is made in the same way, without a fault: the tests must pass.

Some changes are no faults, as no input shows a difference, or none that threads which run one at a time can show.  So
no place is drawn among

* barriers that do not stand between two accesses of shared memory: most order nothing (in ``select_chunks`` each thread
  reads what it has added itself, and with two bits, in float32, has the four elements of a word);
* stores just before a loop without an end, which NVRTC makes for a grid of no blocks;
* the bound of a grid's stride: the turn behind the last begins at the end, and is empty;
* one of two bounds of a loop (4 elements, the array's end): the other one ends it, or the next thread writes the same
  element too.  Both are moved.

Nor is a launch made too small: the loops of kernels have the stride of the grid, so that any grid does all the work.
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
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launch

launch.extend_path()

from test_device_text import PLANTED  # noqa: E402

import ptx  # noqa: E402
from benchmarks import gpu_sass  # noqa: E402
from doubles.gpu import argument_sizes  # noqa: E402
from ptx.translate import translate  # noqa: E402
from simt import build as shim  # noqa: E402

SECONDS = 400.0  # for the tests on one fault

ALONE = ("-Wl,-Bsymbolic",)  # libraries that are loaded together keep the state of their launches apart

Edit = Callable[[random.Random, str], str]
Places = Callable[["re.Match[str]"], bool]


def at_one(pattern: str, to: str, fits: Places = lambda place: True) -> Edit:
    """Replace one of the places where a pattern matches."""

    def edit(rng: random.Random, source: str) -> str:
        place = rng.choice([place for place in re.finditer(pattern, source) if fits(place)])
        return source[: place.start()] + place.expand(to) + source[place.end() :]

    return edit


def between_shared_accesses(barrier: "re.Match[str]") -> bool:
    before, after = barrier.string[: barrier.start()], barrier.string[barrier.end() :]
    return ".shared." in before.rpartition("\tbar.")[2] and ".shared." in after.partition("\tbar.")[0]


def is_reached(store: "re.Match[str]") -> bool:
    label = re.match(r"(?:\tst\.[^\n]*\n)*\n(\$L\w+):\n\tsetp[^\n]*\n\t@%p\d+ bra \t\1;", store.string[store.end() :])
    return label is None


def is_not_of_two_bits(barrier: "re.Match[str]") -> bool:
    return "_two_bits)" not in barrier.string[: barrier.start()].rpartition("KERNEL(")[2]


def is_parameter(declaration: "re.Match[str]") -> bool:
    _, kernel, between = declaration.string[: declaration.start()].rpartition("KERNEL(")
    return bool(kernel) and "{" not in between


def swapped_parameters(rng: random.Random, source: str) -> str:
    """Let two arguments of one width change places."""
    loads = list(re.finditer(r"ld\.param\.u64 \t(%rd\d+), \[(\w+_param_\d+)\];", source))
    a, b = sorted(rng.sample([load for load in loads if load[2] != loads[0][2]], 2), key=lambda load: load.start())
    parts = source[: a.start(2)], b[2], source[a.end(2) : b.start(2)], a[2], source[b.end(2) :]
    return "".join(parts)


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        edit: of an entry's PTX, or of a text.
        where: the entries or files into which it is planted.
    """

    edit: Edit
    where: tuple[str, ...]


NOTHING = "nothing"  # by which the tests must pass

IN_PTX = {
    NOTHING: Kind(lambda rng, source: source, ("adam",)),
    "a lost barrier": Kind(
        at_one(r"\tbar\.sync \t0;", "", between_shared_accesses),
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
    "one turn too many": Kind(
        at_one(r"setp\.lt\.s64([^;]*;)(\s+)setp\.lt\.s64", r"setp.le.s64\1\2setp.le.s64"), ("lamb", "sgd", "adamw")
    ),
    "a store left out": Kind(
        at_one(r"\tst\.global[^;]*;\n", "", is_reached), ("sgd", "encode_bfloat16", "pack_planes")
    ),
    "the other value chosen": Kind(
        at_one(r"selp\.(\w+) \t(%\w+), ([^,]+), ([^,]+), ", r"selp.\1 \t\2, \4, \3, "), ("encode_one_bit", "lars")
    ),
    "an addition that does not wait for others": Kind(
        at_one(r"atom\.(\w+)\.add\.(\w+) \t(%\w+), \[(%\w+)\], (%?\w+);", r"ld.\1.\2 \t\3, [\4];"),
        ("count_nonfinite", "count_digits"),
    ),
}


IN_TEXT = {
    NOTHING: Kind(lambda rng, source: source, ("sgd.cu",)),
    "a lost barrier": Kind(
        at_one(r"\n +(block_sync|__syncthreads)\(\);", "\n;", is_not_of_two_bits),
        ("dct.cu", "codec.cu", "block_scan.h"),
    ),
    "a stride too large by one block": Kind(at_one(r"\+= gridDim\.x", r"+= gridDim.x + 1"), ("platform_cuda.h",)),
    "two arguments swapped": Kind(at_one(r"direction\((\w\[i\]), (\w\[i\])\)", r"direction(\2, \1)"), ("sgd.cu",)),
    "a shuffle under a branch": Kind(
        at_one(r"n \+= __shfl_xor_sync", r"if (threadIdx.x & 16) n += __shfl_xor_sync"), ("platform_cuda.h",)
    ),
    "one turn too many": Kind(at_one(r"i < \(end\)", "i <= (end)"), ("platform_cuda.h",)),
    "a store left out": Kind(at_one(r"(?<![.\w])\w+\[\w+\] [-+]?= [^;]*;", ";"), ("sgd.cu", "lars.cu", "codec.cu")),
    "the other value chosen": Kind(at_one(r"\? ([-\w]+) : ([-\w]+);", r"? \2 : \1;"), ("update.h",)),
    "an int for a long long": Kind(
        at_one(r"\blong long (\w+)(?=[,)])", r"int \1", is_parameter), ("blocks.cu", "pack.cu", "topk_device.cu")
    ),
    "an addition that does not wait for others": Kind(
        at_one(r"atomicAdd\(([^,;]+), ([^;]+)\);", r"(*(\1) += \2);"), ("topk_device.cu", "platform_cuda.h")
    ),
    "a missing volatile in the look-back": Kind(lambda rng, source: source.replace("volatile ", ""), ("block_scan.h",)),
}


def above(sound: Path, name: str) -> list[str]:
    """Options for a library whose handle finds in one of all sound kernels what this one has not."""
    return [*ALONE, "-Wl,--no-as-needed", str(sound / f"{name}-float.so")]


def plant_in_ptx(folder: Path, name: str, edit: Edit, rng: random.Random, sound: Path) -> str:
    """Make a library of the kernels of a text, with a fault in an entry's PTX for float32."""
    text = next(t for t in gpu_sass.TEXTS if f"KERNEL({name})" in (gpu_sass.NATIVE / t).read_text())
    source = gpu_sass.compiled(text, "float", ptx.ARCHITECTURE)[1]
    start = source.index(f".visible .entry {name}_float(")
    end = source.index("\n}\n", start)
    source = source[:start] + edit(rng, source[start:end]) + source[end:]
    ptx.library(folder, "ptx-float", translate(source, f"{text[:-3]}-float.ptx"), options=above(sound, "ptx"))
    return ""


def plant_in_text(folder: Path, name: str, edit: Edit, rng: random.Random, sound: Path) -> str:
    """Make both compilers' libraries of texts with a fault in one; return what the PTX's arguments tell of it."""
    native = shutil.copytree(gpu_sass.NATIVE, folder / "native", dirs_exist_ok=True)
    (native / name).write_text(edit(rng, (native / name).read_text()))
    changed = [name] if name in gpu_sass.TEXTS else gpu_sass.TEXTS
    with mock.patch.object(gpu_sass, "NATIVE", native), mock.patch.object(shim, "NATIVE", native):
        shim.build(folder, "float", above(sound, "device"), texts=map(native.joinpath, changed))
        entries = ptx.entries("float", changed)
    ptx.library(folder, "ptx-float", entries, options=above(sound, "ptx"))
    others = [e.name for e in entries if e.parameters != argument_sizes(e.name.rpartition("_")[0])]
    return f"arguments of other sizes: {', '.join(others)}" if others else ""


def plant(folder: Path, name: str, edit: Edit, rng: random.Random, sound: Path, in_text: bool) -> str:
    """Plant a fault that compiles, in a text or in an entry's PTX; return what is seen without a launch."""
    for _ in range(5):
        try:
            return (plant_in_text if in_text else plant_in_ptx)(folder, name, edit, rng, sound)
        except (subprocess.CalledProcessError, RuntimeError, ValueError) as error:
            print(f"{name}: does not compile: {str(error)[:200]}", file=sys.stderr)
    raise RuntimeError(f"no place in {name} gives what compiles")


def found(folder: Path, tests: str) -> str:
    """The first of some tests that does not pass with these libraries; 'NOT FOUND' if all do."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-qxs",
        "-p",
        "no:cacheprovider",
        "-m",
        f"device and {tests} and not full",
    ]
    command += ["-k", "not (outside_of or newer or clang)", str(launch.TESTS / "kernels" / "test_device_text.py")]
    with tempfile.TemporaryFile("w+") as output:
        env = {**os.environ, PLANTED: str(folder)}
        try:
            done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return "no end"
        output.seek(0)
        said = output.read()
    if done.returncode == 0:
        return "NOT FOUND"
    trap = re.search(r"simt: block \d+: (.*)", said)
    failed = re.search(r"FAILED \S*::(\w+)", said)
    return f"trap: {trap[1]}" if trap else f"test: {failed[1]}" if failed else "a crash"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[*IN_PTX, *IN_TEXT])
    parser.add_argument("--texts", action="store_true", help="into texts alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        whole = Path(made)
        ptx.build(whole, "double")
        shim.build(whole, "double")
        shim.build(whole, "float", ALONE)
        ptx.library(whole, "ptx-float", ptx.entries("float"), options=ALONE)
        print("| kind | in | the PTX's run | the shim | seconds |\n|---|---|---|---|---|")
        for kinds, in_text in ((IN_PTX, False), (IN_TEXT, True))[given.texts :]:
            for title, name in [(t, name) for t in kinds if t in given.kinds for name in kinds[t].where]:
                begin, folder = time.monotonic(), Path(tempfile.mkdtemp(dir=whole))
                edit, rng = kinds[title].edit, random.Random(f"{given.seed} {title} {name}")
                for library in whole.glob("*-double.so"):
                    shutil.copy(library, folder)
                planted = plant(folder, name, edit, rng, whole, in_text)
                says = planted or found(folder, "ptx"), found(folder, "not ptx") if in_text else "cannot"
                print(f"| {title} | {name} | {says[0]} | {says[1]} | {time.monotonic() - begin:.0f} |", flush=True)
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
