"""A payload that is not as long as ``payload_bytes`` says is refused before it is sent."""

import numpy as np
import pytest

import distopt
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import Metered
from distopt.compress import Compressor, ErrorFeedback, Threshold
from distopt.optim import SGD
from launch import needs_mpi, run_mpi

STEPS = {
    "gathered": {"break_even": False},
    "unless dense is less": {},
    "by nodes": {"exchange": "nodes"},
}


class Odd(Compressor):
    """Sends all entries, and so many bytes more, or a list of them; summable or not."""

    def __init__(self, more=0, summable=False, kind="array", on=(0, 1)):
        self.more, self.summable, self._kind, self._on = more, summable, kind, on

    def payload_bytes(self, n, itemsize=4, layout=None):
        if self._kind == "array" or self._kind == "list":
            return itemsize * n
        return {"None": None, "float": itemsize * n / 2}[self._kind]

    def compress(self, x, state, context, add=None):
        if add is not None:
            x += add
        more = self.more * (context.rank in self._on)
        payload = np.concatenate([x.view(np.uint8), np.zeros(max(0, more), np.uint8)])[: x.nbytes + more]
        x[...] = 0
        if self._kind == "list":
            return payload.tolist()
        return payload.view(x.dtype) if self.summable and not self.more else payload

    def decompress(self, payload, out, context):
        if self.summable:
            out[...] = payload[: out.nbytes].view(out.dtype)
        else:
            out += payload[: out.nbytes].view(out.dtype)


def attempt(comm, make, **options):
    """The parameters after a step and what it raised, with two buckets of 16 elements."""
    params = [Parameter(f"p{k}", np.zeros(16, np.float32)) for k in range(2)]
    opt = DistOpt(SGD(1.0), comm, threshold=8, overlap=options.pop("overlap", "auto"))
    loss = [(p, np.full(16, comm.rank + 1, np.float32)) for p in params]
    raised = ""
    try:
        opt.step(loss, make(comm), **options)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return [p.data[0] for p in params], raised


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("summable", [False, True])
@pytest.mark.parametrize("more", [-4, 1])
def test_ranks_refuse_a_payload_of_another_length_and_parameters_stay(more, summable, options, remembers):
    def make(comm):
        return ErrorFeedback(Odd(more, summable)) if remembers else Odd(more, summable)

    name = f"Odd(more={more}, summable={summable})"
    name = f"ErrorFeedback({name})" if remembers else name
    text = f"ValueError: {name}.compress returned {64 + more} bytes for bucket %d, payload_bytes says 64"
    for rank, (values, raised) in enumerate(run_ranks(2, lambda comm: attempt(comm, make, **options))):
        assert values == [0, 0]
        assert raised == text % (rank if "exchange" in options else 0), "by nodes each rank has buckets of its own"


def test_ranks_accept_one_that_is_as_long_as_the_plan_says():
    for summable in (False, True):
        for options in STEPS.values():
            for values, raised in run_ranks(
                2, lambda comm, s=summable, o=options: attempt(comm, lambda _: Odd(0, s), **o)
            ):
                assert (values, raised) == ([-1.5, -1.5], "")


@pytest.mark.parametrize("summable", [False, True])
def test_an_error_of_one_rank_ends_the_other_as_any_of_its_compressor_does(summable):
    first, second = run_ranks(2, lambda comm: attempt(comm, lambda _: Odd(1, summable, on=[1])))
    assert second == (
        [0, 0],
        f"ValueError: Odd(more=1, summable={summable}).compress returned 65 bytes for bucket 0, payload_bytes says 64",
    )
    assert first[0] == [0, 0]
    assert first[1].startswith("PeerLeft: rank 1 left")


def test_a_list_is_refused_with_the_compressor_that_made_it():
    for summable in (False, True):
        for _, raised in run_ranks(2, lambda comm, s=summable: attempt(comm, lambda _: Odd(0, s, "list"))):
            assert raised.startswith(
                f"TypeError: Odd(more=0, summable={summable}).compress must return an array, got [0"
            )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "None",
            "ValueError: Odd(more=0, summable=False).payload_bytes(16, 4) must be an integer unless ragged, got None",
        ),
        ("float", "TypeError: Odd(more=0, summable=False).payload_bytes(16, 4) must be an integer, got 32.0"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_plan_refuses_a_length_that_is_none_or_no_integer_on_all_ranks_alike(ranks, kind, text):
    """Even if it is so on one rank only, the last."""

    def make(comm):
        return Odd(kind=kind if comm.rank == comm.size - 1 else "array")

    for values, raised in run_ranks(ranks, lambda comm: attempt(comm, make)):
        error, reason = text.split(" ", 1)
        assert (values, raised) == ([0, 0], f"{error} rank {ranks - 1}: {reason}")


def test_a_compressor_that_comes_later_is_refused_too_while_buckets_overlap():
    def main(comm):
        w = Parameter("w", np.zeros(16, np.float32))
        opt, found = DistOpt(SGD(1.0), comm, overlap=True), []
        for compressor in (Odd(), Odd(), Odd(kind="float"), Odd(), Odd(1), Odd()):
            try:
                opt.step([(w, np.ones(16, np.float32))], compressor)
                found.append(w.data[0])
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}"[:70])
        return found

    for found in run_ranks(2, main):
        assert found[:2] == [-1, -2]
        assert found[2].startswith("TypeError: Odd(more=0, summable=False).payload_bytes(16, 4)")
        assert found[3] == -3
        assert found[4].startswith("ValueError: Odd(more=1, summable=False).compress returned 65")


