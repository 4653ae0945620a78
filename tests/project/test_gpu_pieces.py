"""The first hour on a GPU (tests/gpu/README.md), as far as it goes without one: what each piece would run."""

import re
import shlex
import shutil
import sys

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

from launch import PROJECT, finish

pytestmark = [pytest.mark.device, pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")]
README = (PROJECT / "tests/gpu/README.md").read_text()
PIECES = re.findall(r"^\| `((?:test|bench)-gpu-\w+)` \|", README, re.MULTILINE)


def recipe(target):
    """The lines that make would run, without the build of the library."""
    code, output = finish(
        ["make", "-n", "-o", "distopt/libdistopt.so", f"GPU_PYTHON={sys.executable}", target], 30, cwd=PROJECT
    )
    assert code == 0, output
    return output.replace("\\\n", " ").splitlines()


def test_the_pieces_are_those_of_the_readme_in_its_order():
    assert recipe("first-hour") == [line for piece in PIECES for line in recipe(piece)]
    assert sorted(recipe("first-hour")) == sorted(recipe("test-gpu") + recipe("bench-gpu"))
    assert len(PIECES) == 13


@pytest.mark.parametrize("piece", PIECES)
def test_each_piece_ends_within_five_minutes_and_keeps_what_it_prints(piece):
    (line,) = recipe(piece)
    assert line.count("PYTHONPATH=. timeout 290 ") == 1
    if piece.startswith("bench"):
        assert line.endswith("--save")
    else:
        assert line.endswith(f"2>&1 | tee benchmarks/results/{piece}.txt")


def collected(piece):
    """The tests that a piece would run."""
    words = shlex.split(recipe(piece)[0].replace(";", " ; "))
    words = words[words.index("pytest") + 1 :]
    words = words[: min(words.index(end) for end in ("2>&1", ";") if end in words)]
    command = [sys.executable, "-m", "pytest", *words, "--collect-only", "-q", "-p", "no:cacheprovider"]
    code, output = finish(command, 60, cwd=PROJECT)
    assert code == 0, output
    return {line for line in output.splitlines() if line.startswith("tests/gpu/")}


def test_together_the_pieces_run_every_test_for_gpus():
    found = {piece: collected(piece) for piece in PIECES if piece.startswith("test") and piece != "test-gpu-doctor"}
    assert all(found.values())
    assert found["test-gpu-memcheck"] == found["test-gpu-racecheck"]
    functions = {re.sub(r"\[.*", "", line) for lines in found.values() for line in lines}
    written = {
        f"tests/gpu/{file.name}::{name}"
        for file in (PROJECT / "tests/gpu").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert functions == written
    for size in ("one_rank", "two_ranks", "four_ranks"):
        assert any(size in line for lines in found.values() for line in lines)
