"""The build: what an install without a compiler says, and what a wheel holds."""

import os
import shutil
import subprocess

import pytest

from launch import PROJECT

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")


@pytest.mark.thorough
@needs_cmake
def test_a_missing_compiler_ends_the_build_with_what_to_install(tmp_path):
    env = dict(os.environ) | {"CXX": "/bin/false"}
    command = ["cmake", "-S", PROJECT, "-B", tmp_path]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "apt-get install g++" in done.stdout + done.stderr


def test_metadata_of_the_installed_package():
    from importlib.metadata import distribution

    found = distribution("distopt")
    extras = set(found.metadata.get_all("Provides-Extra"))
    assert {"mpi", "cuda12", "cuda13", "nvrtc", "torch", "test", "plot", "bench"} <= extras
    assert found.metadata["License-Expression"] == "Apache-2.0"
    wheel = found.read_text("WHEEL")
    assert "Tag: py3-none-" in wheel, wheel
    assert "Tag: py3-none-any" not in wheel
