"""The language models of examples/lm: every method trains, virtual ranks are real ones, tables are those of records."""

import json
import re
import sys

import pytest

from launch import PROJECT, distopt_run, finish
from tiers import every

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

pytestmark = pytest.mark.torch
LM, PAGE = PROJECT / "examples" / "lm", PROJECT / "docs" / "experiments" / "lm"
ON_ONE_CORE = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""}  # and a script finds its neighbours
TWO_STEPS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, text
from methods import METHODS, Run
from trainings import on_one_core, train_here
on_one_core()
whole, parts = text.read(), text.windows(text.read().training)
places = np.array_equal(parts[:, :-1].reshape(-1), whole.training[: parts[:, :-1].size])
places &= np.array_equal(parts[1:, 0], parts[:-1, -1])
known = text.known() in ("", whole.sha256())
text.read = lambda: whole._replace(held_out=whole.held_out[:5000])
found = {}
for name, of in METHODS.items():
    told = []
    run = Run(name, "0.05", 2, 1, of.rates[0], of.outers[0], steps=2)
    report, loss = train_here(run, lambda *numbers: told.append(numbers))
    found[name] = [report, loss, [step for step, _, _ in told]]
print(json.dumps([found, bool(places), known, len(whole.names)]))
"""
TABLES = """
import sys
sys.path.insert(0, sys.argv[1])
import report
print("\\n".join(report.lines(report.RECORDS)))
"""


def python(text, timeout):
    code, output = finish([sys.executable, "-c", text, str(LM)], timeout, env=ON_ONE_CORE)
    assert code == 0, output
    return output


def test_every_method_trains_on_the_text_of_this_python():
    found, places, known, held_out = json.loads(python(TWO_STEPS, 200).splitlines()[-1])
    assert places
    assert known
    assert held_out > 5
    for name, (report, loss, steps) in found.items():
        assert steps == [1, 2]
        assert 3 < loss < 6, name
        sends = any(verb.startswith("all") for verb in report)
        assert sends != (name.startswith(("diloco", "muloco", "sparse", "streaming"))), name


def trained(output):
    """The losses and megabytes of each line."""
    return re.findall(r"step +(\d+)  loss (\S+)  (\S+) MB sent", output)


@pytest.mark.parametrize("mode", every(3, ["diloco-10", "topk", "sparta"]))
def test_virtual_ranks_train_as_processes_do(mode):
    script = [LM / "train.py", "--mode", mode, "--steps", "10"]
    code, output = finish([sys.executable, *map(str, script), "--ranks", "2"], 100, env=ON_ONE_CORE)
    assert code == 0, output
    of_processes, processes = distopt_run(2, *script, timeout=100, env=ON_ONE_CORE)
    assert of_processes == 0, processes
    assert len(trained(output)) == 10
    assert trained(output) == trained(processes)


def test_the_tables_of_the_page_are_those_of_the_records():
    assert python(TABLES, 60) == (PAGE / "tables.md").read_text()


PREDICTED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, predict
from model import parameters
rng, hits = np.random.default_rng(0), 0
law = lambda size: 20 * parameters(size) ** -0.18 * np.exp(0.01 * rng.standard_normal(3))
for _ in range(400):
    found = predict.predicted({parameters(size): law(size).tolist() for size in ("0.05", "0.1", "0.2", "0.4")})
    hits += found["low"] <= np.exp(np.log(law("1")).mean()) <= found["high"]
print(json.dumps([hits / 400, found]))
"""


def test_a_prediction_finds_the_law_and_how_far_it_may_be_off():
    covered, found = json.loads(python(PREDICTED, 60))
    assert 0.92 < covered < 0.98
    assert found["A"] == pytest.approx(20, rel=0.2)
    assert found["b"] == pytest.approx(-0.18, abs=0.015)
