"""Benchmarks: the references compute what the library computes, and every case runs."""

import numpy as np
import pytest

import distopt
from benchmarks import compression, floor, gpu_sass, measure, overhead, ratios
from benchmarks.optimizers import RULES
from distopt.device import zeros
from distopt.kernels.layout import BucketLayout
from launch import needs_mpi, run_mpi


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_the_minimal_update_that_benchmarks_compare_with_computes_the_optimizers_update(rule):
    rng = np.random.default_rng(0)
    p, g = rng.standard_normal((2, 1000)).astype(np.float32)
    mine, m, v = p.copy(), np.zeros_like(p), np.zeros_like(p)
    opt = RULES[rule]()
    opt.lr = 0.1
    if rule in ("adam", "adamw", "lamb", "lans"):
        opt.step_counter = 10**6  # where a bias correction, which the minimal update leaves out, is 1
    table = BucketLayout(["p"], [p.shape], [0], p.dtype).point_to([p])
    for _ in range(2):
        opt.prepare(0.5)
        opt.update_bucket(table, [(0, 1, g)])
        floor.update(rule, mine, g, m, v, scale=0.5, lr=0.1, decay=1e-4)
        opt.step()
        np.testing.assert_allclose(mine, p, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_read_pass_returns_the_sum_of_its_array():
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mode", "payload", "wire"),
    [
        ("dense", 1, 1),
        ("half", 2, 2),
        ("int8", 3.97 * 8 / 9, 3.97),
        ("1 bit, rates x 0.3", 32 * 8 / 9, 32),
        ("top-K 0.1 %", 500, 500 / 4),
    ],
)
def test_bytes_of_a_mode_are_those_of_its_formula(mode, payload, wire):
    """8 ranks: in two phases all of it is sent, and an eighth again, to all; what is gathered comes from all 8."""
    assert compression.digits_bytes(mode, 8) == pytest.approx((payload, wire), rel=0.01)


def test_bytes_of_dgc_are_entries_and_biases():
    weights, biases = 300_032, 1034
    sent = 8 * 302 + 4 * biases
    assert compression.digits_bytes("DGC 0.1 %", 2)[0] == pytest.approx(4 * (weights + biases) / sent, rel=1e-3)


@pytest.mark.thorough
def test_packed_dgc_of_all_tensors_is_a_thousandth():
    """Even where headers weigh most, of the small tensors of ResNet-50."""
    payload, wire = compression.resnet_bytes(compression.ALL, 8)
    assert payload > 900
    assert wire == pytest.approx(payload * 9 / 8, rel=0.05)  # in two phases: an eighth of the payload is an owner's


def test_a_step_of_resnet50_is_as_many_times_fewer_bytes_than_a_dense_one_as_it_should_be():
    layouts = ratios.buckets(ratios.resnet50()[::-1])
    for mode, goals in ratios.GOALS.items():
        for ranks, goal in goals.items():
            assert ratios.by_formula(layouts, mode, ranks) >= goal, (mode, ranks)


@pytest.mark.parametrize("mode", compression.MODES)
def test_every_case_of_the_compression_benchmark_runs(mode):
    steps = compression.Steps(64 * 64)
    step = compression.compression(steps, compression.MODES[mode](), 64)
    assert 0 < step().nbytes <= 8 * 64 * 64


@pytest.mark.thorough
def test_a_digits_run_of_the_compression_benchmark_returns_accuracy_and_steps(monkeypatch):
    monkeypatch.setattr(compression, "EPOCHS", 8)
    accuracy, steps = compression.digits_run("dense", 1)
    assert accuracy >= 0.95
    assert 12 <= steps <= 8 * 12


def without_votes(comm):
    """What the cost of votes is measured against is the same step."""
    from benchmarks import guard

    step = guard.step_of([("w", (3, 4)), ("b", (5,))])
    with guard.unguarded(distopt.world().control):
        step()
    step()


@needs_mpi
@pytest.mark.mpi
def test_a_step_of_processes_can_be_timed_without_votes(tmp_path):
    run_mpi(2, without_votes, tmp_path)


@pytest.mark.parametrize(
    ("registers", "shared", "architecture", "blocks"),
    [
        (16, 0, 90, 8),
        (32, 0, 90, 8),
        (33, 0, 90, 6),
        (64, 0, 90, 4),
        (65, 0, 90, 3),
        (16, 40960, 80, 4),
        (16, 40960, 90, 5),
    ],
)
def test_blocks_that_fit_are_limited_by_registers_shared_memory_and_warps(registers, shared, architecture, blocks):
    """As the CUDA occupancy calculator has it, for blocks of 256 threads."""
    assert gpu_sass.resident_blocks(registers, shared, architecture) == blocks


def test_loads_under_way_at_once_end_at_a_store_a_branch_and_a_label():
    code = gpu_sass.Accesses()
    for line in (
        "/*0000*/ LDG.E.128 R4, desc[UR4][R2.64] ;",
        "/*0010*/ LDG.E R8, desc[UR4][R2.64] ;",
        "/*0020*/ @P0 BRA `(.L_x_1) ;",
        "/*0030*/ LDG.E.128 R4, desc[UR4][R2.64] ;",
        "/*0040*/ LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;",
        "/*0050*/ STG.E.128.STRONG.SM desc[UR4][R2.64], R4 ;",
        "/*0060*/ LDG.E.128 R4, desc[UR4][R2.64] ;",
        "/*0068*/ LDG.E.128 R8, desc[UR4][R2.64] ;",
        ".L_x_1:",
        "/*0070*/ LD.E.U16 R4, desc[UR4][R2.64] ;",
        "/*0080*/ LDG.E.128 R4, desc[UR4][R2.64] ;",
    ):
        code.add(line)
    assert code.loads_at_once == 2
    assert code.counts == {("LDG", 128): 6, ("LDG", 32): 1, ("STG", 128): 1, ("LD", 16): 1}
