import os
import shlex
import sys
from pathlib import Path

import pytest

from distopt import device

STATE = device.gpu_state()
LOG = os.environ.get("DISTOPT_LOG")  # a file: what of this piece had begun and ended when it was cut short (run.sh)


def pytest_report_header():
    """What a result depends on, for the file that it is kept in."""
    command = shlex.join(sys.orig_argv)
    if STATE != "ok":
        return [command, f"no GPU: {STATE}"]
    from benchmarks import gpu

    names = [f"GPU {number}: {device.gpu_name(number)}" for number in range(device.gpu_count())]
    return [command, *gpu.versions().splitlines(), *names]


def pytest_collection_modifyitems(config, items):
    known = set(Path(LOG).read_text().splitlines()) if LOG and Path(LOG).exists() else ()
    if ended := [item for item in items if f"ended {item.nodeid}" in known]:
        items[:] = [item for item in items if item not in ended]
        config.hook.pytest_deselected(items=ended)
    items.sort(key=lambda item: f"begun {item.nodeid}" in known)  # last what did not end: it may hang
    for item in items:
        if item.path.is_relative_to(__file__.rsplit("/", 1)[0]):
            item.add_marker(pytest.mark.gpu)
            if STATE != "ok":
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {STATE}"))


def note(what):
    if LOG:
        with open(LOG, "a") as file:
            print(what, file=file)


def pytest_runtest_logstart(nodeid):
    note(f"begun {nodeid}")


def pytest_runtest_logfinish(nodeid):
    note(f"ended {nodeid}")


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
