"""Scripts under ``distopt run --elastic`` do what the guide promises: real processes, over torch and over Open MPI.

Who waits for ever is ended by the time limit, and the job with another exit code.
"""

import re

import forks
import pytest
from test_losses import lacks_open_mpi

from launch import distopt_run

HEAD = """
import os, signal, sys, time
import numpy as np
import distopt
from distopt.optim import SGD

world = distopt.world()
me = world.rank


def die():
    os.kill(os.getpid(), signal.SIGKILL)


"""
OVER_BOTH = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("mpi", marks=pytest.mark.faults)]


@pytest.fixture(params=OVER_BOTH)
def run(request, tmp_path):
    """Run a script; (exit code, output, what the launcher has said)."""
    over, start = request.param, distopt_run
    if over == "torch":
        pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
        start = forks.distopt_run
    elif lack := lacks_open_mpi():
        pytest.skip(lack)

    def run(text, *options, ranks=3, limit=60):
        script, env = tmp_path / "script.py", {"DISTOPT_TIMEOUT": str(limit), "OMP_NUM_THREADS": "1"}
        script.write_text(HEAD + text)
        command = ["--elastic", "--over", over, *options, script]
        code, output = start(ranks, *command, timeout=240, env=env)
        return code, output, re.findall(r"^distopt run: (.*)$", output, re.M)

    return run


# ------------------------------------------------------------------------------------------- ends of scripts

COLLECTIVES = [
    "world.all_reduce(np.ones(3))",
    "world.all_gather(np.ones(3))",
    "world.broadcast(np.ones(3))",
    "world.barrier()",
    "world.separate().barrier()",
]


def test_a_rank_that_has_left_is_not_waited_for_in_a_collective(run):
    """One leaves before each of them."""
    ends = [f"if me == {k + 1}: sys.exit()\n{collective}\n" for k, collective in enumerate(COLLECTIVES)]
    sums = "x = np.ones(1); world.all_reduce(x); print('went on, a sum of', x.item())\n"
    ranks = len(ends) + 2
    code, output, said = run(sums + "".join(end + sums for end in ends), ranks=ranks)
    found = [output.count(f"went on, a sum of {n}.0") for n in range(ranks, 1, -1)]
    assert (code, found) == (0, list(range(ranks, 1, -1))), output
    assert not any("for too long" in line for line in said), output


def test_a_rank_that_has_left_is_not_waited_for_by_local_steps_in_flight(run):
    """Which exchange on a communicator of their own; one leaves before the first exchange, two while one travels."""
    code, output, said = run(
        "p = distopt.Parameter('p', np.zeros(100, np.float32))\n"
        "opt = distopt.LocalSteps(SGD(0.1), every=4, fragments=2, delay=2)\n"
        "for k in range(24):\n"
        "    opt([(p, np.ones(100, np.float32))])\n"
        "    if (me, k) in ((1, 1), (2, 6), (3, 11)): sys.exit()\n"
        "print('done among', world.size)",
        ranks=5,
    )
    assert (code, output.count("done among 2")) == (0, 2), output
    assert not any("for too long" in line for line in said), output


def test_a_rank_that_has_left_waits_for_longer_than_the_time_limit(run):
    code, output, _ = run(
        "world.barrier()\nif me == 0:\n    for _ in range(16): time.sleep(1)\n    print('evaluated')", limit=10
    )
    assert (code, output.count("evaluated")) == (0, 1), output
    assert "too long" not in output


# ------------------------------------------------------------------------------------------- local steps in flight

IN_FLIGHT = """
folder = os.path.join(os.path.dirname(__file__), "saved")
params = [distopt.Parameter(name, np.zeros(100, np.float32)) for name in "pq"]
opt = distopt.LocalSteps(SGD(0.1), every={every}, fragments=2, delay={delay})


def step():
    opt([(p, np.full(100, 1.0 + me, np.float32)) for p in params])


"""


