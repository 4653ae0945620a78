"""Two ranks on two hosts with a real network between them: namespaces joined by a shaped link."""

import subprocess

import numpy as np
import pytest
from comm_checks import sums_of

import distopt
from benchmarks.namespaces import joined_hosts, missing
from distopt.compress import ARCTopK, Dense, ErrorFeedback, Half, TopK
from launch import finish, run_mpi

pytestmark = pytest.mark.mpi
FEATURES, OUTPUTS, STEPS = 3000, 1000, 3


@pytest.fixture(scope="module")
def hosts():
    reason = missing()
    if reason:
        pytest.skip(reason)
    with joined_hosts(rate="1gbit") as made:
        yield made


def train(comm):
    """A linear model of 12 MB in one message per step, each mode in turn; parameters, loss, and bytes by formula."""
    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal((32, FEATURES), np.float32)
    y = x @ np.random.default_rng(9).standard_normal((FEATURES, OUTPUTS), np.float32)
    found = {"local_rank": comm.local_rank, "wire": 0, "between": 0}
    for compressor in (Dense(), Half(), ErrorFeedback(TopK(0.01)), ARCTopK(0.01)):
        world = distopt.comm.Metered(comm)
        w = distopt.Parameter("w", np.zeros((FEATURES, OUTPUTS), np.float32))
        opt = distopt.DistOpt(distopt.optim.SGD(1e-3, momentum=0.9), world)
        losses = []
        for _ in range(STEPS):
            error = x @ w.data - y
            losses.append(float((error**2).mean()))
            opt.step([(w, x.T @ error / len(x))], compressor)
        name = type(compressor).__name__
        found |= {f"{name} parameters": w.data, f"{name} losses": losses}
        found["wire"] += world.ledger.total()["sent"]
        found["between"] += world.ledger.total()["sent_between"]
    return found


def test_training_over_a_link_is_training_on_one_machine(hosts, tmp_path):
    """The same bits on both ranks, the same as without a link, and the bytes of the formula were really on it."""
    before = sum(hosts.sent())
    apart = run_mpi(2, train, tmp_path, hosts=hosts)
    sent = sum(hosts.sent()) - before
    together = run_mpi(2, train, tmp_path)
    for rank in apart:
        for name, value in rank.items():
            if "parameters" in name:
                np.testing.assert_array_equal(value, apart[0][name])
            if "losses" in name:
                assert value[-1] < value[0], name
    for here, there in zip(together, apart, strict=True):
        assert here.keys() == there.keys()
        for name in here.keys() - {"local_rank", "between"}:
            np.testing.assert_array_equal(here[name], there[name], name)
    assert [int(rank["local_rank"]) for rank in apart] == [0, 0], "the ranks must not take each other for neighbours"
    wire = sum(int(rank["wire"]) for rank in apart)
    assert sum(int(rank["between"]) for rank in apart) == wire, "all of it leaves a host"
    assert sum(int(rank["between"]) for rank in together) == 0
    assert wire < sent < 1.05 * wire + 1e6, "headers, and what the launcher says, are little"


def sums(comm):
    """Arrays of few and of many bytes, alone and one after the other, in ``array_of``."""
    found = {}
    for dtype in ("float32", "float64", "int64"):
        for n in LENGTHS:
            found[f"{dtype} {n}"] = x = array_of(comm.rank, n, dtype)
            comm.all_reduce(x)
        several = [array_of(comm.rank, n, dtype) for n in reversed(LENGTHS * 2)]
        for _ in sums_of(comm, several) if comm.pipelines else map(comm.all_reduce, several):
            pass
        found |= {f"{dtype} {x.size} of several {k}": x for k, x in enumerate(several)}
    return found


def array_of(rank, n, dtype):
    return (1000 * np.random.default_rng([rank, n]).standard_normal(n)).astype(dtype)


LENGTHS = [0, 1, 1000, 49_152, 100_001]


@pytest.mark.parametrize("number", [2, 3])
def test_ranks_of_which_one_is_alone_on_its_host_have_the_sums_of_threads(number, tmp_path):
    """Large arrays to the bit, which go as slices to their owners and back: MPI libraries add in other orders."""
    if reason := missing():
        pytest.skip(reason)
    with joined_hosts(number) as hosts:
        apart = run_mpi(3, sums, tmp_path, hosts=hosts)
    for rank, expected in zip(apart, distopt.run_ranks(3, sums), strict=True):
        assert rank.keys() == expected.keys()
        for name, x in expected.items():
            if x.nbytes < 3 * 65536:
                np.testing.assert_allclose(rank[name], x, rtol=1e-5, atol=1e-3, err_msg=name)
            else:
                np.testing.assert_array_equal(rank[name], x, err_msg=name)


def test_a_host_that_ends_leaves_no_process_namespace_or_folder(hosts):
    """Processes end with their host, and the host ends at an exception."""
    code, name = finish(hosts.on(1, ["hostname"]), 10)
    assert (code, name.strip()) == (0, hosts.names[1])

    made = []
    with pytest.raises(KeyError):
        leave_behind(made)
    second, job = made
    assert job.wait(10) != 0
    listed = finish(["ip", "netns", "list"], 10)[1]
    assert hosts.names[0] in listed
    assert second.names[0] not in listed
    assert second.names[1] not in listed
    assert not second.folder.exists()


def leave_behind(made):
    with joined_hosts() as hosts:
        job = subprocess.Popen(hosts.on(0, ["sh", "-c", "echo here; exec sleep 1000"]), stdout=subprocess.PIPE)
        made += [hosts, job]
        with job.stdout:
            assert job.stdout.readline() == b"here\n"
        raise KeyError
