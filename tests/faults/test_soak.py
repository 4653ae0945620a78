"""A short soak; ``distopt run -n 4 tests/faults/soak.py`` is the long one."""

from pathlib import Path

import pytest

from launch import distopt_run


@pytest.mark.faults
def test_refused_steps_leave_no_trace():
    code, output = distopt_run(3, Path(__file__).with_name("soak.py"), 400, timeout=60)
    assert code == 0, output
    assert "400 steps, 8 refused" in output
