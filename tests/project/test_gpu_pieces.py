"""The first hour on a GPU (tests/gpu/README.md), as far as it goes without one: its pieces, its runner and its kit."""

import os
import re
import shlex
import shutil
import sys
import tarfile
import venv
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

from launch import PROJECT, finish

pytestmark = [pytest.mark.device, pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")]
README = (PROJECT / "tests/gpu/README.md").read_text()
RUN = PROJECT / "tests/gpu/run.sh"
LIST = re.search(r"^PIECES='\n(.*?)^'", RUN.read_text(), re.MULTILINE | re.DOTALL)[1]
PIECES = [line.split(maxsplit=3) for line in LIST.splitlines()]  # call, name, seconds, what it does
NAMES = [name for _, name, _, _ in PIECES]
CALLS = sorted({call for call, *_ in PIECES})
END_OF_A_CALL = 540


def test_the_pieces_are_those_of_the_readme_in_its_order():
    assert re.findall(r"^\| `((?:test|bench)-gpu-\w+)` \|", README, re.MULTILINE) == NAMES
    assert [call for call, *_ in PIECES] == sorted(call for call, *_ in PIECES)
    assert len(CALLS) * END_OF_A_CALL < 30 * 60 - 120, "a machine that is lent for half an hour takes time to start"
    assert all(int(seconds) <= 240 for _, _, seconds, _ in PIECES)


def collected(words):
    """The tests that a piece would run."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *words, "--collect-only", "-q", "-p", "no:cacheprovider"]
    code, output = finish(command, 60, cwd=PROJECT)
    assert code == 0, output
    return {line for line in output.splitlines() if line.startswith("tests/gpu/")}


def test_together_the_pieces_run_every_test_for_gpus():
    words = {name: shlex.split(command) for _, name, _, command in PIECES}
    found = {name: collected(rest) for name, (kind, *rest) in words.items() if kind == "tests"}
    assert all(found.values())
    functions = {re.sub(r"\[.*", "", line) for lines in found.values() for line in lines}
    written = {
        f"tests/gpu/{file.name}::{name}"
        for file in (PROJECT / "tests/gpu").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert functions == written
    for size in ("one_rank", "two_ranks", "four_ranks"):
        assert any(size in line for lines in found.values() for line in lines)


def test_what_a_sanitizer_looks_at_is_there():
    words = re.search(r"tests/gpu/test_load.py tests/gpu/test_real.py -k .*", RUN.read_text())[0].rstrip("; }")
    assert len(collected(shlex.split(words))) > 10


# ------------------------------------------------------------------------------------------------- the runner


def run(where, folder, *calls, code=0, **environment):
    """What a call prints; its results are in a folder."""
    environment = {"GPU_PYTHON": sys.executable, "FIRST_HOUR": str(folder / "kept")} | environment
    found, output = finish(["bash", str(where), *calls], 200, env=environment | {"OUT": str(folder / "out")})
    assert found == code, output
    return output


def ends(output):
    """(what came of it, piece) of each piece that a call did."""
    return re.findall(r"^(passed|failed|cut|skipped) +((?:test|bench)-gpu-\w+)", output, re.MULTILINE)


def of_call(call):
    return [name for number, name, *_ in PIECES if number == call]


@pytest.fixture
def python(tmp_path):
    """A Python whose pieces are quick: what each of them does stands in a file of its name."""
    (tmp_path / "do").mkdir()
    (tmp_path / "python").write_text(
        f"""#!/bin/bash
        case "$*" in
            *tests/gpu/*) piece=$(echo "$*" | grep -oE 'tests/gpu/test_[a-z_]+' | head -1) ;;
            *cli*doctor | *benchmarks.*) piece=${{*: -1}} ;;
            *) exit 0 ;;
        esac
        if [[ -e {tmp_path}/do/$(basename "$piece") ]]; then . {tmp_path}/do/$(basename "$piece"); fi
        echo "tests/gpu/test_this.py::test_that PASSED [100%]"
        """
    )
    (tmp_path / "python").chmod(0o755)
    return str(tmp_path / "python")


def test_a_piece_that_fails_is_followed_by_the_others_and_told_at_once(python, tmp_path):
    (tmp_path / "do/test_load").write_text("echo 'E   AssertionError: no such kernel'; exit 1")
    output = run(RUN, tmp_path, "1", GPU_PYTHON=python, code=1)
    came = {name: "failed" if name == "test-gpu-load" else "passed" for name in of_call("1")}
    assert ends(output) == [(end, name) for name, end in came.items()]
    summary = (tmp_path / "out/summary.txt").read_text()
    assert ends(summary) == ends(output)
    assert re.search(r"^failed +test-gpu-load +\d+ s\n +E   AssertionError: no such kernel$", summary, re.MULTILINE)
    assert sorted(os.listdir(tmp_path / "out")) == ["results.tgz", "summary.txt"]
    with tarfile.open(tmp_path / "out/results.tgz") as results:
        assert {f"results/{name}.txt" for name in of_call("1")} <= set(results.getnames())


def test_what_was_done_is_not_done_again_unless_it_is_named(python, tmp_path):
    run(RUN, tmp_path, "1", GPU_PYTHON=python)
    assert ends(run(RUN, tmp_path, "1", GPU_PYTHON=python)) == []
    assert ends(run(RUN, tmp_path, "test-gpu-load", GPU_PYTHON=python)) == [("passed", "test-gpu-load")]
    output = run(RUN, tmp_path, "2", GPU_PYTHON=python)
    assert ends(output) == [("passed", name) for name in of_call("2")]
    assert ends((tmp_path / "out/summary.txt").read_text()) == [("passed", n) for n in of_call("1") + of_call("2")]


def test_a_process_that_a_piece_leaves_after_is_ended(python, tmp_path):
    left = f"setsid sleep 600 > {tmp_path}/said & echo $! > {tmp_path}/pid"
    begun = "until grep -q sleep /proc/$!/comm; do :; done"  # in the middle of exec a process has no environment
    (tmp_path / "do/test_load").write_text(f"{left}; {begun}")
    run(RUN, tmp_path, "test-gpu-load", GPU_PYTHON=python)
    pid = (tmp_path / "pid").read_text().strip()
    said = (tmp_path / "kept/results/test-gpu-load.txt").read_text()
    assert f"left behind, and ended: processes {pid}\n" in said


def test_a_call_ends_in_time_and_the_next_one_goes_on_with_what_was_cut(python, tmp_path):
    (tmp_path / "do/test_train").write_text("sleep 600")
    output = run(RUN, tmp_path, "1", GPU_PYTHON=python, LIMIT="35", code=1)
    cut = of_call("1")[1:]
    assert ends(output) == [("passed", "test-gpu-doctor"), *(("cut", name) for name in cut)]
    assert output.count("not begun") == len(cut) - 1
    (tmp_path / "do/test_train").write_text("")
    output = run(RUN, tmp_path, "3", GPU_PYTHON=python)
    assert [e for e in ends(output) if e[0] != "skipped"] == [
        ("passed", n) for n in [*of_call("3"), *cut] if "check" not in n
    ]


def test_of_a_piece_that_was_cut_the_tests_that_had_ended_are_left_out_and_the_cut_one_is_the_last(tmp_path):
    words = ["tests/gpu/test_load.py", "-k", "unpack or a_step"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", *words]
    log = tmp_path / "log"
    runs = []
    for _ in range(2):
        code, output = finish(command, 60, cwd=PROJECT, env={"DISTOPT_LOG": str(log)})
        assert code == 0, output
        runs.append(re.findall(r"^(tests/gpu/\S+) [A-Z]+ ", output, re.MULTILINE))
        first, *rest = runs[0]
        log.write_text(f"begun {first}\nbegun {rest[0]}\nended {rest[0]}\n")
    assert set(runs[0]) == collected(words)
    assert runs[1] == [*rest[1:], first]


# ------------------------------------------------------------------------------------------------- the kit


def test_the_kit_is_small_and_each_of_its_pieces_ends_in_good_order_without_a_gpu(tmp_path):
    kit = tmp_path / "kit"
    code, output = finish(
        ["make", "-o", ".venv", "first-hour-kit", f"KIT={kit}", f"PYTHON={sys.executable}", "WHEELS="], 60, cwd=PROJECT
    )
    assert code == 0, output
    assert sum(file.stat().st_size for file in kit.rglob("*")) < 15e6
    venv.create(tmp_path / "bare", with_pip=False)  # which knows nothing of this checkout; its packages are found below
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/site").symlink_to(Path(pytest.__file__).parent.parent)
    bare = {"GPU_PYTHON": str(tmp_path / "bare/bin/python"), "CUDA_VISIBLE_DEVICES": ""}
    for call in CALLS:
        output = run(kit / "run.sh", tmp_path, call, **bare)
        assert ends(output) == [("skipped", name) for name in of_call(call)], output
        assert output.count("no GPU") >= len(of_call(call)) - 2
    for what in ("GPU: ", "NCCL: ", "numpy 2", "make: /", "compute-sanitizer: ", "loopback: ok"):
        assert what in (tmp_path / "out/summary.txt").read_text()
