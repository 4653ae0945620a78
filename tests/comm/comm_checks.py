"""What every communicator must do, as a function of it; all ranks call it."""

import gc
import json
import os
import re

import ml_dtypes
import numpy as np
import pytest

from distopt import kernels
from distopt.buckets import plan
from distopt.comm import Communicator, Exact, LocalCommunicator, Metered, MpiCommunicator, Ordered, Voted
from distopt.comm.communicator import DTYPES, HALVES, NUMBERS, UNDER_WAY, slices
from distopt.comm.exact import sum_exactly
from distopt.comm.message import UNTAGGED
from distopt.compress import BucketContext, Dense, ExchangeContext, Int8
from distopt.exchange import gather, program_of
from distopt.exchange.program import in_turn as turns
from distopt.exchange.shared_memory import sum_shard
from distopt.kernels.layout import CHUNK, BucketLayout

SIZES = [0, 1, 7, 1000, 2503]


def values(n, dtype, rank):
    """Small whole numbers, exact in every dtype, that differ per rank."""
    return ((np.arange(n) + 3 * rank) % 8 + rank).astype(dtype)


def verbs(comm):
    """Every verb, with every dtype and edge sizes."""
    for dtype in NUMBERS:
        for n in SIZES:
            everyone = [values(n, dtype, r) for r in range(comm.size)]
            mine = everyone[comm.rank].copy()

            comm.all_reduce(mine)
            np.testing.assert_array_equal(mine, sum(e.astype(np.float64) for e in everyone).astype(dtype))
            assert mine.dtype == dtype

            for got, want in zip(comm.all_gather(everyone[comm.rank]), everyone, strict=True):
                np.testing.assert_array_equal(got, want)
                assert got.dtype == dtype

            part = comm.reduce_scatter(everyone[comm.rank].copy())
            np.testing.assert_array_equal(
                part, sum(e.astype(np.float64) for e in everyone)[slices(n, comm.size)[comm.rank]].astype(dtype)
            )
            for root in {0, comm.size - 1}:
                x = everyone[comm.rank].copy()
                comm.broadcast(x, root)
                np.testing.assert_array_equal(x, everyone[root])
    ragged(comm)
    shapes(comm)
    comm.barrier()
    comm.wait()


def ragged(comm):
    """Lengths that differ per rank, none among them."""
    lengths = [(5 * r + 3) % 7 if r else 0 for r in range(comm.size)]
    got = comm.all_gather(values(lengths[comm.rank], np.int32, comm.rank), ragged=True)
    assert [g.tolist() for g in got] == [values(n, np.int32, r).tolist() for r, n in enumerate(lengths)]
    parts = [np.full(10 * comm.rank + to, comm.rank, np.float64) for to in range(comm.size)]
    got = comm.all_to_all(parts, ragged=True)
    assert [g.tolist() for g in got] == [[r] * (10 * r + comm.rank) for r in range(comm.size)]
    parts = [np.full(3 + to, 100 * comm.rank + to, np.int64) for to in range(comm.size)]
    got = comm.all_to_all(parts)
    assert [g.tolist() for g in got] == [[100 * r + comm.rank] * (3 + comm.rank) for r in range(comm.size)]
    parts_of_one_array(comm)


def parts_of_one_array(comm):
    """Parts that begin at one address, none of it among them, that overlap, or that are the same."""
    x, size = np.arange(9.0) + 100 * comm.rank, comm.size
    prefixes = [[slice(0, n) for n in lengths] for lengths in ((1, 2, 3, 0), (5, 0, 5, 2))]
    for cuts in [*prefixes, [slice(n, n + 4) for n in range(4)]]:
        got = comm.all_to_all([x[cuts[to % 4]] for to in range(size)], ragged=True)
        mine = np.arange(9.0)[cuts[comm.rank % 4]]
        assert [g.tolist() for g in got] == [(mine + 100 * r).tolist() for r in range(size)], cuts


def shapes(comm):
    """Any shape is summed in place; memory from alloc is zeroed; what others received is not this rank's to change."""
    x = np.full((2, 3), comm.rank + 1.0, np.float32)
    comm.all_reduce(x)
    np.testing.assert_array_equal(x, np.full((2, 3), comm.size * (comm.size + 1) / 2))
    scalar = np.array(1.0)
    comm.all_reduce(scalar)
    assert scalar == comm.size
    memory = comm.alloc(1 << 20, np.float32)
    assert not memory.any()
    assert memory.ctypes.data % (2 << 20) == 0
    sent = np.arange(4.0)
    got = comm.all_gather(sent)
    sent[:] = -1
    comm.barrier()
    assert all(g.tolist() == [0, 1, 2, 3] for g in got)


