"""Benchmarks compare like with like: the anchors compute what the library computes."""

import numpy as np
import pytest

from benchmarks import floor, measure, overhead
from benchmarks.optimizers import RULES
from distopt.device import zeros
from distopt.tables import Members


@pytest.mark.parametrize("rule", RULES)
def test_the_floor_of_an_update_is_that_update(rule):
    rng = np.random.default_rng(0)
    p, g = rng.standard_normal((2, 1000)).astype(np.float32)
    mine, m, v = p.copy(), np.zeros_like(p), np.zeros_like(p)
    opt = RULES[rule]()
    opt.lr = 0.1
    table = Members(["p"], [p.shape], [0], p.dtype).point_to([p])
    for _ in range(2):
        opt.prepare(0.5)
        opt.update_bucket(table, [(0, 1, g)])
        floor.update(rule, mine, g, m, v, scale=0.5, lr=0.1, decay=1e-4)
        if rule in ("adam", "adamw", "lamb", "lans"):  # whose bias correction the floor leaves out
            p[:], opt.step_counter = mine, 10**6
            continue
        opt.step()
        np.testing.assert_allclose(mine, p, rtol=1e-4, atol=1e-6)


def test_read_pass_reads():
    x = np.random.default_rng(0).standard_normal(64 * 1000).astype(np.float32)
    assert floor.read_pass(x) == pytest.approx(x.sum(dtype=np.float64), rel=1e-3, abs=0.1)


def test_flat_arrays_start_at_64_bytes():
    arrays = [np.full(n, n, np.float32) for n in (3, 64, 17)]
    memory, views = floor.flat(arrays, zeros)
    assert [v.ctypes.data % 64 for v in views] == [0, 0, 0]
    assert memory.size == 16 + 64 + 32


def test_cases_take_turns_and_ratios_are_formed_round_by_round():
    calls = []
    times = measure.interleaved({k: (lambda k=k: calls.append(k)) for k in "ab"}, rounds=2, calls=3)
    assert "".join(calls) == "aaabbb" * 3
    assert {k: len(t) for k, t in times.items()} == {"a": 2, "b": 2}
    times = {"a": [1.0, 2.0, 4.0], "b": [1.0, 1.0, 8.0]}
    assert measure.ratios(times, "b", "a") == [1.0, 0.5, 2.0]
    text = measure.table("title", times, "a", {"b": 0.9})
    assert "1.000  [0.500 - 2.000]  budget 0.9: MISSED" in text
    assert "budget 1: met" in measure.table("title", times, "a", {"b": 1})


def test_each_cause_of_overhead_can_be_timed():
    for cause in overhead.cases_of(3).values():
        cause()
