"""The exchange by nodes: sums inside of a node, compressed between nodes; laws, bytes, and what may go wrong."""

import functools

import numpy as np
import pytest

import distopt.exchange.choice
import laws
import training
from benchmarks.namespaces import joined_hosts, missing
from distopt import DistOpt, Parameter, run_ranks, simulate
from distopt.comm import Communicator, Elastic, Metered
from distopt.comm.communicator import Wrapper
from distopt.compress import (
    DCT,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    Half,
    Int4,
    Int8,
    OneBit,
    Packed,
    Threshold,
    TopK,
    TwoBit,
)
from distopt.compress.base import of_sum
from distopt.exchange.hierarchical import fits_nodes, share_out
from distopt.exchange.sharding import ShardBounds
from distopt.lab import buckets as planned
from distopt.lab import mode, step_ledger
from distopt.optim import SGD
from launch import needs_mpi, run_mpi
from training import SHAPES, integers, zeros

SENDERS = [
    ErrorFeedback(TopK(0.05)),
    ErrorFeedback(Packed(TopK(0.05))),
    ErrorFeedback(Threshold(3.0)),
    ErrorFeedback(TwoBit(2.0)),
    ErrorFeedback(OneBit()),
    ErrorFeedback(OneBit(scale="unit")),
    ErrorFeedback(Int8(64, "stochastic")),
    DeepGradientCompression(TopK(0.05), weight_decay=0.01, clip_norm=2.0),
    Half(),
    Dense(),
]


