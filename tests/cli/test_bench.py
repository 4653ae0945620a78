"""distopt bench: what it counts, checks and prints."""

import json
import subprocess
import sys

import numpy as np
import pytest

from distopt.cli import main
from distopt.comm import run_ranks
from distopt.comm.communicator import NUMBERS, Wrapper
from distopt.lab import fit
from distopt.lab.commands import bench, bench_kernels, bench_ranks
from distopt.lab.cost import ALGORITHMS
from launch import finish, needs_mpi


def run_bench(*args, timeout=60):
    return finish([sys.executable, "-m", "distopt", "bench", *map(str, args)], timeout)


@needs_mpi
def test_bench_prints_the_columns_of_nccl_tests(tmp_path):
    """Columns of nccl-tests: count is elements, of one part where there are parts; busbw has (P - 1) / P in it."""
    file = tmp_path / "found.json"
    code, output = run_bench("-n", 3, "--min", 12, "--max", "24K", "--factor", 2048, "--json", file)
    assert code == 0, output
    found = json.loads(file.read_text())
    assert (found["ranks"], "MpiCommunicator" in found["communicator"]) == (3, True)
    assert [row["verb"] for row in found["rows"]] == [verb for verb in ALGORITHMS for _ in range(2)]
    share = {"all_reduce": 4 / 3, "broadcast": 1.0}
    lines = [line.split() for line in output.splitlines() if line[:1] == " "]
    for row, line in zip(found["rows"], lines, strict=True):
        assert row["wrong"] == 0
        assert row["size"] in (12, 24_576)
        assert row["count"] == row["size"] // 4 // (1 if row["verb"] in share else 3)
        assert row["algbw"] == pytest.approx(row["size"] / row["seconds"])
        assert row["busbw"] == pytest.approx(row["algbw"] * share.get(row["verb"], 2 / 3))
        assert line[:4] == [str(row["size"]), str(row["count"]), "float32", row["redop"]]
        assert float(line[4]) == pytest.approx(row["seconds"] * 1e6, abs=0.01)
        assert line[-1] == "0"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_right_results_of_collectives_are_counted_as_right(size, dtype):
    def rows(comm):
        return list(bench_ranks.collectives(comm, list(ALGORITHMS), [8, 5000], dtype))

    for found in run_ranks(size, rows):
        assert [row["wrong"] for row in found] == [0] * 10
        assert {row["type"] for row in found} == {dtype.name}


class Broken(Wrapper):
    """Rank 1 finds one element changed, of each array that a verb gives it."""

    def _spoil(self, *arrays):
        if self.rank == 1:
            for x in arrays:
                x[-1] += 1
        return list(arrays)

    def all_reduce(self, x, op="sum"):
        self.comm.all_reduce(x)
        self._spoil(x)

    def broadcast(self, x, root=0):
        self.comm.broadcast(x, root)
        self._spoil(x)

    def reduce_scatter(self, x, op="sum"):
        return self._spoil(self.comm.reduce_scatter(x))[0]

    def all_gather(self, x, ragged=False, into=None):
        return self._spoil(*(part.copy() for part in self.comm.all_gather(x)))

    def all_to_all(self, parts, ragged=False):
        return self._spoil(*self.comm.all_to_all(parts))


def test_wrong_results_are_counted_on_every_rank():
    def rows(comm):
        return list(bench_ranks.collectives(Broken(comm), list(ALGORITHMS), [4000], np.dtype(np.float32)))

    for found in run_ranks(3, rows):
        wrong = {row["verb"]: row["wrong"] for row in found}
        assert wrong == {"all_reduce": 1, "broadcast": 1, "reduce_scatter": 1, "all_gather": 3, "all_to_all": 3}


def test_ranks_of_a_bench_send_different_arrays():
    """Otherwise parts that came from another rank, or went to another place, would look right."""
    for size in (2, 8, 128):
        sent = [bench_ranks.sent(r, size, 1000, np.dtype(np.uint8)) for r in range(size)]
        assert sum(x.astype(int) for x in sent).max() < 256
        assert (sent[0] != sent[1]).any()
        assert (sent[0][:-1] != sent[0][1:]).any()


