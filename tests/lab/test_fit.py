"""Latency and bandwidth from times: of a wire whose times are known, and of a real one."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.comm import LocalCommunicator, run_ranks
from distopt.comm.communicator import Wrapper
from distopt.lab import cost, fit
from distopt.lab.cost import Link
from distopt.lab.fit.pieces import least_squares, pieces, predicted
from launch import needs_mpi, run_mpi


class Wire(Wrapper):
    """``size`` ranks of which this is one; no byte moves, but a clock goes on as each verb's formula says."""

    def __init__(self, size, **seconds):
        super().__init__(LocalCommunicator())
        self.size, self.now, self._seconds = size, 0.0, seconds
        self.rng = np.random.default_rng(0)

    def clock(self):
        return self.now

    def _take(self, verb, nbytes):
        outlier = 10 if self.rng.random() < 0.1 else 1
        self.now += self._seconds[verb](nbytes) * outlier * (1 + 0.02 * self.rng.random())

    def all_reduce(self, x, op="sum"):
        self._take("all_reduce", x.nbytes)

    def all_gather(self, x, ragged=False, into=None):
        assert into.size == self.size * x.size
        self._take("all_gather", x.nbytes * self.size)
        return [x] * self.size

    def all_to_all(self, parts, ragged=False):
        assert len(parts) == self.size
        assert len({p.size for p in parts}) == 1
        self._take("all_to_all", sum(p.nbytes for p in parts))
        return list(parts)

    def reduce_scatter(self, x, op="sum"):
        self._take("reduce_scatter", x.nbytes)
        return x

    def broadcast(self, x, root=0):
        self._take("broadcast", x.nbytes)

    def barrier(self):
        self.now += 1e-6


SIZES = (30, 5_000, 70_000, 3_000_000)
LINK = Link("", 40e-6, 0.2e9, 1e-9)


def wire_of(size, link=LINK):
    """Every verb takes what is best for it; one call in ten is ten times slower, and does not matter."""
    return Wire(size, **{verb: lambda n, v=verb: cost.seconds(v, n, size, link) for verb in cost.ALGORITHMS})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_fit_recovers_the_link_of_a_simulated_wire(size):
    """A fit on some ranks predicts any number of them, whichever algorithms are best on these."""
    wire = wire_of(size)
    found = fit.fit(wire, 20.0, wire.clock)
    assert 15 < wire.now < 23, "about the time that was given"
    assert found.link[1:] == pytest.approx(LINK[1:], rel=0.04)
    assert found.ranks == size
    assert found.most >= 1 << 20
    for verb in cost.ALGORITHMS:
        assert found.lines[verb].residual < 0.03
        for nbytes in SIZES:
            for there in (size, 5, 64, 1000):
                wanted = cost.seconds(verb, nbytes, there, LINK)
                rel = 0.15 if verb == "broadcast" else 0.06  # lines come near to knees, and to a root of bytes
                assert found.seconds(verb, nbytes, there) == pytest.approx(wanted, rel=rel), (verb, nbytes, there)


def test_a_wire_whose_time_does_not_grow_with_bytes_is_refused():
    """Where a message of megabytes takes no longer than an empty one, no bandwidth has been seen."""
    wire = Wire(2, **dict.fromkeys(cost.ALGORITHMS, lambda n: 0.5))
    with pytest.raises(
        ValueError, match=r"seconds must be more, got 1, in which up to \d+ bytes take no longer than none"
    ):
        fit.fit(wire, 1.0, wire.clock)


def test_a_change_of_protocol_is_found():
    """Another latency and another bandwidth above 10,000 bytes a message."""

    def seconds(nbytes):
        return 20e-6 + nbytes / 1e9 if nbytes < 10_000 else 300e-6 + nbytes / 0.1e9

    wire = Wire(2, **dict.fromkeys(cost.ALGORITHMS, seconds))
    found = fit.fit(wire, 10.0, wire.clock)
    assert [len(line.pieces) for line in found.lines.values()] == [2] * 5
    for nbytes in (10, 3_000, 20_000, 1_000_000):
        assert found.seconds("broadcast", nbytes, 2) == pytest.approx(seconds(nbytes), rel=0.05)
        assert found.seconds("all_reduce", nbytes, 2) == pytest.approx(seconds(nbytes), rel=0.05)


@given(st.lists(st.tuples(*[st.floats(0.01, 10)] * 3), min_size=1, max_size=9), st.integers(1, 3))
def test_least_squares_are_minimal_among_nonnegative_coefficients(rows, columns):
    """No point near the minimum is better, which for a convex function is enough."""
    rows = np.array(rows)[:, :columns]
    best = least_squares(rows)

    def squares(x):
        return ((rows @ x - 1) ** 2).sum()

    assert (best >= 0).all()
    for step in itertools.product((-1e-3, 0, 1e-3), repeat=columns):
        assert squares(best) <= squares(np.maximum(best + np.array(step), 0)) + 1e-9


def test_pieces_are_as_few_as_will_do():
    sizes = np.array([8.0 * 2**k for k in range(15)])
    (only,) = pieces(sizes, 3e-6 + 1e-9 * sizes)
    assert only == pytest.approx((0.0, 3e-6, 1e-9))
    bent = np.where(sizes < 1000, 3e-6, 9e-6) + np.where(sizes < 30_000, 1e-9, 4e-9) * sizes
    found = pieces(sizes, bent)
    assert [p.least for p in found] == pytest.approx([0, math.sqrt(512 * 1024), math.sqrt(16384 * 32768)])
    second, third = (p.least for p in found[1:])
    lines = [(3e-6, 1e-9), (9e-6 + 1e-9 * second, 1e-9), (9e-6 + 4e-9 * third, 4e-9)]
    np.testing.assert_allclose([p[1:] for p in found], lines, rtol=1e-6)