def halves(comm):
    """Sums of halves are formed in float32, in rank order, and rounded once."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        everyone = [np.random.default_rng(r).standard_normal((1 << 17) + 999).astype(dtype) for r in range(comm.size)]
        total = everyone[0].astype(np.float32)
        for x in everyone[1:]:
            total = total + x.astype(np.float32)
        x = everyone[comm.rank].copy()
        comm.all_reduce(x)
        np.testing.assert_array_equal(x, total.astype(dtype))


def sums_of(comm, arrays, compressor=None, layouts=()):
    """The sum over ranks of what is sent of each array; a None among these: the next one will take a while."""
    compressor, layouts = compressor or Dense(), iter(layouts)

    def program(x):
        context = ExchangeContext(rank=comm.rank, size=comm.size, bucket=BucketContext(next(layouts, None)))
        return x, UNTAGGED, program_of((x, {}, context, UNTAGGED), compressor)

    return turns((None if x is None else program(x) for x in arrays), comm)


FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


def reductions(comm):
    """Every reduction of every dtype is that of numpy's, in rank order, halves in float32; a NaN makes NaN."""
    for dtype in DTYPES:
        rng = [np.random.default_rng([9, r]) for r in range(comm.size)]
        everyone = [(4 * r.standard_normal(29)).astype(np.float64).astype(dtype) for r in rng]
        if dtype.kind in "fV":
            everyone[-1][3], everyone[0][4], everyone[-1][5] = np.nan, np.inf, -0.0
        for op, fold in FOLDS.items():
            mine = everyone[comm.rank].copy()
            if (op in ("sum", "mean") and dtype.kind == "b") or (op == "mean" and dtype.kind in "iu"):
                with pytest.raises(TypeError, match=f"op must be another one than {op} for {dtype}"):
                    comm.all_reduce(mine, op)
                continue
            with np.errstate(all="ignore"):
                total = everyone[0].astype(np.float32 if dtype in HALVES else dtype)
                for x in everyone[1:]:
                    total = fold(total, x.astype(total.dtype))
                total = (total / total.dtype.type(comm.size) if op == "mean" else total).astype(dtype)
            if op == "sum" and dtype.kind in "fV":
                continue  # in an order of the transport's own
            part = comm.reduce_scatter(mine.copy(), op)
            comm.all_reduce(mine, op)
            for found, wanted in ((mine, total), (part, total[slices(29, comm.size)[comm.rank]])):
                assert found.dtype == dtype
                np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8), f"{op} of {dtype}")
    with pytest.raises(ValueError, match="op must be one of sum, mean, min, max, product, got 'average'"):
        comm.all_reduce(np.ones(2), "average")


def carried(comm):
    """Arrays of dtypes that nothing adds up, and of any other, go from rank to rank as they are."""
    for dtype in DTYPES:
        everyone = [(values(7, np.int64, r) % 2).astype(dtype) for r in range(comm.size)]
        mine = everyone[comm.rank].copy()
        assert [x.tolist() for x in comm.all_gather(mine)] == [x.tolist() for x in everyone]
        got = comm.all_to_all([mine[:to] for to in range(comm.size)], ragged=True)
        assert [x.tolist() for x in got] == [x[: comm.rank].tolist() for x in everyone]
        comm.broadcast(mine, comm.size - 1)
        assert mine.tolist() == everyone[-1].tolist()


def voted(comm):
    """Ranks that agree get what they get without votes; ranks that differ, or of which one is wrong, all raise."""
    careful, rank, size = Voted(comm), comm.rank, comm.size
    for check in (reductions, carried, ragged):
        check(careful)
    careful.barrier()
    wrong = {
        "ranks differ: rank 0 has all_reduce, rank 1 has all_reduce by max": lambda x: careful.all_reduce(
            x, "max" if rank else "sum"
        ),
        "rank 0 has all_gather of array 0 = (4,) float64, rank 1 has all_gather of array 0 = (3,) float64": lambda x: (
            careful.all_gather(x[bool(rank) :])
        ),
        "rank 0 has barrier, rank 1 has broadcast from rank 0": lambda x: (
            careful.broadcast(x, 0) if rank else careful.barrier()
        ),
        "rank 0 has broadcast from rank 0, rank 1 has broadcast from rank 1": lambda x: careful.broadcast(x, rank % 2),
        "rank 0 has reduce_scatter of array 0 = (4,) int64, rank 1 has": lambda x: careful.reduce_scatter(
            x.astype("i1" if rank else "i8")
        ),
        "rank 1: parts must be": lambda x: careful.all_to_all([x] * (size + (rank == 1))),
        "rank 1: a communicator's array must be of": lambda x: careful.all_gather(x.astype("c8") if rank == 1 else x),
    }
    for text, call in wrong.items() if size > 1 else ():
        with pytest.raises((ValueError, TypeError), match=re.escape(text)):
            call(np.arange(4.0))
    begun(comm)


