"""Ranges of NVTX, by what a script has imported of the packages that have them."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = (
    ("nvtx", "nvtx", "push_range", "pop_range"),
    ("cupy", "cupy.cuda.nvtx", "RangePush", "RangePop"),
    ("torch", "torch.cuda.nvtx", "range_push", "range_pop"),
)


@functools.cache
def push_and_pop() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Return what pushes and pops a range; ValueError if nothing that was imported does."""
    for package, module, push, pop in PACKAGES:
        found = sys.modules.get(package)
        if found and (package != "torch" or found.version.cuda):
            ranges = importlib.import_module(module)
            return getattr(ranges, push), getattr(ranges, pop)
    raise ValueError("nvtx, cupy, or a torch with CUDA must be imported before for ranges of NVTX, got none of them")
