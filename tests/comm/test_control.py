"""Votes on real MPI ranks, and the end of a job when one rank fails."""

import json
import sys

import numpy as np
import pytest

from distopt import DistOpt, Parameter
from distopt.comm import MpiCommunicator
from distopt.comm.control import PeerLeft, fingerprint
from distopt.optim import SGD
from launch import distopt_run, find_launcher, finish, run_mpi
from tiers import in_turn

pytestmark = pytest.mark.mpi


def all_errors(comm):
    """Bad input of every kind on one rank or between ranks; returns each error's text."""

    def differ(opt, params):
        opt([(p, p.data) for p in (params[::-1] if comm.rank == 1 else params)])

    def shapes(opt, params):
        opt([(Parameter("a", np.ones(3 + comm.rank)), np.ones(3 + comm.rank))])

    def dtypes(opt, params):
        dtype = "float64" if comm.rank else "float32"  # the same bytes: half as many elements
        a = np.ones(4 if comm.rank else 8, dtype)
        opt([(Parameter("a", a), a)])

    def nan(opt, params):
        opt([(p, np.full(p.data.shape, np.nan if comm.rank == 1 else 1, p.data.dtype)) for p in params])

    def halfway(opt, params):
        def generator():
            yield params[0], params[0].data
            if comm.rank == 1:
                raise OSError("disk gone")
            yield from ((p, p.data) for p in params[1:])

        opt(generator())

    def missing(opt, params):
        opt([(p, p.data) for p in params])
        opt([(p, p.data) for p in (params[1:] if comm.rank == 1 else params)])

    def verbs(opt, params):
        x = np.ones(3)
        opt.broadcast([x]) if comm.rank else opt.all_reduce(x)

    texts = []
    for fault in (differ, shapes, dtypes, nan, halfway, missing, verbs):
        params = [Parameter("a", np.ones(3, "f4")), Parameter("b", np.ones(2, "f4"))]
        try:
            fault(DistOpt(communicator=comm), params)
        except Exception as error:
            texts.append(f"{fault.__name__}: {type(error).__name__}: {error}")
    return {"texts": np.array(json.dumps(texts))}


@pytest.mark.parametrize("size", [2, 3])
def test_every_difference_is_the_same_error_on_every_process(size, tmp_path):
    found = run_mpi(size, all_errors, tmp_path)
    assert len({str(r["texts"]) for r in found}) == 1
    differ = "ValueError: ranks differ:"
    assert json.loads(str(found[0]["texts"])) == [
        f"differ: {differ} rank 0 has parameter 0 = a (3,) float32, rank 1 has parameter 0 = b (2,) float32",
        f"shapes: {differ} rank 0 has parameter 0 = a (3,) float64, rank 1 has parameter 0 = a (4,) float64",
        f"dtypes: {differ} rank 0 has parameter 0 = a (8,) float32, rank 1 has parameter 0 = a (4,) float64",
        "nan: FloatingPointError: gradients of step 1 are not finite: rank 1: a (3 of 3 entries), b (2 of 2 entries)",
        "halfway: RuntimeError: rank 1: OSError: disk gone",
        "missing: ValueError: rank 1: no gradient for a; allow_missing=True would take zeros",
        f"verbs: {differ} rank 0 has all_reduce, rank 1 has broadcast",
    ]


FAULTY = """
import atexit, os, sys, threading
import numpy as np
import distopt

fault, culprit = sys.argv[1], int(sys.argv[2])
opt = distopt.DistOpt()
p = distopt.Parameter("p", np.ones(4))
for k in range(10):
    opt([(p, np.ones(4))])
    if k == 6 and opt.global_rank == culprit:
        if fault == "raise":
            raise ZeroDivisionError("boom")
        if fault == "thread":
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
        if fault == "fork" and os.fork() == 0:
            atexit._run_exitfuncs()  # a child runs them, but must not finalize MPI
            os._exit(0)
        if fault == "thread exit":
            thread = threading.Thread(target=sys.exit)
            thread.start()
            thread.join()
        if fault == "exit":
            sys.exit(3)
        if fault == "leave":
            sys.exit(0)
        if fault == "nan":
            p.data[0] = 1
            opt([(p, np.full(4, np.nan))])
    elif k == 6 and fault == "nan":
        opt([(p, np.ones(4))])
print("rank", opt.global_rank, "is done")
"""


