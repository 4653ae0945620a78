"""``distopt prove``: every claim holds, and each sees a fault that is planted in what it watches."""

import json
import re
import sys
from unittest import mock

import numpy as np
import pytest

from distopt import DistOpt, compress, optim
from distopt.checkpoint import file, folder
from distopt.cli import main
from distopt.comm import LocalCommunicator, run_ranks
from distopt.comm.ledger import Ledger
from distopt.comm.logical import with_ranks
from distopt.compress import TopK
from distopt.lab.commands import prove, prove_jobs
from distopt.lab.commands.prove import CLAIMS, Trial
from distopt.lab.commands.prove_jobs import Ended
from distopt.lab.commands.prove_socket import SocketRanks, connected
from distopt.lab.laws import modes, references, runs
from distopt.optim import adam
from distopt.optim.adam import moments
from launch import finish


def over_threads(function, *arguments, over=lambda comm: comm):
    """As ``prove_jobs.over_mpi``, on two threads, of which an error ends both; values take their way through a file."""
    given, found = json.loads(json.dumps(arguments)), [None, None]

    def main(comm):
        found[comm.rank] = json.loads(json.dumps(prove_jobs.found(function, over(comm), *given)))
        if "broken" in found[comm.rank]:
            raise RuntimeError("this rank is gone")

    try:
        run_ranks(2, main)
        return Ended(0, "", found)
    except Exception as error:
        return Ended(1, repr(error), found)


def over_sockets(function, *arguments):
    """As ``prove_jobs.over_sockets``, with a connection between two threads."""
    with connected() as ends:
        over = lambda comm: SocketRanks(comm.rank, ends[comm.rank], comm.control)  # noqa: E731
        return over_threads(function, *arguments, over=over)


def killed():
    raise RuntimeError("this thread cannot be killed alone")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Arrays and repetitions of a size that takes no time; a thread is not killed, but raises."""
    monkeypatch.setattr(prove, "SIZES", (1, 2, 63, 4097))
    monkeypatch.setattr(prove, "ROUNDS", 1)
    monkeypatch.setattr(prove, "FLIPS", 40)
    monkeypatch.setattr(prove, "kill", killed)
    monkeypatch.setattr(prove, "elastic_over", str)


def propagating(opt, comm, **options):
    """A DistOpt that lets NaNs through."""
    return DistOpt(opt, comm, **options | {"nonfinite": "propagate"})


def apart(opt, comm, **options):
    """A DistOpt that exchanges nothing."""
    return DistOpt(opt, LocalCommunicator(), **options)


def of_sums(opt, comm, **options):
    """A DistOpt that takes sums over ranks for means."""
    opt.rescale_grad *= comm.size
    return DistOpt(opt, comm, **options)


def tried(name, ranks=over_threads):
    return CLAIMS[name](Trial(np.random.default_rng(0), ranks, over_sockets))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_holds(name):
    """And it starts ranks over MPI if it is one of those that are said to."""
    tasks = []

    def ranks(task, *arguments):
        tasks.append(task)
        return over_threads(task, *arguments)

    assert tried(name, ranks)
    assert bool(tasks) == (name in prove.OVER_RANKS)


def test_a_nan_in_the_last_step_is_no_fault():
    """Though the count of refused steps in a row is not 0 at the end."""

    class Largest:
        def integers(self, below):
            return below - 1

    assert "in step 5," in CLAIMS["NaN"](Trial(Largest(), over_threads, over_sockets))


@pytest.mark.thorough
@pytest.mark.parametrize("seeds", [6, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_holds_for_every_seed(name, seeds):
    """As the command takes another one each time: ranks, steps and bits are drawn from it."""
    for seed in range(seeds // 3 if name == "laws" else seeds):
        try:
            CLAIMS[name](Trial(np.random.default_rng(seed), over_threads, over_sockets))
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")


def forgets(times):
    """A ledger's ``write`` that forgets every so many-th message."""
    write, calls = Ledger.write, iter(range(10**9))
    return lambda ledger, entry: None if next(calls) % times == times - 1 else write(ledger, entry)


def later_ties(self, x, state, context, add=None):
    """Top-K of which ties go to the highest index."""
    k, itemsize = self.count(x.size), x.itemsize
    chosen = np.sort(x.size - 1 - np.argsort(-np.abs(x[::-1]), kind="stable")[:k]).astype(np.int32)
    payload = np.concatenate([x[chosen].view(np.uint8), chosen.view(np.uint8), np.zeros(-4 * k % itemsize, np.uint8)])
    x[chosen] = 0
    return payload


def keeps_too_little(compress):
    """A ``compress`` that loses the last entry that it should keep."""

    def lossy(self, x, state, context, add=None):
        payload = compress(self, x, state, context, add)
        x[np.flatnonzero(x)[-1:]] = 0
        return payload

    return lossy


def without_residuals(self, state, load=DistOpt.load_state_dict):
    """A ``load_state_dict`` that forgets what waits to be sent."""
    load(self, state | {"states": {}})


def unchecked(descriptor, at, chunks, fill=file._fill):
    """Read the data of a checkpoint; whatever their checksum is, it is equal to any."""
    fill(descriptor, at, chunks)
    return mock.ANY


def one_more(self, sizes, counts=TopK.counts):
    """Counts of a top-K that sends an entry too many."""
    return np.minimum(counts(self, sizes) + 1, sizes)


def one_byte_more(self, report=Ledger.report):
    """A ledger's report of payloads that are too large."""
    return {line: amounts | {"payload": amounts["payload"] + 1} for line, amounts in report(self).items()}


