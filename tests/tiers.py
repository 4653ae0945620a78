"""The tiers of the tests: marks of ``pyproject.toml``, all of which a bare ``pytest`` leaves out.

A test without such a mark is of the default tier, which is to be quick and whole on every machine: it starts no
process (``test_two_ranks.py`` has those that do), and it is not skipped.  ``conftest.py`` has pytest see to both.
"""

import ast
import collections
import itertools
import os
import re
import sys

import pytest

TWO_RANKS = "test_two_ranks.py"
ASKED = {"uname", "/sbin/ldconfig"}  # by platform.platform(), and by whoever looks for CUDA's libraries
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}  # audit events
RANKS = {"mpi", "faults", "slurm"}  # the tiers that need MPI
TIERS: set[str] = set()
_running = None  # the test of the default tier that runs now, if it may start no process


def one_by_default(chosen, of):
    """A test's parameters, of which the default tier tries one and the thorough tier the others."""
    assert chosen in of
    return [pytest.param(value, marks=() if value == chosen else pytest.mark.thorough) for value in of]


def any_brand(*cases):
    """Parameters that say nothing about the brand of MPI where the others of the test are tried on both."""
    of = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.any_brand) for case in of]


def every(n, cases, first=0):
    """Parameters of which every n-th is tried wherever the test is, from ``first`` on, and all others by ``full``."""
    return [pytest.param(case, marks=() if k % n == first else pytest.mark.full) for k, case in enumerate(cases)]


def in_turn(values, others):
    """Parameters (value, other): each value with one of the others, by turns, and with all of them by ``full``."""
    return [
        pytest.param(value, other, marks=() if k % len(others) == turn else pytest.mark.full)
        for k, value in enumerate(values)
        for turn, other in enumerate(others)
    ]


def by_size(cases_of, sizes, full=()):
    """Parameters (size, name) of cases that so many ranks run together; those of ``full`` are of that tier."""
    marked = [(size, ()) for size in sizes] + [(size, pytest.mark.full) for size in full]
    return [pytest.param(size, name, marks=marks) for size, marks in marked for name in cases_of(size)]


def default_expression(config):
    """What ``-m`` is if nobody says otherwise."""
    addopts = config.getini("addopts")
    return addopts[addopts.index("-m") + 1]


def names(expression):
    """The marks that an expression names."""
    return set(re.findall(r"\w+", expression)) - {"not", "and", "or"}


def tiers_of(item):
    """The tiers that a test is in; none of them is the default."""
    return TIERS & {mark.name for mark in item.iter_markers()}


def module_marks(text):
    """The marks that a test module's ``pytestmark`` gives to all of its tests, read without importing it."""
    found = set()
    for node in ast.parse(text).body if "pytestmark" in text else ():
        if isinstance(node, ast.Assign) and any(getattr(to, "id", None) == "pytestmark" for to in node.targets):
            found |= {part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)}
    return found


def _no_processes(event, details):
    if _running is not None and event in STARTS and not set(details[:1]) & ASKED:
        pytest.fail(
            f"{_running} is in the default tier and starts a process: mark it mpi, faults, torch, device or thorough, "
            f"or move what every machine should try to {TWO_RANKS}"
        )


def all_pairs(cases, met=()):
    """The numbers of a few cases, tuples of values, in which every two values meet that do so in any of them.

    ``met``: numbers of cases that are tried anyhow.  The choice is a greedy one, and always the same.
    """
    pairs = [set(itertools.combinations(enumerate(case), 2)) for case in cases]
    chosen, left = set(met), set().union(*pairs).difference(*(pairs[number] for number in met))
    for new in range(max(map(len, pairs), default=0), 0, -1):
        for number, of_case in enumerate(pairs):
            if len(of_case & left) >= new:
                chosen.add(number)
                left -= of_case
    return chosen


def values_of(item):
    """A case's parameters, in words."""
    return tuple(map(repr, item.callspec.params.values())) if hasattr(item, "callspec") else ()


def keep_samples(items):
    """Share out the cases of tests that are marked ``sampled(n)`` or ``pairs``.

    n, evenly spaced, are of the default tier, or none.  Of the others the tier ``full`` has those that no two values
    need to meet, and what is sampled is otherwise of the thorough tier.  Cases that are marked ``full`` are no part of
    this.
    """
    cases = collections.defaultdict(list)
    for item in items:
        shared = item.get_closest_marker("sampled") or item.get_closest_marker("pairs")
        if shared and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        sampled = of_one[0].get_closest_marker("sampled")
        kept = {k * len(of_one) // sampled.args[0] for k in range(sampled.args[0])} if sampled else set()
        values = [values_of(item) for item in of_one]
        pairs = all_pairs(values, kept) if len(values[0]) > 2 else range(len(of_one))
        for number, item in enumerate(of_one):
            if number not in pairs:
                item.add_marker(pytest.mark.full)
            elif sampled and number not in kept:
                item.add_marker(pytest.mark.thorough)


class SlowestFiles:
    """A plugin for CI: how many seconds the slowest files took, and all of them."""

    def __init__(self):
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(f"{sum(self.seconds.values()):.0f} s in tests; the slowest files:")
        for file, seconds in self.seconds.most_common(10):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


class DefaultTier:
    """A plugin that holds tests without a tier's mark to what the default tier promises."""

    def pytest_ignore_collect(self, collection_path, config):
        """Leave out modules that are another tier as a whole: what they import need not be there."""
        if collection_path.suffix == ".py" and config.option.markexpr == default_expression(config):
            return bool(TIERS & module_marks(collection_path.read_text())) or None
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        global _running
        _running = None if tiers_of(item) or item.path.name == TWO_RANKS else item.nodeid
        try:
            return (yield)
        finally:
            _running = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.skipped and not hasattr(report, "wasxfail") and not tiers_of(item):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} is in the default tier, where nothing is skipped: mark it.  {reason}"
        return report


def install(config):
    """Learn the tiers, and hold the default one to its promises."""
    TIERS.update(names(default_expression(config)))
    config.pluginmanager.register(DefaultTier(), "default-tier")
    sys.addaudithook(_no_processes)
    if os.environ.get("CI"):
        config.pluginmanager.register(SlowestFiles())