@pytest.fixture
def faulty(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    return script


FAULTS = {  # the exit code, and what is said
    "none": (0, "is done"),
    "raise": (1, "ZeroDivisionError: boom"),
    "leave": (1, "PeerLeft: rank {} left after step 7, before step 8"),
    "thread": (1, "ZeroDivisionError: division by zero"),
    "exit": (3, None),
    "nan": (1, "FloatingPointError: gradients of step 8 are not finite: rank {}: p (4 of 4 entries)"),
    "fork": (0, "is done"),  # a child is no rank: its end is nobody's leaving
    "thread exit": (0, "is done"),
}


@pytest.mark.parametrize(("fault", "where"), in_turn(FAULTS, ((2, 1), (2, 0), (4, 1))))
def test_a_failing_rank_under_distopt_run_ends_the_job_with_its_exit_code(faulty, fault, where):
    """The script's exit code, one traceback, and nobody waits."""
    (size, culprit), (code, text) = where, FAULTS[fault]
    found, output = distopt_run(size, faulty, fault, culprit, timeout=20)
    assert found == code, output
    assert text is None or output.count("Traceback") == int(code == 1), output
    assert text is None or text.format(culprit) in output, output
    assert ("is done" in output) == (code == 0), output


@pytest.mark.parametrize(("fault", "code"), [("none", 0), ("raise", 1), ("leave", 1), ("exit", None)])
def test_a_failing_rank_under_plain_mpirun_ends_the_job(faulty, fault, code):
    launcher = find_launcher()
    command = [*launcher.command(2), sys.executable, str(faulty), fault, "1"]
    found, output = finish(command, 20, env=launcher.environment(2))
    assert found == code if code is not None else found != 0, output


def groups(comm):
    """Two groups of ranks train apart from each other, on communicators of their own, and one group loses a rank."""
    from mpi4py import MPI

    part = MpiCommunicator(MPI.COMM_WORLD.Split(comm.rank // 2))
    opt, p = DistOpt(SGD(1.0), part), Parameter("p", np.zeros(2))
    opt([(p, np.full(2, float(comm.rank)))])
    if comm.rank == 3:
        return {"value": p.data}
    texts = [""]
    try:
        opt([(p, np.zeros(2))])
    except PeerLeft as error:
        texts = [str(error)]
    extra = MpiCommunicator(MPI.COMM_SELF)
    extra.all_reduce(np.ones(2))
    extra.close()
    return {"value": p.data, "texts": np.array(texts)}


def test_split_communicators_train_apart_and_name_ranks_that_left(tmp_path):
    found = run_mpi(4, groups, tmp_path, timeout=20)
    assert [r["value"][0] for r in found] == [-0.5, -0.5, -2.5, -2.5]
    assert [str(r["texts"][0]) for r in found[:3]] == ["", "", "rank 1 left after step 1, before step 2"]


def left_alone(comm):
    """A rank that catches PeerLeft can go on without the others; a second vote raises at once."""
    if comm.rank == 1:
        return {}
    opt = DistOpt(communicator=comm)
    texts = []
    for _ in range(2):
        try:
            opt([(Parameter("p", np.ones(2)), np.ones(2))])
        except RuntimeError as error:
            texts.append(str(error))
    return {"texts": np.array(texts)}


def test_a_survivor_may_go_on(tmp_path):
    found = run_mpi(3, left_alone, tmp_path, timeout=20)
    assert found[0]["texts"].tolist() == ["rank 1 left after the start, before step 1"] * 2


def test_fingerprints_differ_for_different_texts():
    assert fingerprint(["a", "b"]) != fingerprint(["a", "c"])
    assert fingerprint(["a", "b"]) == fingerprint(iter(["a", "b"]))
    assert 0 <= fingerprint([]) < 2**63
