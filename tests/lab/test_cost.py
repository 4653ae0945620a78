"""Seconds by formula, against arithmetic by hand and a simulation of the messages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt.lab import cost
from distopt.lab.cost import LINKS, Link

LATE, THIN, SLOW = Link("late", 1.0, math.inf, 0.0), Link("thin", 0.0, 1.0, 0.0), Link("slow", 0.0, math.inf, 1.0)


def parts(algorithm, nbytes, size):
    """(messages one after the other, bytes that pass, bytes that are added up)"""
    return tuple(algorithm(nbytes, size, link) for link in (LATE, THIN, SLOW))


@pytest.mark.parametrize(
    ("algorithm", "at_4", "at_6"),
    [  # 24 bytes, by hand
        (cost.ring_all_reduce, (6, 36, 18), (10, 40, 20)),
        (cost.tree_all_reduce, (4, 96, 48), (6, 144, 72)),
        (cost.recursive_doubling_all_reduce, (2, 48, 48), (4, 96, 72)),
        (cost.halving_doubling_all_reduce, (4, 36, 18), (6, 40, 20)),
        (cost.ring_reduce_scatter, (3, 18, 18), (5, 20, 20)),
        (cost.halving_reduce_scatter, (2, 18, 18), (3, 20, 20)),
        (cost.ring_all_gather, (3, 18, 0), (5, 20, 0)),
        (cost.doubling_all_gather, (2, 18, 0), (3, 20, 0)),
        (cost.pairwise_all_to_all, (3, 18, 0), (5, 20, 0)),
        (cost.tree_broadcast, (2, 48, 0), (3, 72, 0)),
        (cost.scatter_broadcast, (5, 36, 0), (8, 40, 0)),
    ],
)
def test_algorithms_have_the_worked_messages_and_bytes(algorithm, at_4, at_6):
    assert parts(algorithm, 24, 4) == pytest.approx(at_4)
    assert parts(algorithm, 24, 6) == pytest.approx(at_6)
    link = Link("all of it", 3.0, 0.5, 0.25)
    messages, passed, added = at_6
    assert algorithm(24, 6, link) == pytest.approx(3 * messages + 2 * passed + added / 4)


def test_a_pipeline_has_the_best_number_of_pieces():
    link = Link("", 2.0, 0.5)
    best = min((5 - 2 + s) * (2 + 2 * 100 / s) for s in range(1, 101))
    assert cost.chain_broadcast(100, 5, link) == pytest.approx(best)
    assert cost.chain_broadcast(100, 2, link) == 202
    assert cost.chain_broadcast(0, 5, link) == 4 * 2


def test_a_hierarchy_sends_a_slice_between_nodes():
    """8 ranks on each of 4 nodes: a card each, or one card for all 8, which is the whole array through one card."""
    inside, between = Link("inside", 0.0, 100.0, 0.0), Link("between", 0.0, 1.0, 0.0)
    within = 2 * 7 / 8 * 800 / 100
    assert cost.hierarchical_all_reduce(800, 8, 4, inside, between) == pytest.approx(within + 1.5 * 100)
    assert cost.hierarchical_all_reduce(800, 8, 4, inside, between.shared(8)) == pytest.approx(within + 1.5 * 800)
    assert cost.hierarchical_all_reduce(800, 1, 4, inside, between) == cost.seconds("all_reduce", 800, 4, between)
    assert cost.hierarchical_all_reduce(800, 8, 1, inside, between) == pytest.approx(within)


@given(st.integers(1, 300), st.integers(0, 10**9))
def test_bytes_agree_with_the_wire(size, nbytes):
    """What a rank of a ring sends, to the byte that integers cut off."""
    for algorithm, wire in (
        (cost.ring_all_reduce, cost.all_reduce),
        (cost.ring_reduce_scatter, cost.reduce_scatter),
        (cost.ring_all_gather, cost.all_gather),
        (cost.doubling_all_gather, cost.all_gather),
    ):
        assert wire(nbytes, size) == pytest.approx(algorithm(nbytes, size, THIN), abs=1)
    assert cost.pairwise_all_to_all(nbytes * size, size, THIN) == pytest.approx(cost.all_to_all(nbytes * size, nbytes))


@given(
    st.sampled_from(sorted(cost.ALGORITHMS)), st.integers(1, 2000), st.integers(0, 10**10), st.sampled_from([*LINKS])
)
def test_seconds_are_those_of_the_best_algorithm(verb, size, nbytes, name):
    link = LINKS[name]
    each = [algorithm(nbytes, size, link) for algorithm in cost.algorithms(verb)]
    found = cost.seconds(verb, nbytes, size, link)
    assert found == min(each)
    assert (found == 0) == (size == 1)
    assert found <= cost.seconds(verb, nbytes + 1000, size, link)
    least = math.ceil(math.log2(size)) * link.latency, (size - 1) / size * nbytes / link.bandwidth
    assert found >= max(least) * (1 - 1e-12), "no algorithm has fewer messages, or bytes (Chan et al.)"


def test_small_arrays_want_few_messages_and_large_ones_few_bytes():
    link = LINKS["10GbE"]
    assert cost.seconds("all_reduce", 8, 64, link) == pytest.approx(6 * link.latency, rel=1e-3)
    assert cost.seconds("all_reduce", 10**12, 60, link) == pytest.approx(2 * 59 / 60 * 10**12 / link.bandwidth, rel=0.1)
    assert cost.seconds("broadcast", 10**12, 64, link) == pytest.approx(10**12 / link.bandwidth, rel=1e-2)


def test_seconds_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match=r"verb must be one of all_reduce.*got 'allreduce'; did you mean all_reduce\?"):
        cost.seconds("allreduce", 1, 2, LINKS["1GbE"])
    with pytest.raises(ValueError, match=r"size must be at least 1, got 0"):
        cost.seconds("all_reduce", 1, 0, LINKS["1GbE"])
    with pytest.raises(ValueError, match=r"nbytes must be finite and in \[0.0, inf\], got -1"):
        cost.seconds("all_reduce", -1, 2, LINKS["1GbE"])


def test_links_are_found_by_name_or_rate():
    assert cost.link("nvlink") is cost.link(" NVLink ") is LINKS["NVLink"]
    nominal = {"1GbE": 117.5e6, "10GbE": 1.175e9, "100GbE": 11.75e9, "NDR": 48.5e9, "PCIe4": 28.35e9, "PCIe5": 56.7e9}
    for name, rate in nominal.items():
        assert LINKS[name].bandwidth == pytest.approx(rate), name
    assert cost.link("300Mbit/s").latency == 50e-6
    for text, rate in {
        "300Mbit/s": 37.5e6,
        "2.5Gbit/s": 312.5e6,
        "12GB/s": 12e9,
        "800 kbps": 1e5,
        ".5gb/s": 62.5e6,
    }.items():
        assert cost.link(text).bandwidth == pytest.approx(rate), text
        assert cost.link(text).name == text
    with pytest.raises(ValueError, match=r"got 'nvlinc'; did you mean NVLink\?"):
        cost.link("nvlinc")
    with pytest.raises(ValueError, match=r"rate of 0Mbit/s must be finite and above 0, got 0.0"):
        cost.link("0Mbit/s")
    with pytest.raises(ValueError, match=r"or a rate such as 300Mbit/s, got '-3Gbit/s'"):
        cost.link("-3Gbit/s")
    with pytest.raises(TypeError, match=r"link must be a name or a rate as text, got 5"):
        cost.link(5)
