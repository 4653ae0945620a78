import os

import pytest

from distopt import device

STATE = device.gpu_state()


def pytest_report_header():
    """What a result depends on, for the file that it is kept in."""
    if STATE != "ok":
        return f"no GPU: {STATE}"
    from benchmarks import gpu

    return [*gpu.versions().splitlines(), *(f"GPU {k}: {device.gpu_name(k)}" for k in range(device.gpu_count()))]


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

    for name, value in workers.SEVERAL_ON_ONE.items():
        monkeypatch.setenv(name, value)
