import os
import shlex
import sys

import pytest

from distopt import device

STATE = device.gpu_state()


def pytest_report_header():
    """What a result depends on, for the file that it is kept in."""
    command = shlex.join(sys.orig_argv)
    if STATE != "ok":
        return [command, f"no GPU: {STATE}"]
    from benchmarks import gpu

    names = [f"GPU {number}: {device.gpu_name(number)}" for number in range(device.gpu_count())]
    return [command, *gpu.versions().splitlines(), *names]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(__file__.rsplit("/", 1)[0]):
            item.add_marker(pytest.mark.gpu)
            if STATE != "ok":
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {STATE}"))


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