def begun(comm):
    """What is begun is done in this order, beside other collectives; an error comes with its handle, on every rank."""
    careful, size = Voted(Metered(comm)), comm.size
    for _ in range(2):
        x, y = np.full(1000, comm.rank + 1.0), np.full(3, comm.rank, np.int8)
        handles = [
            careful.begin("all_reduce", x, op="max"),
            careful.begin("all_gather", y[: comm.rank % 3], ragged=True),
            careful.begin("broadcast", y, root=size - 1),
            careful.begin("all_gather", np.zeros(1 + comm.rank)),
            careful.begin("broadcast_object", {0: comm.rank}),
            careful.begin("barrier"),
        ]
        beside = np.ones(10)
        comm.all_reduce(beside)
        assert (beside == size).all()
        found = []
        for handle in handles:
            try:
                found.append(handle.wait())
            except ValueError as error:
                found.append(str(error))
        assert all(handle.poll() for handle in handles)
        assert (x == size).all()
        assert (y == size - 1).all()
        assert [part.tolist() for part in found[1]] == [[r] * (r % 3) for r in range(size)]
        differ = "ranks differ: rank 0 has all_gather of array 0 = (1,) float64, rank 1 has"
        assert size == 1 or found[3].startswith(differ)
        assert found[4:] == [{0: 0}, None]
    sums = careful.comm.report()["other all_reduce"]
    assert (sums["calls"], sums["payload"]) == (2, 2 * 8000)
    with pytest.raises(ValueError, match=r"verb must be one of all_reduce, .*, got 'lengths'"):
        careful.begin("lengths", 1)


def in_turn(comm):
    """Arrays of any kinds, with gaps that differ per rank, are summed in their order, to the bits of single sums."""
    halves = [np.float16] * 2
    kinds = [np.float16, np.float32, ml_dtypes.bfloat16, *halves, np.float32, *halves, np.int64, *halves]
    rng, given = np.random.default_rng([7, comm.rank]), []
    for n, kind in enumerate(kinds):
        given += [None] * rng.integers(3) + [(9 * rng.standard_normal(1000 + 17 * n)).astype(kind)]
    given += [None] * rng.integers(3)
    asked = []

    def arrays():
        for x in given:
            asked.append(x)
            yield x

    expected = [x.copy() for x in given if x is not None]
    for x in expected:
        comm.all_reduce(x)
    mine = [x for x in given if x is not None]
    for done, (x, want) in enumerate(zip(sums_of(comm, arrays()), expected, strict=True)):
        assert x is mine[done]
        np.testing.assert_array_equal(x, want)
        if asked[-1] is None:
            assert sum(a is not None for a in asked) <= done + 2, "what is under way arrives where there is a gap"
    assert list(sums_of(comm, [])) == []
    comm.barrier()


class LeavesBiases(Int8):
    """Leaves the first member as it is, of a bucket that has two: a sum beside the payloads."""

    def uncompressed(self, layout, context):
        return context.constant("biases", lambda: np.array([1, 0] if len(layout.names) > 1 else [0]))


def gathered_in_turn(comm):
    """Payloads of buckets, some of them with a sum beside, and gaps that differ per rank: the bits of one by one."""
    compressor, rng, layouts = LeavesBiases(64), np.random.default_rng([8, comm.rank]), []
    for k in range(9):
        shapes = [(64,), (9, 100 + k)] if k % 3 else [(8, 100 + k)]
        layouts.append(BucketLayout(list("bw")[-len(shapes) :], shapes, [0, 64][: len(shapes)], np.float32))
    arrays = [rng.standard_normal(layout.extent).astype(np.float32) for layout in layouts]

    expected = [x.copy() for x in arrays]
    for x, layout in zip(expected, layouts, strict=True):
        context = ExchangeContext(rank=comm.rank, size=comm.size, bucket=BucketContext(layout))
        gather(x, compressor, comm, {}, context)
    given = [x for array in arrays for x in ([None] * rng.integers(3) + [array])]
    for x, found, want in zip(arrays, sums_of(comm, given, compressor, layouts), expected, strict=True):
        assert found is x
        np.testing.assert_array_equal(x, want)
    comm.barrier()