def other_ranks(comm, size):
    """As many logical ranks as processes more."""
    return with_ranks(comm, size + comm.size)


PLANTED = [  # a claim, what is replaced in what it watches, and what is said then
    ("bytes", Ledger, "write", forgets(7), r"[\d,]+ bytes of data were written to the socket, the ledger has .* wire"),
    ("bytes", Ledger, "report", one_byte_more, r"were written to the socket, the ledger has [\d,]+ of payload"),
    (
        "bytes",
        SocketRanks,
        "received_by_kernel",
        lambda *_: 5,
        r"rank \d wrote [\d,]+ bytes, the kernel of the other end counts 5",
    ),
    ("resume", DistOpt, "load_state_dict", without_residuals, r"rank 0 ended with sha256 .*, without a stop it is"),
    ("resume", DistOpt, "load", lambda *_: None, r"rank 0 went on from step 0, the last checkpoint was of step \d"),
    ("resume", prove, "kill", lambda: None, r"rank \d was killed in step \d+, and the job ended with 0"),
    (
        "processes",
        prove,
        "with_ranks",
        other_ranks,
        r"process 0 of two processes ended with sha256 .*, one alone with",
    ),
    ("top-K", TopK, "compress", later_ties, r"entries are not those of the sort, first \d+ for \d+"),
    ("top-K", TopK, "counts", one_more, r"the \d+ largest of \d+ .*: \d+ entries were sent"),
    ("optimizers", adam, "moments", lambda at, t: moments(at, t, False), r"Adam in float64 is .* from its equations"),
    ("NaN", runs, "DistOpt", propagating, r"'skip', dense, a NaN on rank \d in step \d: rank 0 refused \['0 steps'\]"),
    ("laws", runs, "DistOpt", apart, r"dense, p\d\nMismatched elements"),
    ("laws", runs, "DistOpt", of_sums, r"dense, p\d\nMismatched elements"),
    ("laws", TopK, "compress", keeps_too_little(TopK.compress), r"applied and kept, topk, p\d\n"),
    ("laws", DistOpt, "load_state_dict", without_residuals, r"(half|topk), stopped after call 3"),
    (
        "conservation",
        TopK,
        "compress",
        keeps_too_little(TopK.compress),
        r"TopK\(0.01.*\) to the bit: .* kept and",
    ),
    ("damage", file, "_fill", unchecked, r"of (all|rank-0) was flipped, and the checkpoint was loaded"),
    ("damage", folder, "_seal", lambda fields: "", r"of manifest.json was flipped, and the checkpoint was loaded"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "owner", "attribute", "fault", "text"), PLANTED)
def test_a_planted_fault_is_seen(name, owner, attribute, fault, text, monkeypatch):
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises(AssertionError, match=text):
        tried(name)


def test_every_optimizer_has_its_equations():
    assert {type(case.make()) for case in references.CASES.values()} == set(optim.ALL)


def test_every_compressor_is_one_of_those_that_conserve():
    def kinds(compressor):
        inner = getattr(compressor, "compressor", None) or getattr(compressor, "selector", None)
        return {type(compressor)} | (kinds(inner) if inner else set())

    assert set().union(*map(kinds, modes.EXACT + modes.ROUNDED)) == set(compress.ALL)


def broken(trial):
    raise AssertionError("3 bytes are missing")


def failing(trial):
    raise OSError(28, "No space\nleft on device")


def test_a_line_for_each_claim_and_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(prove, "mpi_missing", str)
    good = {"fine": lambda trial: str(trial.seed())}
    monkeypatch.setattr(prove, "CLAIMS", good | {"bytes": broken, "disk": failing})
    outputs = []
    for _ in range(2):
        assert main(["prove", "--seed", "7"]) == 1
        outputs.append(capsys.readouterr().out)
    first, fine, bytes_, disk, *unseen = outputs[0].splitlines()
    assert outputs[0] == outputs[1]
    assert first == "seed 7; the same once more: distopt prove --seed 7"
    assert re.fullmatch(r"PASS  fine          \d+", fine)
    assert bytes_ == "FAIL  bytes         3 bytes are missing"
    assert disk == "FAIL  disk          OSError: [Errno 28] No space left on device"
    assert unseen
    assert all(line.startswith("not looked at: ") for line in unseen)
    monkeypatch.setattr(prove, "CLAIMS", good)
    assert main(["prove"]) == 0


def test_a_seed_below_zero_is_refused(capsys):
    assert main(["prove", "--seed", "-1"]) == 2
    assert "--seed must be at least 0, got -1" in capsys.readouterr().err


def assert_all_hold(output):
    lines = output.splitlines()
    assert [line.split("  ")[:2] for line in lines[1:10]] == [["PASS", name] for name in CLAIMS], output
    assert all(line.startswith("not looked at: ") for line in lines[10:]), output


@pytest.mark.mpi
def test_the_command_on_mpi_processes(tmp_path):
    code, output = finish([sys.executable, "-m", "distopt", "prove"], 300, cwd=tmp_path)
    assert code == 0, output
    assert_all_hold(output)
    assert "not looked at: MPI" not in output


@pytest.mark.thorough
def test_the_command_where_there_is_no_mpi(tmp_path):
    """Ranks are processes with a connection, and a SIGKILL is a real one."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('it is not installed')")
    code, output = finish([sys.executable, "-m", "distopt", "prove"], 300, env={"PYTHONPATH": str(tmp_path)})
    assert code == 0, output
    assert_all_hold(output)
    assert re.search(
        r"not looked at: MPI \(.*not installed.*\); ranks of the lines resume, processes, NaN, laws met", output
    )
