"""The build: what an install without a compiler says, and what a wheel holds."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import distopt
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


def test_all_files_name_one_version():
    named = {name: (PROJECT / name).read_text() for name in ("CITATION.cff", "conda/recipe.yaml", "pyproject.toml")}
    versions = {name: re.search(r'^ *version(?: =|:) "?([\d.]+)', text, re.M)[1] for name, text in named.items()}
    assert set(versions.values()) == {distopt.__version__}, versions


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout: DISTOPT_WHEEL, or a new one."""
    if given := os.environ.get("DISTOPT_WHEEL"):
        return zipfile.ZipFile(given)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, PROJECT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.iterdir()
    return zipfile.ZipFile(file)


def libraries(wheel):
    """The contents of its libraries, by name."""
    return {Path(name).name: wheel.read(name) for name in wheel.namelist() if name.endswith(".so")}


@pytest.mark.thorough
def test_a_wheel_is_for_every_python_and_holds_the_package_alone(wheel):
    assert re.fullmatch(r"distopt-[\d.]+-py3-none-\w+_" + platform.machine() + r"\.whl", Path(wheel.filename).name)
    names = wheel.namelist()
    assert {name.split("/")[0].rpartition(".")[2] for name in names} == {"distopt", "dist-info"}
    texts = {f"distopt/native/{file.name}" for file in (PROJECT / "native").iterdir()}
    modules = {str(file.relative_to(PROJECT)) for file in (PROJECT / "distopt").rglob("*.py")}
    assert texts | modules | {"distopt/py.typed"} <= set(names)
    levels = {"", "-v3", "-v4"} if platform.machine() == "x86_64" else {""}
    assert libraries(wheel).keys() == {f"libdistopt{level}.so" for level in levels | {"-loopback"}}


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="libraries need another libc here")
def test_libraries_of_a_wheel_do_with_an_old_glibc_and_no_libstdcxx(wheel):
    """The tag of ``make wheels`` is manylinux_2_17: that of the newest version of a symbol."""
    for name, content in libraries(wheel).items():
        versions = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content)]
        assert 0 < max(versions) <= 17, (name, versions)
        assert b"GLIBCXX" not in content, name
        assert b"libstdc++" not in content, name
