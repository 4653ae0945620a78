import pytest

from distopt.device import gpu_state

STATE = gpu_state()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(__file__.rsplit("/", 1)[0]):
            item.add_marker(pytest.mark.gpu)
            if STATE != "ok":
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {STATE}"))
