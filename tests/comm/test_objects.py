"""Numbers and other plain values that go from rank to rank."""

import functools
import json
import math
import operator
import os
import struct
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distopt import DistOpt, run_ranks, simulate
from distopt.comm import LocalCommunicator, Metered
from distopt.comm.objects import MAX_CHARACTERS
from distopt.comm.sockets import SocketControl
from launch import needs_mpi, run_mpi

TEXTS = st.text(st.characters(codec="utf-8"))
ARRAYS = st.builds(
    lambda kind, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(kind),
    st.sampled_from(["f4", "f8", "f2", "i1", "u2", "i8", "?", ml_dtypes.bfloat16]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary() | ARRAYS
KEYS = TEXTS | st.integers(-9, 9)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
).filter(lambda value: not alike_keys(value))


def alike_keys(value):
    """Whether a dict in a value has keys such as 1 and '1'."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return (isinstance(value, dict) and len(set(map(str, value))) < len(value)) or any(map(alike_keys, inside))


def bits(value):
    """A value with its floats as their bits, so that NaN equals itself and -0.0 differs from 0.0; types count."""
    if isinstance(value, dict):
        return {key: bits(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [bits(x) for x in value]
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    is_nan = isinstance(value, float) and math.isnan(value)
    return "NaN" if is_nan else (type(value), struct.pack("d", value) if isinstance(value, float) else value)


def raised(main, size=3):
    """The errors of all ranks, as (type, text)."""
    found = [None] * size

    def caught(comm):
        with pytest.raises(Exception) as info:  # noqa: PT011  which one is what the caller asks
            main(comm)
        found[comm.rank] = type(info.value), str(info.value)

    run_ranks(size, caught)
    assert len(set(found)) == 1, found
    return found[0]


@given(PLAIN, st.integers(1, 3), st.data())
def test_a_plain_value_arrives_as_it_was_on_every_rank(value, size, data):
    root = data.draw(st.integers(0, size - 1))
    arrived = run_ranks(size, lambda comm: comm.broadcast_object(value if comm.rank == root else object(), root))
    assert [bits(x) for x in arrived] == [bits(value)] * size


def test_numbers_of_numpy_stay_what_they_are():
    value = {"shape": (2, 3), "rate": np.float32(0.1), 7: np.int64(7), "words": ["NaN", "Infinity"]}
    found = run_ranks(2, lambda comm: DistOpt(communicator=comm).broadcast_object(value))
    assert [bits(x) for x in found] == [bits(value)] * 2


def test_what_arrives_shares_nothing_with_what_was_given():
    for comm in (LocalCommunicator(), simulate(2).communicator):
        given_value = {"a": [1], "x": np.zeros(2)}
        found = comm.broadcast_object(given_value)
        found["a"].append(2)
        found["x"] += 1
        assert given_value["a"] == [1]
        assert not given_value["x"].any()


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (object, TypeError, "the tree: neither a checkpoint nor a message holds type"),
        ({"a": [{1}]}, TypeError, "/a/0: neither a checkpoint nor a message holds set"),
        (
            {"a": {0: np.array(["x"])}},
            TypeError,
            "/a/0: neither a checkpoint nor a message holds an array of dtype('<U1')",
        ),
        ({1.5: 2}, TypeError, "the tree: a key must be str or int, got float"),
        (
            {1: 2, "1": 3},
            ValueError,
            "the tree: must have a name of its own for each key, got two alike, as 1 and '1' are",
        ),
        (
            LOOP,
            ValueError,
            f"{'/0' * 64}: must be nested at most 64 deep, got more; a tree must not contain itself",
        ),
        (
            "x" * MAX_CHARACTERS,
            ValueError,
            f"object must be at most {MAX_CHARACTERS} characters of JSON, got {MAX_CHARACTERS + 8}; "
            "send large data as arrays",
        ),
    ],
)
def test_what_is_not_plain_raises_the_same_on_every_rank(value, error, text):
    assert raised(lambda comm: comm.broadcast_object(value if comm.rank == 1 else None, root=1)) == (
        error,
        f"rank 1: {text}",
    )


def test_ranks_that_name_different_roots_or_no_rank_are_refused():
    kind, text = raised(lambda comm: comm.broadcast_object(1, root=comm.rank // 2))
    assert (kind, text) == (
        ValueError,
        "ranks differ: rank 0 has broadcast_object from rank 0, rank 2 has broadcast_object from rank 1",
    )
    assert raised(lambda comm: comm.broadcast_object(1, root=3)) == (
        ValueError,
        "rank 0: root must be a rank from 0 to 2, got 3",
    )


def test_a_value_of_any_depth_that_can_be_sent_can_be_received():
    value = functools.reduce(lambda inner, _: [inner], range(64), 0)
    assert run_ranks(2, lambda comm: comm.broadcast_object(value)) == [value] * 2
    assert raised(lambda comm: comm.broadcast_object([value]))[0] is ValueError


@given(st.data(), st.integers(1, 3))
def test_the_sum_of_floats_is_that_of_float64_in_rank_order(data, size):
    given_values = data.draw(st.lists(st.floats(), min_size=size, max_size=size))
    found = run_ranks(size, lambda comm: DistOpt(communicator=comm).all_reduce(given_values[comm.rank]))
    with np.errstate(all="ignore"):
        wanted = float(functools.reduce(operator.add, map(np.float64, given_values)))
    assert [bits(x) for x in found] == [bits(wanted)] * size


@given(st.data(), st.integers(1, 3))
def test_the_sum_of_integers_is_exact_and_an_integer(data, size):
    given_values = data.draw(st.lists(st.integers(-(2**70), 2**70), min_size=size, max_size=size))
    found = run_ranks(size, lambda comm: DistOpt(communicator=comm).all_reduce(given_values[comm.rank]))
    assert found == [sum(given_values)] * size
    assert all(type(x) is int for x in found)


def test_numbers_of_numpy_are_numbers_and_arrays_are_summed_in_place():
    def main(comm):
        opt = DistOpt(communicator=Metered(comm))
        x = np.full(3, comm.rank + 1.0)
        total = opt.all_reduce(x), x.tolist()
        zero_d = np.array(comm.rank + 1.0)
        assert opt.all_reduce(zero_d) is None
        return *total, float(zero_d), opt.all_reduce(np.float32(0.5)), opt.all_reduce(np.int16(300))

    assert run_ranks(2, main) == [(None, [3.0] * 3, 3.0, 1.0, 600)] * 2


def test_ranks_whose_numbers_differ_in_kind_all_raise():
    given_values = (1, 1.0, np.ones(3))
    for first, second, text in (
        (0, 1, "rank 0 has all_reduce of an int, rank 1 has all_reduce of a float"),
        (2, 1, "rank 0 has all_reduce of array 0 = (3,) float64, rank 1 has all_reduce of a float"),
    ):
        pair = given_values[first], given_values[second]
        found = raised(lambda comm, pair=pair: DistOpt(communicator=comm).all_reduce(pair[comm.rank]), size=2)
        assert found == (ValueError, f"ranks differ: {text}")
    assert raised(lambda comm: DistOpt(communicator=comm).all_reduce(True))[0] is TypeError


def test_virtual_ranks_have_one_copy():
    sim = simulate(3)
    assert sim.communicator.broadcast_object({"a": (1,)}, root=2) == {"a": (1,)}


def test_a_closed_optimizer_sends_nothing():
    opt = DistOpt()
    opt.close()
    for use in (lambda: opt.all_reduce(1.0), lambda: opt.broadcast_object(1)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_gather_of_what_is_no_text_raises_on_every_rank():
    kind, text = raised(lambda comm: comm.control.gather(None if comm.rank == 1 else "x"))
    assert (kind, text) == (
        TypeError,
        "rank 1: gather must be given a text, got NoneType; broadcast_object takes other plain values",
    )


def test_texts_are_gathered_over_sockets():
    found, secret = [None] * 2, os.urandom(16)

    def rank(k):
        control = SocketControl(secret, k, 2, patience=20)
        try:
            texts = control.gather(json.dumps(k))
            with pytest.raises(TypeError, match="rank 0: gather must be given a text, got int"):
                control.gather(7 if k == 0 else "x")
            found[k] = texts
        finally:
            control.close()

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [["0", "1"]] * 2


def everything(comm):
    opt = DistOpt(communicator=comm)
    value = {
        "folder": "/x",
        "n": 2**80,
        "rate": float("inf"),
        "none": None,
        3: (b"x", np.arange(3.0), np.zeros((0, 2))),
    }
    assert bits(opt.broadcast_object(value if comm.rank == 1 else None, root=1)) == bits(value)
    assert opt.all_reduce(0.1 * (comm.rank + 1)) == 0.1 + 0.2
    assert opt.all_reduce(2**80 + comm.rank) == 2**81 + 1
    with pytest.raises(TypeError, match="rank 1: the tree: neither a checkpoint nor a message holds object"):
        comm.broadcast_object(object(), root=1)
    with pytest.raises(TypeError, match="rank 1: gather must be given a text, got NoneType"):
        comm.control.gather(None if comm.rank else "x")


@needs_mpi
@pytest.mark.mpi
def test_objects_and_numbers_travel_over_mpi(tmp_path):
    run_mpi(2, everything, tmp_path)