def on_nodes(comm, sizes):
    """Ranks of one process, as if they were on several machines: of so many ranks each, or all of as many."""
    sizes = [sizes] * (comm.size // sizes) if isinstance(sizes, int) else sizes
    comm._hosts = hosts_of(sizes)
    return comm


def hosts_of(sizes):
    return [node for node, size in enumerate(sizes) for _ in range(size)]


trained = functools.partial(training.trained, exchanges=("nodes",))


def two_phases_between(monkeypatch):
    monkeypatch.setattr(distopt.exchange.choice, "GATHER_BELOW", 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compressor", SENDERS, ids=repr)
@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_have_the_bits_of_as_many_ranks_with_their_sums(compressor, nodes, monkeypatch):
    """A node of two ranks is a rank with twice the gradient, and with a compressor that is meant for that."""
    two_phases_between(monkeypatch)
    monkeypatch.setattr(ShardBounds, "see", lambda *_: None)  # between nodes they stay
    one_bucket = {"threshold": 10000}

    def sums(node, step):
        return [a + b for a, b in zip(integers(2 * node, step), integers(2 * node + 1, step), strict=True)]

    def alone(comm):
        of_sums = of_sum(compressor, 2)
        if isinstance(compressor, DeepGradientCompression):  # whose decay and bound count per gradient
            options = compressor._options() | {"clip_norm": 4.0, "weight_decay": 0.02}
            of_sums = DeepGradientCompression(compressor.selector, **options)
        return trained(comm, of_sums, 3, gradients=sums, exchanges=("auto",), lr=0.5, **one_bucket)[0]

    def by_nodes(comm):
        return trained(on_nodes(comm, 2), compressor, 3, **one_bucket)[0]

    expected = run_ranks(nodes, alone)[0]
    for found in run_ranks(2 * nodes, by_nodes):
        for a, b in zip(found, expected, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", SENDERS, ids=repr)
def test_nodes_of_one_rank_are_no_nodes(compressor, monkeypatch):
    two_phases_between(monkeypatch)
    monkeypatch.setattr(ShardBounds, "see", lambda *_: None)  # between nodes they stay

    def main(comm):
        return [trained(on_nodes(comm, 1), compressor, 3, exchanges=(e,))[0] for e in ("nodes", "auto")]

    for one, other in run_ranks(3, main):
        for a, b in zip(one, other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_what_owners_owe_between_nodes_is_sent_in_two_phases_too(monkeypatch):
    """A rank owns other parts of the same buckets then, which have other places among those of its exchange."""
    two_phases_between(monkeypatch)

    def main(comm):
        params = [Parameter(f"p{k}", np.zeros(1000, np.float32)) for k in range(3)]
        opt = DistOpt(SGD(1.0), on_nodes(comm, 2), threshold=300)
        for step, exchange in enumerate(("two_phase", "nodes", "two_phase")):
            grads = integers(comm.rank, step, shapes=[(1000,)] * 3) if step < 2 else [np.zeros(1000, np.float32)] * 3
            sender = TopK(0.2) if step < 2 else TopK(1.0)
            opt.step(list(zip(params, grads, strict=True)), ErrorFeedback(sender), False, exchange)
        return [a for arrays in opt.state_dict()["states"].values() for a in arrays.values()]

    for kept in run_ranks(6, main):
        assert not any(a.any() for a in kept)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("per_node", [1, 2, 3, 6, [3, 1, 2], [5, 1]], ids=str)
@pytest.mark.parametrize("exchanges", [("nodes",), ("gather", "nodes", "two_phase", "nodes", "gather")])
@pytest.mark.parametrize("sender", [TopK(0.05), Packed(Threshold(3.0)), TwoBit(2.0), Int8(64)], ids=repr)
def test_nothing_is_lost_between_ranks_owners_and_nodes(sender, exchanges, per_node, monkeypatch):
    """P x applied + all that any rank keeps == the sum of all gradients, also where the exchange changes."""
    two_phases_between(monkeypatch)
    if isinstance(per_node, list) and isinstance(sender, Packed | TwoBit):
        sender = TopK(0.3)  # thresholds differ between such nodes

    def main(comm):
        return trained(on_nodes(comm, per_node), ErrorFeedback(sender), 5, exchanges=exchanges)[:2]

    ranks = run_ranks(6, main)
    for k, shape in enumerate(SHAPES):
        kept = sum(a.get(f"p{k}", np.zeros(shape)).astype(float) for _, states in ranks for a in states.values())
        total = sum(integers(rank, step)[k].astype(float) for rank in range(6) for step in range(5))
        np.testing.assert_allclose(kept - 6.0 * ranks[0][0][k], total, rtol=0, atol=1e-3)
        assert all(values[k].tobytes() == ranks[0][0][k].tobytes() for values, _ in ranks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", [TopK(1.0), ErrorFeedback(TopK(1.0)), Dense()], ids=repr)
@pytest.mark.parametrize("per_node", [1, 2, 4, [3, 1], [1, 2, 1]], ids=str)
def test_all_entries_are_the_dense_sum(compressor, per_node):
    """In integers, whose sums do not depend on the order; in floats all ranks have the same bits."""

    def main(comm):
        comm, found = on_nodes(comm, per_node), []
        for use, exchange in ((compressor, "nodes"), (None, "auto")):
            found.append(trained(comm, use, 3, exchanges=(exchange,))[0])
        params = laws.parameters(SHAPES, rank=0)
        opt = DistOpt(SGD(0.1), comm, threshold=300)
        for step in range(3):
            opt.step(laws.pairs(comm, params, step), compressor, False, "nodes")
        return *found, laws.digest(params)

    ranks = run_ranks(4, main)
    for one, dense, digest in ranks:
        assert digest == ranks[0][2]
        for a, b in zip(one, dense, strict=True):
            assert a.tobytes() == b.tobytes()


def test_buckets_are_shared_out_among_the_ranks_of_a_node():
    assert share_out([], 2) == [[], []]
    assert share_out([5], 3) == [[0], [], []]
    sizes = np.random.default_rng(0).integers(1, 100, 50).tolist()
    shares = share_out(sizes, 4)
    assert sorted(k for share in shares for k in share) == list(range(50))
    totals = [sum(sizes[k] for k in share) for share in shares]
    assert max(totals) - min(totals) <= max(sizes)


def test_what_a_rank_keeps_lies_with_the_rank_that_has_the_bucket():
    """Half of the residuals' memory each; a joined rank takes part."""

    def main(comm):
        _, states, opt = trained(on_nodes(comm, 2), ErrorFeedback(TopK(0.05)), 2, threshold=1000)
        return set(states["residual"]), str(opt.plan).splitlines()[-1]

    ranks = run_ranks(4, main)
    assert ranks[0][0] == ranks[2][0]
    assert ranks[1][0] == ranks[3][0]
    assert not ranks[0][0] & ranks[1][0]
    assert ranks[0][0] | ranks[1][0] == {f"p{k}" for k in range(6)}
    assert ranks[0][1] == "exchange: 2 nodes of 2 ranks, between them gather"  # as it was asked to

    def joins(comm):
        comm = on_nodes(comm, 2)
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), comm)
        for _ in range(1 + comm.rank):
            opt.step([(p, np.ones(1000, np.float32))], TopK(1.0), False, "nodes")
        opt.join()
        return p.data

    for x in run_ranks(4, joins):
        np.testing.assert_allclose(x, -4.0)


# ----------------------------------------------------------------------------------------------------- auto


LARGE = [(70_000,), (300, 100), (50_000,)]  # above what is sent as it comes


def chosen(comm, hosts, compressor, shapes=LARGE, exchange="auto", prepare=lambda opt: None, **options):
    """Two steps; the last line of the plan, and the parameters."""
    if hosts is not None:
        comm._hosts = hosts
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(shapes)]
    opt = DistOpt(SGD(1.0), comm, **{"threshold": 40_000} | options)
    prepare(opt)
    for step in range(2):
        gradients = integers(comm.rank, step, shapes=shapes)
        opt.step(list(zip(params, gradients, strict=True)), compressor, exchange=exchange)
    return str(opt.plan).splitlines()[-1], [p.data for p in params]


@pytest.mark.parametrize("compressor", [Half(), Half("bfloat16"), Int8(), ErrorFeedback(Int8()), Int4()], ids=repr)
@pytest.mark.parametrize(("hosts", "nodes"), [([0, 0, 1, 1], "2 nodes of 2 ranks"), ([0, 1, 0, 0, 1], "3 and 2 ranks")])
def test_ranks_that_share_hosts_add_up_before_they_compress(compressor, hosts, nodes):
    """Where that is asked for, and where nothing is; the plan says why."""
    line = nodes

    def main(comm):
        auto, nodes = (chosen(comm, hosts, compressor, exchange=e) for e in ("auto", "nodes"))
        assert auto[0] == nodes[0] + " (auto: what leaves a node does not grow with its ranks)"
        assert line in auto[0]
        for a, b in zip(auto[1], nodes[1], strict=True):
            assert a.tobytes() == b.tobytes()

    run_ranks(len(hosts), main)


@pytest.mark.parametrize(
    "compressor",
    [Dense(), ErrorFeedback(TopK(0.05)), ErrorFeedback(TwoBit(2.0)), DCT(ErrorFeedback(Int8()))],
    ids=repr,
)
def test_what_would_train_something_else_is_not_added_up(compressor):
    assert not any("node" in line for line, _ in run_ranks(4, lambda comm: chosen(comm, [0, 0, 1, 1], compressor)))


def test_dense_sums_of_more_hosts_than_two_go_by_nodes():
    def main(comm):
        return chosen(comm, [0, 0, 1, 1, 2, 2], Dense())[0], chosen(comm, None, Dense(), deterministic=True)[0]

    for usual, deterministic in run_ranks(6, main):
        assert usual.startswith("exchange: 3 nodes of 2 ranks, between them all-reduce (auto")
        assert "node" not in deterministic


@pytest.mark.parametrize(
    ("hosts", "more"),
    [
        ([0, 0, 0, 0], {}),
        ([0, 1, 2, 3], {}),
        ([0, 0, 0, 1], {}),
        ([0, 0, 1, 1], {"deterministic": True}),
        ([0, 0, 1, 1], {"shapes": [(1000,)]}),
        ([0, 0, 1, 1], {"prepare": lambda opt: opt.observe(lambda *seen: None, every=1)}),
    ],
    ids=["one host", "a rank each", "hosts of three and one", "deterministic", "few bytes", "observed"],
)
def test_ranks_that_cannot_or_need_not_add_up_do_not(hosts, more):
    assert not any("node" in line for line, _ in run_ranks(4, lambda comm: chosen(comm, hosts, Half(), **more)))


@pytest.mark.parametrize(("name", "ranks"), [("half", 4), ("int8", 4), ("dense", 4), ("dense", 6)])
def test_virtual_ranks_and_forecasts_choose_as_ranks_do(name, ranks):
    compressor, sent = mode(name).compressor, []
    hosts = [rank // 2 for rank in range(ranks)]

    def main(comm):
        metered = Metered(comm)
        metered.comm._hosts = hosts
        values = chosen(metered, None, compressor)[1]
        return values, metered.ledger.total()

    values, total = run_ranks(ranks, main)[0]
    params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(LARGE)]
    sim = simulate(ranks, SGD(1.0), hosts=hosts, threshold=40_000)
    for step in range(2):
        sim.step(lambda rank, step=step: list(zip(params, integers(rank, step, shapes=LARGE), strict=True)), compressor)
        rows = sim.ledger.by("step", "phase")
        sent.append(sum(row["sent_between"] for row in rows if row["phase"] == "gradients") - sum(sent))
    for p, x in zip(params, values, strict=True):
        assert p.data.tobytes() == x.tobytes()
    assert sim.ledger.total() == total
    layouts = planned([(f"p{k}", shape) for k, shape in enumerate(LARGE)], 40_000)
    assert sent == [step_ledger(layouts, mode(name), ranks, 2).total()["sent_between"]] * 2


LEAVING = [Half(), Int8(), Dense(), *map(ErrorFeedback, (Int8(), Half("bfloat16"), TopK(0.05)))]


@pytest.mark.parametrize("compressor", LEAVING, ids=repr)
@pytest.mark.parametrize("sizes", [[2, 2], [2, 2, 2], [3, 1]], ids=str)
def test_buckets_leave_by_nodes_while_gradients_come(compressor, sizes):
    """With the bits of all gradients at once; an error of one rank halfway is one of all, and they go on."""
    size = sum(sizes)

    def main(comm):
        comm, seen = on_nodes(comm, sizes), []
        for overlap in (False, True):
            params = [Parameter(f"p{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(LARGE)]
            opt = DistOpt(SGD(1.0), comm, threshold=40_000, overlap=overlap)
            leaves = 0

            def loss(step, opt=opt, params=params, fails=False):
                nonlocal leaves
                for p, g in zip(reversed(params), integers(comm.rank, step, shapes=LARGE)[::-1], strict=True):
                    leaves += opt.engine.in_backward
                    yield p, g
                    if fails:
                        raise ValueError("halfway")

            for step in range(4):
                opt.step(loss(step), compressor, exchange="nodes")
                if step == 2:
                    with pytest.raises(ValueError, match="halfway"):
                        opt.step(loss(step, fails=comm.rank == 1), compressor, exchange="nodes")
            # Between three nodes all of its buckets are exchanged together, in two phases, which know all entries.
            assert bool(leaves) == (overlap and not (size == 6 and compressor.traits.bounded))
            seen.append(laws.digest(params))
        assert seen[0] == seen[1]
        return seen[0]

    assert len(set(run_ranks(size, main))) == 1


# ----------------------------------------------------------------------------------------------------- bytes


FORMULAS = ["dense", "half", "topk=0.0625", "topk=0.0625+packed", "2bit", "1bit", "int8"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8, 11, 16, 64])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_ledger_is_the_formula(name, ranks, per_node):
    """Of the first rank, at any number of virtual ranks; the last node may have fewer."""
    if ranks % per_node and (ranks < per_node or "bit" in name):
        per_node = 1
    shapes, used = [(f"p{k}", (640, 8)) for k in range(5)], mode(name)
    layouts = planned(shapes, 6000)
    params = [Parameter(key, np.zeros(shape, np.float32)) for key, shape in shapes]
    hosts = [rank // per_node for rank in range(ranks)]
    sim = simulate(ranks, SGD(1.0), hosts=hosts, threshold=6000)
    some = np.zeros((640, 8), np.float32)
    some.reshape(-1)[::16] = 1 + np.arange(320)  # spread evenly, as the formula takes entries to be
    sim.step(lambda rank: [(p, some.copy()) for p in params], used.compressor, exchange="nodes")
    found = {row["verb"]: row for row in sim.ledger.by("phase", "verb") if row["phase"] == "gradients"}
    formula = step_ledger(layouts, used, ranks, per_node, exchange="nodes")
    expected = {row["verb"]: row for row in formula.by("verb")}
    assert found.keys() == expected.keys()
    for verb, row in found.items():
        for column in ("calls", "payload", "sent", "sent_between"):
            assert row[column] == expected[verb][column], (verb, column)


@pytest.mark.parametrize("name", FORMULAS)
def test_n_times_fewer_bytes_leave_a_node(name):
    """By formula, with 8 nodes of 4 ranks, each of which has a bucket, against the same exchange among all 32 ranks."""
    layouts = planned([(f"p{k}", (1000, 1000)) for k in range(4)], 500_000)
    flat = step_ledger(layouts, mode(name), 32, 4, exchange="two_phase").total()["sent_between"]
    nodes = step_ledger(layouts, mode(name), 32, 4, exchange="nodes").total()["sent_between"]
    # a rank sends 28 of 32 parts of all buckets to other nodes, or 7 of 8 parts of one
    assert flat / nodes == pytest.approx(4, rel=0.01)


def of_ranks(comm, per_node):
    """Train some of ``SENDERS`` by nodes, as if the ranks were on several machines."""
    found = {}
    for k in (0, 3, 7):
        metered = Metered(on_nodes(comm, per_node))
        values, _, _ = trained(metered, SENDERS[k], 3)
        total = metered.ledger.total()
        found |= {f"{k}: p{place}": x for place, x in enumerate(values)}
        found |= {f"{k}: {key}": total[key] for key in ("sent", "payload")}
    return found


@needs_mpi
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (4, 2), (8, 2), (8, 4)])
def test_processes_have_the_bits_and_bytes_of_threads(ranks, per_node, tmp_path):
    threads = run_ranks(ranks, lambda comm: of_ranks(comm, per_node))
    processes = run_mpi(ranks, of_ranks, tmp_path, per_node)
    for one, other in zip(processes, threads, strict=True):
        for name, x in other.items():
            # DGC's own sums, of what is no integer, are MPI's, which adds in an order of its own
            np.testing.assert_allclose(one[name], x, rtol=1e-5 if name[0] == "7" else 0, atol=0, err_msg=name)


@needs_mpi
@pytest.mark.parametrize("name", ["dense", "topk=0.05", "half", "int8"])
def test_nodes_are_the_hosts_of_a_network(name, tmp_path):
    """Two ranks on each of two: the bits of threads, and the bytes of the formula are really on the link."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with joined_hosts(rate="1gbit") as hosts:
        before = sum(hosts.sent())
        chosen = "auto" if name in ("half", "int8") else "nodes"
        processes = run_mpi(4, over_a_network, tmp_path, name, chosen, hosts=hosts)
        on_link = sum(hosts.sent()) - before
    threads, alone = (
        run_ranks(4, lambda comm, e=exchange: over_a_network(on_nodes(comm, 2), name, e))
        for exchange in ("nodes", "gather")
    )
    for one, other in zip(processes, threads, strict=True):
        np.testing.assert_array_equal(one["w"], other["w"])
        assert one["leaves"]
        assert (one["between"], one["gradients"]) == (other["between"], other["gradients"])
    counted = sum(int(rank["between"]) for rank in processes)
    assert counted < on_link < 1.05 * counted + 1e6, "headers, and what the launcher says, are little"
    nodes = sum(int(rank["gradients"]) for rank in processes)
    layouts = planned([(f"w{k}", shape) for k, shape in enumerate(NETWORK)], 125_000)
    formula = step_ledger(layouts, mode(name), 4, 2, exchange="nodes").total()["sent_between"]
    assert nodes == 3 * 4 * formula, "of three steps, and of ranks that have as many buckets each"
    alike = name in ("dense", "half")  # a sum of two phases, which both halve, or payloads to two ranks in place of one
    assert sum(rank["gradients"] for rank in alone) == pytest.approx((2 if alike else 4) * nodes, rel=0.01)


NETWORK = [(250, 500)] * 8


def over_a_network(comm, name, exchange):
    """Three steps of some matrices; what left the host, and of that the gradients."""
    metered = Metered(comm)
    params = [Parameter(f"w{k}", np.zeros(shape, np.float32)) for k, shape in enumerate(NETWORK)]
    opt, leaves = DistOpt(SGD(1.0), metered, threshold=125_000), 0
    for step in range(3):

        def loss(step=step):
            nonlocal leaves
            for pair in zip(params, integers(comm.rank, step, shapes=NETWORK), strict=True):
                leaves += opt.engine.in_backward
                yield pair

        opt.step(loss, mode(name).compressor, exchange=exchange)
    between = {row["phase"]: row["sent_between"] for row in metered.ledger.by("phase")}
    w = np.concatenate([p.data.ravel() for p in params])
    return {"w": w, "between": sum(between.values()), "gradients": between["gradients"], "leaves": leaves > 0}


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1]], ids=str)
def test_a_budget_counts_what_leaves_a_node(sizes):
    """The mean over ranks, also in a step after one of another exchange."""

    def main(comm):
        metered = Metered(on_nodes(comm, sizes))
        w, opt = Parameter("w", np.zeros(40_000, np.float32)), DistOpt(SGD(1.0), metered)
        for step, exchange in enumerate(("two_phase", "nodes")):
            g = np.random.default_rng([comm.rank, step]).standard_normal(w.data.shape, np.float32)
            opt.step([(w, g)], ErrorFeedback(TopK(bytes=8000)), exchange=exchange)
        rows = metered.ledger.by("step", "phase")
        return {row["step"]: row["sent_between"] for row in rows if row["phase"] == "gradients"}

    ranks = run_ranks(4, main)
    of_nodes = [sent[max(sent)] for sent in ranks]
    assert 0.99 * 8000 < np.mean(of_nodes) <= 8000
    assert len(ranks[0]) == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compressor", SENDERS, ids=repr)
@pytest.mark.parametrize("sizes", [[2, 2], [2, 2, 2], [3, 3], [2, 3, 1]], ids=str)
def test_virtual_ranks_have_the_bits_and_bytes_of_threads(compressor, sizes, monkeypatch):
    two_phases_between(monkeypatch)
    size = sum(sizes)
    if sizes == [2, 3, 1] and not fits_nodes(compressor, sizes):
        sizes = [2, 2, 2]

    def main(comm):
        metered = Metered(on_nodes(comm, sizes))
        return *trained(metered, compressor, 3)[:2], metered.ledger.total()

    params, sim = zeros(), simulate(size, SGD(1.0), hosts=hosts_of(sizes), threshold=300)
    for step in range(3):
        sim.step(
            lambda rank, step=step: list(zip(params, integers(rank, step), strict=True)), compressor, False, "nodes"
        )
    values, _, total = run_ranks(size, main)[0]
    for p, x in zip(params, values, strict=True):
        assert p.data.tobytes() == x.tobytes()
    assert sim.ledger.total() == total


# ----------------------------------------------------------------------------------------------------- checkpoints


def stepped(comm, opt, params, gradients, sender):
    opt.step(list(zip(params, gradients, strict=True)), ErrorFeedback(sender), False, "nodes")
    return [p.data for p in params]


def pending(ranks):
    """The sum over ranks of all that they keep."""
    found = [np.zeros(shape) for shape in SHAPES]
    for states in ranks:
        for arrays in states.values():
            for name, a in arrays.items():
                found[int(name[1:])] += a
    return found


@pytest.mark.parametrize("sender", [TopK(0.05), TwoBit(2.0)], ids=repr)
def test_a_checkpoint_goes_on_to_the_bit(sender, tmp_path):
    def save(comm):
        values, _, opt = trained(on_nodes(comm, 2), ErrorFeedback(sender), 3)
        opt.save(tmp_path)
        params = [Parameter(f"p{k}", x.copy()) for k, x in enumerate(values)]
        return values, stepped(comm, opt, params, integers(comm.rank, 3), sender)

    saved = run_ranks(4, save)

    def go_on(comm):
        params, opt = zeros(), DistOpt(SGD(1.0), on_nodes(comm, 2), threshold=300)
        for p, x in zip(params, saved[comm.rank][0], strict=True):
            p.data[...] = x
        opt.load(tmp_path, None)
        return stepped(comm, opt, params, integers(comm.rank, 3), sender)

    for resumed, (_, expected) in zip(run_ranks(4, go_on), saved, strict=True):
        assert [x.tobytes() for x in resumed] == [x.tobytes() for x in expected]


@pytest.mark.parametrize(
    ("size", "per_node", "sender"),
    [(6, 3, TopK(0.05)), (6, 3, TwoBit(2.0)), (3, 1, TwoBit(2.0)), (4, [3, 1], TopK(0.05)), (6, [1, 2, 3], TopK(0.05))],
    ids=str,
)
def test_other_nodes_go_on_with_the_same_pending_mean(sender, size, per_node, tmp_path):
    """From 2 nodes of 2 ranks: the mean over ranks of all that is kept stays."""

    def save(comm):
        _, states, opt = trained(on_nodes(comm, 2), ErrorFeedback(sender), 3)
        opt.save(tmp_path)
        return states

    def go_on(comm):
        params, opt = zeros(), DistOpt(SGD(1.0), on_nodes(comm, per_node), threshold=300)
        opt.load(tmp_path, None)
        before = opt.state_dict()["states"]
        values = stepped(comm, opt, params, [np.zeros_like(p.data) for p in params], sender)
        return before, values, opt.state_dict()["states"]

    kept = [a / 4 for a in pending(run_ranks(4, save))]
    ranks = run_ranks(size, go_on)
    before, after = (pending([rank[k] for rank in ranks]) for k in (0, 2))
    for expected, was, x, stays in zip(kept, before, ranks[0][1], after, strict=True):
        np.testing.assert_allclose(was / size, expected, atol=1e-4)
        np.testing.assert_allclose(stays / size - x, expected, atol=1e-4)


# ----------------------------------------------------------------------------------------------------- bad input


THRESHOLDS = [TwoBit(0.1), Packed(Threshold(0.1)), ErrorFeedback(OneBit(0.1)), OneBit(scale="unit")]


@pytest.mark.parametrize("compressor", THRESHOLDS, ids=repr)
def test_nodes_of_different_sizes_have_no_thresholds_in_common(compressor):
    """Refused on every rank, which go on."""

    def main(comm):
        p, opt = Parameter("w", np.zeros(10, np.float32)), DistOpt(SGD(1.0), on_nodes(comm, [2, 1]))
        with pytest.raises(ValueError, match="every node has as many ranks, got 'nodes' with nodes of 2, 1 ranks"):
            opt.step([(p, np.ones(10, np.float32))], compressor, exchange="nodes")
        opt.step([(p, np.ones(10, np.float32))], Dense())
        return p.data.tolist()

    assert run_ranks(3, main) == [[-1.0] * 10] * 3


def test_a_communicator_without_groups_of_ranks_says_so():
    class Own(Wrapper):
        def make_subgroup(self, groups):
            return Communicator.make_subgroup(self, groups)

    def main(comm):
        p, opt = Parameter("w", np.zeros(10, np.float32)), DistOpt(SGD(1.0), Own(comm))
        opt.step([(p, np.ones(10, np.float32))], TopK(0.1), exchange="nodes")

    with pytest.raises(ValueError, match="needs a communicator that defines make_subgroup, got a Own"):
        run_ranks(2, main)


class Damaging(Wrapper):
    """Change a byte of what the first rank of a group hears from the second one."""

    def all_to_all(self, parts, ragged=False):
        if self.rank == 1 and self.spans_hosts and parts[0].size:
            parts = [parts[0].copy(), *parts[1:]]
            parts[0][0] ^= 64
        return super().all_to_all(parts, ragged)


def test_a_damaged_header_between_nodes_is_refused_where_it_arrives(monkeypatch):
    two_phases_between(monkeypatch)

    def main(comm):
        p, opt = Parameter("w", np.zeros(1000, np.float32)), DistOpt(SGD(1.0), Damaging(on_nodes(comm, 2)))
        opt.step([(p, np.ones(1000, np.float32))], Packed(TopK(0.1)), False, "nodes")

    with pytest.raises(ValueError, match="damaged on its way"):
        run_ranks(6, main)


@pytest.mark.parametrize("n", [0, 1, 65])
@pytest.mark.parametrize("sender", [TopK(0.05), TwoBit(2.0), Int8()], ids=repr)
def test_a_model_may_have_fewer_buckets_and_elements_than_ranks(sender, n, monkeypatch):
    two_phases_between(monkeypatch)

    def main(comm):
        p, opt = Parameter("w", np.zeros(n, np.float32)), DistOpt(SGD(1.0), on_nodes(comm, 2))
        for _ in range(2):
            opt.step([(p, np.full(n, 4.0, np.float32))], ErrorFeedback(sender), False, "nodes")
        return p.data

    first, *others = run_ranks(8, main)
    assert all(first.tobytes() == x.tobytes() for x in others)
    assert np.isfinite(first).all()


def test_payloads_of_nodes_cannot_be_observed():
    def main(comm):
        p, opt = Parameter("w", np.zeros(10, np.float32)), DistOpt(SGD(1.0), on_nodes(comm, 2))
        opt.observe(lambda *seen: None, every=1)
        opt.step([(p, np.ones(10, np.float32))], TopK(0.1), exchange="nodes")

    with pytest.raises(ValueError, match="where payloads are observed, got 'nodes'"):
        run_ranks(4, main)


def test_plain_gradients_of_virtual_ranks_need_hosts_one_after_the_other():
    p, sim = Parameter("w", np.zeros(10, np.float32)), simulate(4, SGD(1.0), hosts=[0, 1, 0, 1])
    with pytest.raises(ValueError, match="hosts must stand one after the other"):
        sim.step(lambda rank: [(p, np.ones(10, np.float32))], TopK(0.1), exchange="nodes")


@pytest.mark.parametrize("sender", [TopK(0.1), Packed(TopK(0.1)), Threshold(0.1)], ids=repr)
def test_ranks_go_on_by_nodes_or_without_them_when_some_are_lost(sender, monkeypatch):
    """Nodes of 2 and 2 ranks, then of 2 and 1, where a threshold is exchanged by all, then of 1 and 1.  Nothing is lost
    with ranks that have sent what they had, and own nothing of their node.
    """
    two_phases_between(monkeypatch)
    lost_at = {3: 2, 1: 40}  # the step of each rank that is lost

    def main(comm):
        member, comm = comm.rank, Elastic(on_nodes(comm, 2))
        p, plans = Parameter("w", np.zeros(1000)), []
        opt = DistOpt(SGD(1.0), comm)
        for step in range(80):
            if lost_at.get(member) == step:
                return "lost"
            gradient = np.full(1000, member + 1.0 if step in (0, 1, 40, 41) else 0.0)
            opt.step([(p, gradient)], ErrorFeedback(sender), False, "nodes")
            plans.append(opt.plan.exchange.split(",")[0])
            if step == 1:
                before = p.data.copy()
            if step == 39:
                between = p.data.copy()
        comm.leave()
        return before, between, p.data, plans

    (before, between, found, plans), _, other, _ = run_ranks(4, main)
    np.testing.assert_array_equal(found, other[2])
    # what four ranks have brought in two steps, and had not sent when there were three; then two steps of two ranks
    np.testing.assert_allclose(between, before - (2 * (1 + 2 + 3 + 4) + 4 * before) / 3, rtol=1e-12)
    np.testing.assert_allclose(found, between - 2 * (1 + 3) / 2, rtol=1e-12)
    assert [plans[0], plans[60]] == ["2 nodes of 2 ranks", "2 nodes of 1 rank"]
    assert plans[20] == ("two-phase" if isinstance(sender, Threshold) else "2 nodes of 2 and 1 ranks")