def test_a_burst_of_free_bytes_is_fitted_with_a_flat_piece():
    """10,000 bytes cost nothing but latency; a line through such times would begin below zero."""
    sizes = np.array([8.0 * 2**k for k in range(20)])
    first, second = pieces(sizes, 3e-6 + 1e-8 * np.maximum(sizes - 10_000, 0))
    assert first == pytest.approx((0, 3e-6, 0), abs=1e-12)
    for n in (20_000, 50_000, 1_000_000):
        assert second.of(n) == pytest.approx(3e-6 + 1e-8 * (n - 10_000), rel=1e-6)
        assert predicted([first, second], n) == second.of(n)


def test_the_fitted_link_holds_for_small_and_large_arrays():
    """A burst of 100,000 bytes that passes at once makes no faster link of it."""
    wire = Wire(2, **dict.fromkeys(cost.ALGORITHMS, lambda n: 20e-6 + max(0, n - 1e5) / 10e6))
    found = fit.fit(wire, 20.0, wire.clock).link
    assert found.bandwidth == pytest.approx(10e6, rel=0.25)
    assert found.latency == pytest.approx(20e-6, rel=0.25)


def test_more_bytes_never_take_less():
    steps = [fit.Segment(0, 1.0, 0.0), fit.Segment(10, 0.0, 0.5), fit.Segment(20, 2.0, 1.0)]
    assert [predicted(steps, n) for n in (0, 9, 10, 11, 14, 19, 20, 22, 24, 30)] == [
        1,
        1,
        1,
        1,
        2,
        4.5,
        5,
        5,
        6,
        12,
    ]


def test_a_fit_written_to_a_file_is_read_back_equal(tmp_path):
    wire = Wire(3, **dict.fromkeys(cost.ALGORITHMS, lambda n: 1e-5 + 1e-9 * n))
    found = fit.fit(wire, 1.0, wire.clock)
    found.write(tmp_path / "fit.json")
    again = fit.read(tmp_path / "fit.json")
    assert again == found
    assert {"distopt", "numpy", "python", "hosts", "ranks", "communicator"} <= set(again.about)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The text of a fit's file."""
    wire = Wire(2, **dict.fromkeys(cost.ALGORITHMS, lambda n: 1e-5 + 1e-9 * n))
    path = tmp_path_factory.mktemp("fit") / "fit.json"
    fit.fit(wire, 0.5, wire.clock).write(path)
    return path.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(format="distopt fit 0"), "its format must be 'distopt fit 2'"),
        (lambda f: f["link"].update(bandwidth=-1), "bandwidth must be finite and above 0"),
        (lambda f: f["verbs"].pop("broadcast"), "its verbs must be all_reduce"),
        (lambda f: f["verbs"]["broadcast"].update(points=[]), "points of broadcast must be at least one"),
        (lambda f: f["verbs"]["broadcast"]["pieces"][0].update(seconds="1"), "seconds must be a number"),
        (lambda f: f["verbs"]["broadcast"].update(pieces=[]), "the first piece of broadcast must begin at 0"),
        (
            lambda f: f["verbs"]["broadcast"]["pieces"].append({"least": 0, "seconds": 1, "per_byte": 1}),
            "and each where",
        ),
        (lambda f: f.pop("ranks"), "ranks"),
    ],
)
def test_a_file_that_is_no_fit_is_refused(tmp_path, change, words, written):
    path, tree = tmp_path / "fit.json", json.loads(written)
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=rf"fit.json must be a fit, got .*{words}"):
        fit.read(path)
    path.write_text("[")
    with pytest.raises(ValueError, match=r"fit.json must be a fit"):
        fit.read(path)


def test_impossible_arguments_of_a_fit_are_refused():
    with pytest.raises(ValueError, match=r"comm must have at least 2 ranks, got 1"):
        fit.fit(LocalCommunicator())
    with pytest.raises(ValueError, match=r"seconds must be finite and above 0, got 0"):
        fit.fit(LocalCommunicator(), 0)
    wire = Wire(2, **dict.fromkeys(cost.ALGORITHMS, lambda n: 1e-5 + 1e-9 * n))
    found = fit.fit(wire, 0.5, wire.clock)
    with pytest.raises(ValueError, match=r"did you mean all_reduce\?"):
        found.seconds("allreduce", 1, 2)
    with pytest.raises(ValueError, match=r"size must be at least 1, got 0"):
        found.seconds("all_reduce", 1, 0)
    assert found.seconds("all_reduce", 8, 1) == 0


def check_alike(found):
    points = [line.points for line in found.lines.values()]
    assert all(len(p) >= 2 * 3 for p in points)
    assert all(seconds > 0 for p in points for _, seconds in p)
    assert found.link.bandwidth > 1e6


@pytest.mark.thorough
def test_threads_agree_on_a_fit():
    first, *others = run_ranks(3, lambda comm: fit.fit(comm, 1.0))
    check_alike(first)
    assert others == [first, first]


def fit_and_write(comm, folder):
    fit.fit(comm, 2.0).write(f"{folder}/{comm.rank}.json")


@needs_mpi
def test_ranks_agree_on_a_fit(tmp_path):
    run_mpi(2, fit_and_write, tmp_path, str(tmp_path))
    found = [fit.read(tmp_path / f"{rank}.json") for rank in range(2)]
    check_alike(found[0])
    assert found[0] == found[1]
    assert "MpiCommunicator" in found[0].about["communicator"]
