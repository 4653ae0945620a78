"""The default tier's promises hold: it starts no process and skips nothing."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiers


def test_the_default_leaves_out_every_mark(pytestconfig):
    settings = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert {line.partition(":")[0] for line in settings["markers"]} == tiers.TIERS | {"sampled(n)"}
    assert tiers.default_expression(pytestconfig).startswith("not (")


def test_a_test_without_a_mark_may_start_no_process():
    with pytest.raises(pytest.fail.Exception, match="starts a process: mark it mpi"):
        subprocess.run(["true"])


def test_sampled_n_keeps_n_evenly_spaced_cases_in_the_default_tier():
    """Ten cases of which three are sampled, and a test that is not."""
    moved = []

    def item(nodeid, mark):
        return SimpleNamespace(
            nodeid=nodeid, get_closest_marker=lambda _: mark, add_marker=lambda _: moved.append(nodeid)
        )

    cases = [f"test_file.py::test_many[{k}]" for k in range(10)]
    tiers.keep_samples([item(n, pytest.mark.sampled(3).mark) for n in cases] + [item("test_file.py::test_one", None)])
    assert [n for n in cases if n not in moved] == [cases[k] for k in (0, 3, 6)]
    assert set(moved) < set(cases)


@pytest.mark.thorough
def test_a_test_with_a_marker_may_start_a_process():
    subprocess.run(["true"], check=True)


def report_of(item, report):
    """What pytest is told of a skipped test."""
    steps = tiers.DefaultTier().pytest_runtest_makereport(item)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(report)
    return end.value.value


@pytest.mark.parametrize(("marks", "outcome"), [([], "failed"), ([pytest.mark.plot], "skipped")])
def test_a_skipped_test_without_a_mark_is_a_failure(marks, outcome):
    item = SimpleNamespace(nodeid="here", iter_markers=lambda: marks)
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test.py", 1, "Skipped: no cupy"))
    assert report_of(item, report).outcome == outcome
    if not marks:
        assert report.longrepr.endswith("nothing is skipped: mark it.  Skipped: no cupy")


def test_a_modules_marks_are_read_without_importing_it():
    text = "import nothing_there\npytestmark = [pytest.mark.device, pytest.mark.usefixtures('doubles')]\n"
    assert tiers.TIERS & tiers.module_marks(text) == {"device"}
    assert tiers.module_marks("import pytest\n") == set()
    assert tiers.module_marks(Path(__file__).read_text()) == set()


def test_modules_of_other_tiers_are_left_out_by_default_alone(pytestconfig, tmp_path):
    file = tmp_path / "test_torch.py"
    file.write_text("pytestmark = pytest.mark.torch\nimport torch\n")
    for expression, ignored in ((tiers.default_expression(pytestconfig), True), ("torch", None)):
        config = SimpleNamespace(getini=pytestconfig.getini, option=SimpleNamespace(markexpr=expression))
        assert tiers.DefaultTier().pytest_ignore_collect(file, config) is ignored


@pytest.mark.thorough
def test_the_default_tier_is_collected_without_what_other_tiers_need(pytestconfig):
    missing = ["cupy", "torch", "matplotlib", "nvidia", "jax", "optax", "safetensors"]
    script = (
        f"import sys; sys.modules |= dict.fromkeys({missing}); import pytest; sys.exit(pytest.main(['-q', '--co']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" not in done.stdout
