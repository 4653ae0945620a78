"""``python script.py TRAIN.PY ...``: a user's script, unchanged, in a process that seems to have GPUs and NCCL."""

import importlib
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import launch

if __name__ == "__main__":
    launch.extend_path()
    importlib.import_module("nccl_checks").install(processes=True)
    importlib.import_module("doubles.arithmetic").install()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
