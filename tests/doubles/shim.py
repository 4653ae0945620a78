"""The kernels' device text as a library of this machine, one function ``launch_NAME_REAL`` for each."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from distopt.texts import KERNEL, NATIVE
from test_kernels import compiler

SIMT = Path(__file__).parent.parent / "simt"


def exports(text, real):
    lines = [f'#include "{text.name}"', "#include <cstddef>"]
    for name, declared in KERNEL.findall(text.read_text()):
        kinds = [d.rsplit(maxsplit=1) for d in declared.split(",")]
        kinds = [k + " " + "*" * n.count("*") for k, n in kinds]
        arguments = ", ".join(f"*({k} *)a[{i}]" for i, k in enumerate(kinds))
        lines.append(
            f'extern "C" void launch_{name}_{real}(const unsigned *d, size_t, void **a) {{'
            "  for (unsigned b = 0; b < d[0]; ++b) for (unsigned t = 0; t < d[3]; ++t) {"
            "    threadIdx.x = t, blockIdx.x = b, blockDim.x = d[3], gridDim.x = d[0];"
            f"    {name}_{real}({arguments}); }} }}"
        )
    return "\n".join(lines)


@functools.cache
def library():
    folder = Path(tempfile.mkdtemp())
    units = []
    for text in sorted(NATIVE.glob("*.cu")):
        for real in ("float", "double"):
            unit = folder / f"{text.stem}-{real}.cpp"
            unit.write_text(exports(text, real))
            flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", f"-I{NATIVE}", f"-I{SIMT}"]
            here = ["-include", SIMT / "serial.h", f"-Dreal={real}", "-c", unit, "-o", unit.with_suffix(".o")]
            subprocess.run([compiler(), *flags, *here], check=True)
            units.append(unit.with_suffix(".o"))
    subprocess.run([compiler(), "-shared", "-o", folder / "device.so", *units], check=True)
    return ctypes.CDLL(str(folder / "device.so"))
