"""All kernels are NVRTC's PTX, run on the CPU, for a run of pytest: ``-p ptx.plugin``.

The tests of kernels, optimizers and compressors, whose references are numpy's float64, then judge what a GPU's driver
is handed, and not only that it has the host's bits.
"""

import ctypes
import tempfile
from pathlib import Path

import ptx
from simt.device import on

BLOCKS, THREADS, SEED = 3, 64, 1

_folder = tempfile.TemporaryDirectory(prefix="distopt-ptx-")
_libraries = {real: ctypes.CDLL(str(ptx.build(Path(_folder.name), real))) for real in ("float", "double")}
_context = on(_libraries, BLOCKS, THREADS, SEED)  # ends when it is collected
_device = _context.__enter__()


def pytest_terminal_summary(terminalreporter):
    launched = _device.launched
    terminalreporter.write_line(f"as PTX: {len(launched):,} launches of {len(set(launched))} entries")