@needs_mpi
def test_bench_fit_writes_the_link_that_it_prints(tmp_path):
    file = tmp_path / "fit.json"
    code, output = run_bench("-n", 2, "--fit", file, "--seconds", 1)
    assert code == 0, output
    found = fit.read(file)
    assert found.about["ranks"] == 2
    assert f"as one link: {found.link.latency * 1e6:.1f} us, {found.link.bandwidth / 1e9:.3f} GB/s" in output


def test_bench_kernels_shows_bytes_and_speed_of_every_kernel(capsys, tmp_path):
    """Every kernel runs on numbers that stay finite, and its bytes are listed."""
    assert bench_kernels.show(tmp_path / "kernels.json", 1 << 14) == 0
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert rows[0]["kernel"] == "copy"
    assert rows[0]["of copy"] == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    for row, line in zip(rows, lines, strict=True):
        assert line.strip().startswith(row["kernel"])
        assert row["bytes"] in [k * (1 << 14) for k in (4, 8.5, 9, 10, 12, 12.5, 13, 14, 16, 20, 20.25, 28, 40, 48)]
        assert 0 < row["of copy"] < 100


def test_a_kernels_speed_is_relative_to_the_copy_of_the_same_round(monkeypatch):
    """The copy moves 8 bytes in 1, 1, 2, 1 s, the case 12 in 3 times as long: half the speed, in every round."""
    ticks = iter(np.cumsum([0, 1, 0, 3, 0, 1, 0, 3, 0, 2, 0, 6, 0, 1, 0, 3]).tolist())
    monkeypatch.setattr(bench_kernels.time, "thread_time", lambda: next(ticks))
    copy, case = bench_kernels.fractions({"copy": (8, int), "case": (12, int)}, 3)
    assert (copy["seconds"], copy["of copy"]) == (1, 1)
    assert (case["seconds"], case["of copy"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "-n must be at least 1, the number of ranks"),
        (["-n", "1", "--fit", "x"], "-n must be at least 2, the number of ranks, got 1"),
        (["-n", "2", "--verbs", "all_reduce,allgather"], "got 'allgather'; did you mean all_gather?"),
        (["-n", "2", "--dtype", "float23"], "got 'float23'; did you mean float32?"),
        (["-n", "2", "--min", "8X"], "--min must be from 1 byte to 4294967296, as 8, 64K, 1.5M or 2G, got '8X'"),
        (["-n", "2", "--max", "4"], "--max must be at least --min, 8 bytes, got 4"),
        (["-n", "2", "--factor", "1"], "--factor must be above 1 and at most 1e9, got 1"),
        (["-n", "2", "--factor", "nan"], "--factor must be above 1 and at most 1e9, got nan"),
        (["-n", "2", "--factor", "1.0000001"], "--factor must make at most 1000 sizes, got 1, which makes 159423860"),
        (["-n", "2", "--max", "1" + 400 * "0"], "--max must be from 1 byte"),
        (["-n", "2", "--fit", "/nowhere/fit.json"], "/nowhere/fit.json"),
        (["-n", "2", "--json", "/nowhere/out.json"], "/nowhere/out.json"),
        (["-n", "2", "--fit", "/"], "Is a directory"),
        (["-n", "2", "--fit", "x", "--verbs", "nope"], "--fit must be given without --json, --verbs"),
        (["-n", "2", "--fit", "x", "--seconds", "0"], "seconds must be finite and above 0, got 0.0"),
    ],
)
def test_wrong_arguments_are_errors_of_one_line_and_start_nothing(args, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started
    assert main(["bench", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("distopt bench: ")
    assert words in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_sizes_that_round_to_the_same_elements_are_measured_once():
    """However many round to the same number of elements."""

    def rows(comm):
        return [row["size"] for row in bench_ranks.collectives(comm, ["all_gather"], [8, 9, 10, 16], np.dtype("f4"))]

    assert run_ranks(2, rows) == [[8, 16]] * 2


def test_sizes_grow_by_the_factor_and_units_are_parsed():
    assert bench.sizes(8, 1 << 26, 4.0) == [8 * 4**k for k in range(12)]
    assert bench.sizes(3, 10, 1.1) == [3, 4, 5, 6, 7, 8, 9]
    assert [bench.size_of("x", text) for text in ("8", "64k", "1.5MB", "2GiB")] == [8, 65536, 3 << 19, 2 << 30]
