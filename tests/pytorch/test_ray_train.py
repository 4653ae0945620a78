"""distopt in Ray Train, whose own restart goes on after a worker's death."""

import json
import sys
from pathlib import Path

import pytest

from launch import finish

pytestmark = pytest.mark.thorough
SCRIPT = Path(__file__).with_name("ray_training.py")


def test_a_worker_dies_and_rays_restart_ends_with_the_same_bits(tmp_path):
    for package in ("torch", "ray"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install torch 'ray[train]'")
    there = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    there |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    code, output = finish([sys.executable, str(SCRIPT), str(tmp_path)], 480, cwd=tmp_path, env=there)
    assert code == 0, output
    for rank in range(2):
        whole, killed = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("whole", "killed"))
        assert whole["first"] == 0 < killed["first"], output
        assert {**killed, "first": 0} == whole
        assert f"gloo; Ray set RANK={rank}, WORLD_SIZE=2" in whole["world"]