@pytest.mark.parametrize("summable", [False, True])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_virtual_ranks_refuse_them_as_well(options, summable):
    w = Parameter("w", np.zeros(16, np.float32))
    for more, kind, text in (
        (1, "array", r"compress returned 65 bytes for bucket 0, payload_bytes says 64"),
        (0, "list", r"compress must return an array, got \["),
        (0, "None", r"payload_bytes\(16, 4\) must be an integer unless ragged, got None"),
    ):
        sim = distopt.simulate(4, SGD(1.0))
        with pytest.raises((TypeError, ValueError), match=rf"Odd\(more={more}, summable={summable}\).{text}"):
            sim.step(lambda rank: [(w, np.ones(16, np.float32))], Odd(more, summable, kind), **options)
        assert not w.data.any()


class Typed(Compressor):
    """Sends all entries in a dtype."""

    def __init__(self, dtype, ragged=False):
        self.dtype, self.ragged = dtype, ragged

    def payload_bytes(self, n, itemsize=4, layout=None):
        return None if self.ragged else n * np.dtype(self.dtype).itemsize

    def compress(self, x, state, context):
        payload = x.astype(self.dtype)
        x[...] = 0
        return payload

    def decompress(self, payload, out, context):
        assert payload.dtype == self.dtype
        out += payload.real


def sums_by_dtype(comm):
    """The sum over ranks of rank + 1, sent in each dtype."""
    found = {}
    for dtype in ("uint8", "int8", "int16", "float16", "float32", "float64", "complex64", "uint64"):
        for ragged in (False, True):
            w = Parameter("w", np.zeros(5, np.float32))
            opt = DistOpt(SGD(comm.size), comm)
            opt.step([(w, np.full(5, comm.rank + 1, np.float32))], Typed(dtype, ragged), break_even=False)
            found[f"{dtype} {ragged}"] = w.data
    return found


def test_a_gathered_payload_may_have_any_dtype():
    for found in run_ranks(2, sums_by_dtype):
        assert {name: w.tolist() for name, w in found.items()} == dict.fromkeys(found, [-3] * 5)


@needs_mpi
def test_it_may_have_any_over_mpi_too(tmp_path):
    for found in run_mpi(2, sums_by_dtype, tmp_path):
        assert {name: w.tolist() for name, w in found.items()} == dict.fromkeys(found, [-3] * 5)


class AllButBiases(Threshold):
    """Leaves tensors of one dimension as they are, beside payloads whose lengths differ from rank to rank."""

    def uncompressed(self, layout, context):
        return context.constant("biases", lambda: np.array([len(shape) <= 1 for shape in layout.shapes], np.int64))

    def compress(self, x, state, context, add=None):
        biases = x[self._biases(x, context)].copy()
        x[self._biases(x, context)] = 0
        payload = super().compress(x, state, context, add)
        x[self._biases(x, context)] = biases
        return payload

    @staticmethod
    def _biases(x, context):
        row = [len(shape) for shape in context.layout.shapes].index(1)
        begin, size = (int(context.layout.records[name][row]) for name in ("offset", "size"))
        return slice(begin, begin + size)

    def sharded(self):
        return None


@pytest.mark.parametrize("sends", [(1,), (0, 1, 2)])
def test_ranks_whose_payloads_differ_choose_alike_beside_members_that_are_summed_as_they_are(sends):
    """One rank alone would send less if all summed up a dense bucket, or if they did not."""
    shapes = (100, 10), (10,)

    def gradients(rank):
        return [np.full(shapes[0], float(rank in sends), np.float32), np.full(shapes[1], rank + 1, np.float32)]

    def parameters():
        return [Parameter(name, np.zeros(shape, np.float32)) for name, shape in zip("wb", shapes, strict=True)]

    def main(comm):
        comm, params = Metered(comm), parameters()
        DistOpt(SGD(1.0), comm).step(list(zip(params, gradients(comm.rank), strict=True)), AllButBiases(0.5))
        return [p.data.tolist() for p in params], comm.ledger.report()

    expected = [
        np.full(shape, -x, np.float32) for shape, x in zip(shapes, (np.float32(len(sends)) / 3, 2), strict=True)
    ]
    ranks = run_ranks(3, main)
    for values, _ in ranks:
        for a, b in zip(values, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    params, virtual = parameters(), simulate(3, SGD(1.0))
    virtual.step(lambda rank: list(zip(params, gradients(rank), strict=True)), AllButBiases(0.5))
    assert virtual.ledger.report() == ranks[0][1]
