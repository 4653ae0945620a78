"""The default tier's promises hold: it starts no process and skips nothing."""

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiers


def test_the_default_leaves_out_every_mark(pytestconfig):
    settings = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert {line.partition(":")[0] for line in settings["markers"]} == tiers.TIERS | {
        "sampled(n)",
        "pairs",
        "any_brand",
    }
    assert tiers.default_expression(pytestconfig).startswith("not (")


def test_a_test_without_a_mark_may_start_no_process():
    with pytest.raises(pytest.fail.Exception, match="starts a process: mark it mpi"):
        subprocess.run(["true"])


def shared_out(mark, cases):
    """The marks that the cases of a test get, by number; and of a test beside it, which has no mark."""
    found = {}

    def item(nodeid, case=None, mark=None):
        return SimpleNamespace(
            nodeid=nodeid,
            callspec=SimpleNamespace(params=dict(enumerate(case or ()))),
            get_closest_marker=lambda name: mark if mark and mark.name == name else None,
            add_marker=lambda given: found.setdefault(nodeid, set()).add(given.name),
        )

    items = [item(f"test_file.py::test_many[{k}]", case, mark) for k, case in enumerate(cases)]
    tiers.keep_samples([*items, item("test_file.py::test_one")])
    assert "test_file.py::test_one" not in found
    return [found.get(item.nodeid, set()) for item in items]


def test_sampled_n_keeps_n_evenly_spaced_cases_in_the_default_tier():
    """Ten cases of which three are sampled, and a test that is not."""
    marks = shared_out(pytest.mark.sampled(3).mark, [(k,) for k in range(10)])
    assert [k for k, names in enumerate(marks) if not names] == [0, 3, 6]
    assert all(names in (set(), {"thorough"}) for names in marks)


PRODUCT = list(itertools.product("abcd", "xyz", (1, 2, 3), (False, True)))


def pairs_of(cases):
    """Every two values that stand together in a case."""
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_two_values_meet_in_few_cases():
    few = [PRODUCT[number] for number in tiers.all_pairs(PRODUCT)]
    assert pairs_of(few) == pairs_of(PRODUCT)
    assert len(few) <= 15  # of 72; twelve at least, as many as pairs of the two longest
    assert tiers.all_pairs(PRODUCT) == tiers.all_pairs(PRODUCT)
    assert tiers.all_pairs([]) == set()


def test_cases_that_are_no_product_have_the_pairs_that_they_have():
    some = [case for case in PRODUCT if case[0] != "a" or case[2] == 2]
    assert pairs_of([some[number] for number in tiers.all_pairs(some)]) == pairs_of(some)


@pytest.mark.parametrize("mark", [pytest.mark.sampled(4).mark, pytest.mark.pairs.mark], ids=["sampled", "pairs"])
def test_the_full_product_is_a_tier_of_its_own(mark):
    marks = shared_out(mark, PRODUCT)
    assert pairs_of([case for case, names in zip(PRODUCT, marks, strict=True) if "full" not in names]) == pairs_of(
        PRODUCT
    )
    assert sum("full" in names for names in marks) >= 72 - 19
    assert sum(not names for names in marks) == (4 if mark.name == "sampled" else sum("full" not in n for n in marks))


def test_each_value_in_turn_meets_every_other_one_in_full():
    found = tiers.in_turn("abcd", (1, 2, 3))
    assert [case.values for case in found if not case.marks] == [("a", 1), ("b", 2), ("c", 3), ("d", 1)]
    assert {case.values for case in found} == set(itertools.product("abcd", (1, 2, 3)))
    assert {mark.name for case in found for mark in case.marks} == {"full"}


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
    missing = ["cupy", "torch", "matplotlib", "nvidia", "jax", "flax", "optax", "safetensors"]
    script = (
        f"import sys; sys.modules |= dict.fromkeys({missing}); import pytest; sys.exit(pytest.main(['-q', '--co']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" not in done.stdout