def between_hosts(comm):
    """The same where messages take time: of ranks that seem to sit on machines of their own."""
    before, pipelines, comm._hosts, comm.pipelines = comm._hosts, comm.pipelines, range(comm.size), comm.size > 1
    for check in (halves, *[in_turn, gathered_in_turn, gaps] * comm.pipelines):
        check(comm)
    comm._hosts, comm.pipelines = before, pipelines


def gaps(comm):
    """Where nothing is under way, no operation is either: the next array may take longer than a time limit."""
    ended = []

    def arrays():
        for _ in range(2):
            yield np.ones(100, np.float16)
            ended.append(comm._log.ended > 0)
            yield from [None] * (UNDER_WAY - 1)
            ended.append(comm._log.ended > 0)

    assert len(list(sums_of(comm, arrays()))) == 2
    assert ended == [False, True] * 2


def ordered(comm):
    """Ordered(comm) adds in rank order, whatever the transport does, in any chunking."""
    assert Ordered(comm).rank_ordered
    assert Metered(comm).rank_ordered == comm.rank_ordered
    if not hasattr(comm, "comm"):
        assert comm.rank_ordered == (comm.size <= 2 or not isinstance(comm, MpiCommunicator))
    rng = [np.random.default_rng([5, r]) for r in range(comm.size)]
    everyone = [r.standard_normal(1001).astype(np.float32) * 10.0 ** r.integers(-3, 3, 1001).astype("f4") for r in rng]
    total = everyone[0].copy()
    for x in everyone[1:]:
        total = total + x
    whole, pieces = everyone[comm.rank].copy(), everyone[comm.rank].copy()
    Ordered(Metered(comm)).all_reduce(whole)
    np.testing.assert_array_equal(whole, total)
    for start in range(0, 1001, 77):
        Ordered(comm).all_reduce(pieces[start : start + 77])
    np.testing.assert_array_equal(pieces, total)


def meters(comm):
    """Payload is what was handed over; wire, over all ranks, is what has to move; the inner one does the work."""
    metered = Metered(comm)
    p = comm.size
    metered.all_reduce(np.ones(100, np.float32))
    metered.all_gather(np.ones(10 + comm.rank), ragged=True)
    metered.broadcast(np.ones(50, np.uint8))
    metered.all_to_all([np.ones(to + 1, np.int32) for to in range(p)])
    part = metered.reduce_scatter(np.ones(30, np.float16))
    assert (part == p).all()
    total = sum(8 * (10 + r) for r in range(p))
    own = 4 * p * (p + 1) // 2
    found = {row["verb"]: {"payload": row["payload"], "wire": row["sent"]} for row in metered.ledger.by("verb")}
    assert {verb: line["payload"] for verb, line in found.items()} == {
        "all_gather": 8 * (10 + comm.rank),
        "all_reduce": 400,
        "all_to_all": own,
        "broadcast": 50,
        "reduce_scatter": 60,
    }
    everyone = [json.loads(text) for text in comm.control.gather(json.dumps(found))]
    assert {verb: sum(report[verb]["wire"] for report in everyone) for verb in found} == {
        "all_gather": (p - 1) * total,
        "all_reduce": 2 * (p - 1) * 400,
        "all_to_all": (p - 1) * own,
        "broadcast": (p - 1) * 50,
        "reduce_scatter": (p - 1) * 60,
    }
    metered.reset()
    assert metered.report() == {}


def shared(comm):
    """What ``alloc`` made can be read and written by all ranks; what it did not make, by none."""
    mine = comm.alloc(1000, np.float64)
    assert mine.ctypes.data % 64 == 0
    mine[:] = comm.rank + np.arange(1000) / 1000
    comm.barrier()
    arrays = comm.peers(mine)
    if arrays is None:
        assert comm.spans_hosts or type(comm).peers is Communicator.peers
        return
    assert len(arrays) == comm.size
    assert not isinstance(comm, MpiCommunicator) or "one host, memory shared" in repr(comm)
    assert arrays[comm.rank] is mine
    for r, a in enumerate(arrays):
        np.testing.assert_array_equal(a, r + np.arange(1000) / 1000)
    comm.barrier()
    arrays[(comm.rank + 1) % comm.size][comm.rank] = -1
    comm.barrier()
    assert mine[(comm.rank - 1) % comm.size] == -1
    first = comm.peers(mine[:3])
    assert [a.tolist() for a in first] == [a[:3].tolist() for a in arrays], "a part of it, from its start"
    comm.barrier()
    del first
    if isinstance(comm, MpiCommunicator) and comm.size > 1:
        files = len(os.listdir("/proc/self/fd"))
        assert comm.peers(np.zeros(3)) is None
        assert comm.peers(mine if comm.rank else np.zeros(1000)) is None
        del mine, arrays, a
        gc.collect()
        comm.barrier()
        assert len(os.listdir("/proc/self/fd")) <= files - comm.size