def test_local_steps_in_flight_are_saved_and_loaded(run):
    """Each after a step at which a fragment travels."""
    code, output, _ = run(
        IN_FLIGHT.format(every=4, delay=2) + "for k in range(33):\n"
        "    step()\n"
        "    if k == 8: opt.save_when_stopped(folder, params)\n"
        "    if k in (4, 12): opt.save(folder, params)\n"
        "    if k == 16: state = opt.state_dict()\n"
        "    if k == 20: opt.load_state_dict(state)\n"
        "    if k in (24, 28): opt.load(folder, params)\n"
        "print('saved at', opt.step_counter)"
    )
    assert (code, output.count("saved at 17")) == (0, 3), output


@pytest.mark.parametrize("early", [0.0, 1.0], ids=["while it is written", "before"])
def test_a_rank_may_be_killed_while_local_steps_in_flight_are_saved(run, early):
    """Where it is before, the others wait for it in the exchange that has to end before the checkpoint is written."""
    code, output, _ = run(
        IN_FLIGHT.format(every=2, delay=1) + "for k in range(20):\n"
        f"    if me == 2 and k == 9 and {early}: time.sleep({early}); die()\n"
        "    step()\n"
        "    opt.save(folder, params, extra=lambda: die() if me == 2 and k == 9 else {})\n"
        "opt.load(folder, params)\n"
        "print('done among', world.size, 'at', opt.step_counter)"
    )
    assert (code, output.count("done among 2 at 20")) == (0, 2), output
    assert re.search(r"lost rank 2 of 3 at (exchange \d|writing a checkpoint)", output), output


# ------------------------------------------------------------------------------------------- time limits


def test_the_limit_holds_on_a_communicator_beside_others_of_the_same_ranks(run):
    code, output, said = run(
        "others = world.separate(), world.duplicate(), world.subgroup([range(world.size)])\n"
        "p = distopt.Parameter('p', np.zeros(100, np.float32))\n"
        "opt = distopt.LocalSteps(SGD(0.1), every=2, delay=1)\n"
        "for k in range(8): opt([(p, np.ones(100, np.float32))])\n"
        "for k in range(30):\n"
        "    if me == 0 and k == 20: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    world.all_reduce(np.ones(1))\n"
        "print('done among', world.size)",
        limit=15,
    )
    assert (code, output.count("done among 2")) == (0, 2), output
    assert any(re.match("rank 0 was ended .*, as ranks 1, 2 wait for too long", line) for line in said), output


# ------------------------------------------------------------------------------------------- processes that come


def test_a_process_that_does_more_than_the_others_ends_alone(run):
    code, output, said = run(
        "p, sizes = distopt.Parameter('p', np.zeros(10, np.float32)), []\n"
        "opt = distopt.DistOpt(SGD(0.1))\n"
        "opt.on_resize(lambda rank, size: sizes.append(size))\n"
        "came = world.outside\n"
        "opt.rejoin([p])\n"
        "if came: opt.gradient_views([p])\n"
        "while sizes != [2, 3, 2]:\n"
        "    opt([(p, np.ones(10, np.float32))])\n"
        "    if me == 1 and opt.step_counter == 20: die()\n"
        "    time.sleep(0.01)\n"
        "print('done among', world.size)",
        *("--restarts", "1"),
    )
    assert (code, output.count("done among 2")) == (0, 2), output
    assert "ValueError: ranks differ: rank 0 has a step with Dense(), rank 2 has gradient_views; " in output
    assert any(line.startswith("rank 3 ended by exit code 1 after gradient_views; ") for line in said), output


def test_a_job_that_is_done_does_not_fail_because_a_process_comes_too_late(run):
    code, output, said = run(
        "p = distopt.Parameter('p', np.zeros(10, np.float32))\n"
        "opt = distopt.DistOpt(SGD(0.1))\n"
        "opt.gradient_views([p])  # a vote, which a process that comes has alone\n"
        "if world.outside: time.sleep(600)\n"
        "opt.rejoin([p])\n"
        "while opt.step_counter < 40:\n"
        "    opt([(p, np.ones(10, np.float32))])\n"
        "    if me == 1 and opt.step_counter == 38: die()\n"
        "    if opt.step_counter == 39: time.sleep(1)\n"
        "print('all steps')",
        *("--restarts", "3"),
    )
    assert (code, output.count("all steps")) == (0, 2), output
    assert "rank 3 is started in the place of rank 1" in said
