"""GPUs from the begin of a run of pytest, which collects tests of real ones: ``-p doubles.plugin``."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path += [str(folder) for folder in sorted(TESTS.iterdir()) if folder.is_dir()] + [str(TESTS.parent)]

import nccl_checks  # noqa: E402

nccl_checks.install()