def shares(comm):
    """Shares of a sum in shared memory: rank order, or exact, any sizes, counted as the all-reduce that they are."""
    if comm.size == 1 or comm.spans_hosts or type(comm).peers is Communicator.peers:
        return
    sizes = [5, 0, CHUNK, 2 * CHUNK + 7, 64]
    bucket = plan([f"p{k}" for k in range(5)], sizes, [np.float32] * 5, 10**6).buckets[0]
    table = BucketLayout(bucket.names, [(n,) for n in sizes], bucket.offsets, np.float32)
    everyone = [np.random.default_rng(r).standard_normal(bucket.size).astype(np.float32) for r in range(comm.size)]
    total, exact = everyone[0].copy(), [x.copy() for x in everyone]
    for x in everyone[1:]:
        total = total + x
    sum_exactly(LocalCommunicator(), exact, comm.size)
    for added, expected in ((comm, total), (Exact(comm), exact[-1])):
        metered = Metered(added)
        mine = metered.alloc(bucket.size, np.float32)
        mine[:] = everyone[comm.rank]
        parts, bad = metered.peers(mine), np.zeros((comm.size + 1, 5), np.int64)
        comm.barrier()
        sum_shard(table, parts, [parts[metered.rank]], bad, metered)
        comm.barrier()
        found = np.zeros_like(total)
        data = [table.view(found, row) for row in range(5)]
        for r, part in enumerate(parts):
            kernels.unpack(table.point_to(data).shard(r, comm.size), part, 1.0)
        for row in range(5):
            np.testing.assert_array_equal(table.view(found, row), table.view(expected, row))
        metered.all_reduce(mine.copy())
        in_memory, by_messages = [(e.verb, e.payload, e.sent) for e in metered.ledger.entries]
        assert in_memory == by_messages
        comm.barrier()


def subgroups(comm):
    """Ranks of one parity among themselves, as often as they like; bytes go to the ledger of all."""
    groups = [list(range(comm.size))[parity::2] for parity in range(min(2, comm.size))]
    members, metered = groups[comm.rank % 2], Metered(comm)
    group = metered.subgroup(groups)
    assert (group.rank, group.size) == (comm.rank // 2, len(members))
    assert group is metered.subgroup(groups)
    for _ in range(1 + comm.rank % 2):  # the others do it less often
        x = np.full(10, comm.rank, np.float32)
        group.all_reduce(x)
        assert (x == sum(members)).all()
        assert group.control.gather(str(comm.rank)) == list(map(str, members))
        got = group.all_to_all([np.array([comm.rank, to]) for to in members])
        assert [g.tolist() for g in got] == [[r, comm.rank] for r in members]
        assert [int(g[0]) for g in Ordered(group).all_gather(np.array([comm.rank]))] == members
    alone = comm.subgroup([r] for r in range(comm.size))
    x = np.arange(3.0)
    alone.all_reduce(x)
    assert (alone.rank, alone.size, x.tolist()) == (0, 1, [0.0, 1.0, 2.0])
    sums = 0 if len(members) == 1 else metered.report()["other all_reduce"]["wire"]
    assert sums <= (1 + comm.rank % 2) * 2 * 40
    descending = [range(comm.size)[::-1]] if comm.size > 1 else []
    for wrong in ([], [*groups, [0]], [range(comm.size + 1)], descending, groups[1:]):
        with pytest.raises(ValueError, match="groups must have each of"):
            comm.subgroup(wrong)
    comm.barrier()


def everything(comm):
    """All of the above; on MPI once more with a chunk limit that forces every message into pieces."""
    for check in (verbs, halves, ordered, meters, shared, shares, subgroups, reductions, carried, voted):
        check(comm)
    verbs(Metered(Ordered(comm)))
    if comm.pipelines:
        for check in (in_turn, gathered_in_turn, gaps):
            check(comm)
    if isinstance(comm, MpiCommunicator):
        comm.CHUNK = 1000
        for check in (verbs, halves, between_hosts, ordered, carried):
            check(comm)


def beyond_32_bits(comm):
    """More than 2^31 elements in one array; 2 GiB a rank."""
    x = np.ones(2**31 + 8, np.uint8)
    x[-1] = comm.rank
    comm.all_reduce(x)
    assert x[0] == x[2**31] == x[-2] == comm.size
    assert x[-1] == sum(range(comm.size))
    comm.broadcast(x, root=1)
