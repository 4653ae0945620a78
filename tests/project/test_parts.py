"""Registries: what ``distopt.compress.ALL`` and ``distopt.optim.ALL`` have, every law, table and benchmark finds."""

import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from distopt import compress, optim

ROOT = Path(__file__).parents[2]

# What somebody adds: the files of a compressor that is exchanged in two phases, and of an optimizer; their entries in
# the registries; and the pages, which are to name them.
ABOVE_MEAN = '''
"""Send the entries that are so many times as large as the mean."""

import numpy as np

from distopt.compress.planes import payload_size, unpack_entries
from distopt.compress.top_k import Sparse


class AboveMean(Sparse):
    """Send the entries whose magnitude is above ``times`` the mean magnitude."""

    def __init__(self, times):
        self.times = times

    def payload_bytes(self, n, itemsize=4, layout=None):
        return None

    def extract(self, x, add, context):
        if add.gradient.size:
            x += add.gradient
        index = np.flatnonzero(abs(x) > self.times * abs(x).mean()) if x.size else np.zeros(0, np.int32)
        payload = context.scratch("payload", payload_size(index.size, x.itemsize))
        indices, values = unpack_entries(payload, x.dtype)
        indices[:], values[:] = index, x[index]
        x[index] = 0
        return payload
'''
SIGN_SGD = '''
"""The signSGD optimizer."""

from distopt import kernels
from distopt.optim.optimizer import ElementwiseOptimizer


class SignSGD(ElementwiseOptimizer):
    """A sign descent optimizer (Bernstein et al., 2018)."""

    def rule_numbers(self):
        return {}

    def run_kernel(self, members, grad, slots, *rest):
        kernels.sign_descent(members, grad, *rest)
'''
ENTRIES = """
import numpy as np
from above_mean import AboveMean
from sign_sgd import SignSGD
from distopt import compress, optim
from distopt.compress import ErrorFeedback
from distopt.compress.part import Part, Timed, Word, both
from distopt.optim import part as of_optimizers

compress.ALL[AboveMean] = lambda: Part(
    words={"above": Word(lambda times, options: ErrorFeedback(AboveMean(times)), (3.0,))},
    laws=both("above", ErrorFeedback(AboveMean(2.0))),
    exact=(AboveMean(2.0),),
    timed={"above the mean": Timed(lambda _: ErrorFeedback(AboveMean(3.0)), 0.02)},
)
optim.ALL[SignSGD] = lambda: of_optimizers.OptimizerPart(
    laws={"sign sgd": lambda: SignSGD(0.01)},
    timed={"sign sgd": of_optimizers.TimedOptimizer(lambda: SignSGD(1e-6), 3)},
    equations={"SignSGD": of_optimizers.Equations(lambda: SignSGD(0.01), lambda t, w, g: (w - 0.01 * np.sign(g),), 0)},
)
"""
FOUND = """
import entries
import numpy as np
from above_mean import AboveMean
from sign_sgd import SignSGD
from benchmarks import link, select
import digests, laws, test_parts
from distopt import run_ranks
from distopt.lab import mode
from distopt.lab.commands import bench_kernels, prove
from distopt.lab.laws.references import CASES

# a mode string
assert repr(mode("above=2.5").compressor) == "ErrorFeedback(AboveMean(times=2.5))"
# all laws, in all ways of exchanging, alone and with every option
both = ["above", "above in two phases"]
assert set(both) <= set(laws.MODES) and set(both) <= set(laws.LOSE_NOTHING)
def of_laws(comm):
    laws.every_mode(comm, both)
    for name in both:
        laws.nothing_is_lost(comm, name)
    laws.ranks_agree_with_one(comm, laws.OPTIMIZERS["sign sgd"])
    laws.same_bits(comm, make=laws.OPTIMIZERS["sign sgd"])
    laws.resume(comm, make=laws.OPTIMIZERS["sign sgd"], stops=(3,))
    laws.sharding_changes_no_bit(comm, make=laws.OPTIMIZERS["sign sgd"])
run_ranks(3, of_laws)
# the digests
assert {"above, sgd", "above in two phases, adam", "topk, sign sgd"} <= set(digests.cases())
# distopt prove
trial = prove.Trial(np.random.default_rng(0), None, None)
assert any(isinstance(c, AboveMean) for c in laws.EXACT) and "SignSGD" in CASES
print(prove.compressors_conserve(trial), prove.optimizers_are_their_equations(trial))
# benchmarks
assert "above the mean" in bench_kernels.selection(1 << 12) and "sign sgd" in bench_kernels.passes(1 << 12)
assert "above the mean" in link.GATHERED
select.measure.interleaved = lambda cases, **rounds: {name: case() for name, case in cases.items()}
assert "above the mean" in select.ours(1 << 12)
# the documentation
missing = ["docs/guides/modes.md: AboveMean", "docs/guides/modes.md: above", "docs/guides/optimizers.md: SignSGD"]
assert test_parts.unnamed() == missing
"""


PAGES = {"modes": compress.ALL, "optimizers": optim.ALL}


def unnamed():
    """What the tables of parts do not name."""
    missing = []
    for page, registry in PAGES.items():
        rows = [line for line in (ROOT / f"docs/guides/{page}.md").read_text().splitlines() if line.startswith("| `")]
        names = set(re.findall(r"`(\w+)", " ".join(rows)))
        for kind, about in registry.items():
            due = {kind.__name__, *getattr(about(), "words", ())}
            missing += [f"docs/guides/{page}.md: {name}" for name in sorted(due - names)]
    return missing


def kinds_of(compressor):
    """The classes of a compressor and of those within."""
    inner = getattr(compressor, "compressor", None) or getattr(compressor, "selector", None)
    return {type(compressor)} | (kinds_of(inner) if inner else set())


def public(package, base):
    return {
        kind
        for kind in (getattr(package, name) for name in package.__all__)
        if inspect.isclass(kind)
        and issubclass(kind, base)
        and kind not in (base, optim.Optimizer, optim.OptimizerWrapper)
    }


def test_every_public_class_is_registered():
    assert set(compress.ALL) == public(compress, compress.Compressor)
    assert set(optim.ALL) == public(optim, optim.Optimizer | optim.OptimizerWrapper)


def test_the_tables_of_the_documentation_have_every_part():
    assert unnamed() == []


def test_every_name_is_one_parts():
    about = [about() for about in compress.ALL.values()]
    for field in ("words", "laws", "timed"):
        names = Counter(name for part in about for name in getattr(part, field))
        assert [name for name, times in names.items() if times > 1] == []


def test_laws_try_every_compressor_with_shards_in_two_phases():
    tries = [tried for about in compress.ALL.values() for tried in about().laws.values()]
    tried = set().union(*(kinds_of(t.compressor) for t in tries if t.exchange == "two_phase"))
    alone = {c for about in compress.ALL.values() for c in (*about().exact, *about().rounded)}
    assert {kind for c in alone if c.sharded() for kind in kinds_of(c)} <= tried


@pytest.mark.thorough
def test_laws_tables_and_benchmarks_find_what_is_registered(tmp_path):
    """A new part is three files: its own, the registry, and its page."""
    for name, text in (("above_mean", ABOVE_MEAN), ("sign_sgd", SIGN_SGD), ("entries", ENTRIES), ("found", FOUND)):
        (tmp_path / f"{name}.py").write_text(text)
    paths = [tmp_path, ROOT, ROOT / "tests", ROOT / "tests" / "project"]
    program = f"import sys; sys.path[:0] = {[str(path) for path in paths]}; import found"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
