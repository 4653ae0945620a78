import os
import shlex
import sys
from pathlib import Path

import pytest

from distopt import device

STATE = device.gpu_state()
BEGUN = os.environ.get("DISTOPT_BEGUN")  # a file: the tests that had begun when this piece was cut short (run.sh)


def pytest_report_header():
    """What a result depends on, for the file that it is kept in."""
    command = shlex.join(sys.orig_argv)
    if STATE != "ok":
        return [command, f"no GPU: {STATE}"]
    from benchmarks import gpu

    names = [f"GPU {number}: {device.gpu_name(number)}" for number in range(device.gpu_count())]
    return [command, *gpu.versions().splitlines(), *names]


def pytest_collection_modifyitems(config, items):
    begun = Path(BEGUN).read_text().splitlines() if BEGUN and Path(BEGUN).exists() else []
    if again := [item for item in items if item.nodeid in begun]:
        items[:] = [item for item in items if item.nodeid not in begun]
        config.hook.pytest_deselected(items=again)
    for item in items:
        if item.path.is_relative_to(__file__.rsplit("/", 1)[0]):
            item.add_marker(pytest.mark.gpu)
            if STATE != "ok":
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {STATE}"))


def pytest_runtest_logstart(nodeid):
    if BEGUN:
        with open(BEGUN, "a") as file:
            print(nodeid, file=file)


@pytest.fixture(autouse=True, scope="session")
def allocator():
    """Under memcheck each array is an allocation of its own: within cupy's pool it would see no overrun."""
    if STATE == "ok" and "DISTOPT_NO_POOL" in os.environ:
        device.array_module().cuda.set_allocator(None)


@pytest.fixture
def loopback(monkeypatch):
    """Where the parent, which makes the id, waits for the ranks."""
    import workers

    for name, value in workers.environment("the parent").items():
        monkeypatch.setenv(name, value)
