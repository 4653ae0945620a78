"""Ranks of torch's process group, which torchrun or srun starts: the checks of all communicators, steps, and ends.

Where the launcher itself says nothing, ranks have its variables, and start sooner (forks.py).
"""

import re
import socket
import sys
import textwrap

import comm_checks
import forks
import numpy as np
import pytest
from gloo_launch import run_torch

import launch
from distopt import DistOpt, Parameter, run_ranks
from distopt.comm import process_group
from distopt.compress import DeepGradientCompression, Dense, ErrorFeedback, Half, Int8, OneBit, Packed, TopK
from distopt.optim import SGD

pytestmark = pytest.mark.torch

MODES = {
    "dense": (Dense(), "auto"),
    "half": (Half(), "auto"),
    "gather": (ErrorFeedback(Packed(TopK(0.05))), "gather"),
    "two phases": (ErrorFeedback(TopK(0.05)), "two_phase"),
    "one bit": (ErrorFeedback(OneBit()), "two_phase"),
    "int8": (ErrorFeedback(Int8()), "two_phase"),
    "nodes": (ErrorFeedback(TopK(0.05)), "nodes"),
    "dgc": (DeepGradientCompression(TopK(0.05)), "two_phase"),
}


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_group_communicators_pass_all_checks(size, tmp_path):
    run_torch(size, comm_checks.everything, tmp_path)


def as_between_hosts(comm):
    """All checks on ranks that share nothing."""
    patch = pytest.MonkeyPatch()
    patch.setattr(process_group.Board, "open", lambda *_: [])
    patch.setattr(process_group, "_machine", lambda: f"host {comm.rank}")
    there = process_group.ProcessGroupCommunicator()
    assert there.spans_hosts or there.size == 1
    comm_checks.everything(there)
    wanted = trained(comm)
    for name, x in trained(there).items():
        if not name.startswith("nodes"):  # there are others
            np.testing.assert_array_equal(x, wanted[name], name)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_group_communicators_between_hosts_pass_all_checks(size, tmp_path):
    run_torch(size, as_between_hosts, tmp_path)


def trained(comm):
    """The parameters after some steps of each mode."""
    found = {}
    for name, (compressor, exchange) in MODES.items():
        params = [Parameter("w", np.zeros((300, 40), np.float32)), Parameter("b", np.zeros(40, np.float32))]
        opt = DistOpt(SGD(0.1), comm)
        for step in range(3):
            rng = np.random.default_rng([comm.rank, step])
            opt.step([(p, rng.standard_normal(p.data.shape, np.float32)) for p in params], compressor, True, exchange)
        found |= {f"{name} {p.name}": p.data for p in params}
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_steps_have_the_bits_of_threads(size, tmp_path):
    for one, other in zip(run_torch(size, trained, tmp_path), run_ranks(size, trained), strict=True):
        for name, x in other.items():
            np.testing.assert_array_equal(one[name], x, name)


# ----------------------------------------------------------------------------------------------------- whole scripts

HEAD = """
import os, signal, sys, time
import numpy as np, distopt
p, opt = distopt.Parameter("w", np.zeros(1000, np.float32)), distopt.DistOpt(distopt.optim.SGD(1.0))
rank = opt.global_rank

def step(g=1.0):
    gradient = np.full(1000, g, np.float32)
    gradient[-1] += rank  # ranks with the same gradients would be told so
    opt.step([(p, gradient)])

for _ in range(3):
    step()
"""


# nothing is shared: votes and data are messages of gloo
AS_BETWEEN_HOSTS = """
import os
import distopt.comm.board, distopt.comm.process_group
distopt.comm.board.Board.open = lambda *_: []
distopt.comm.process_group._machine = lambda: os.environ["RANK"]
"""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SLOW_TORCHRUN = (*TORCHRUN[:-1], "--monitor-interval", "2", TORCHRUN[-1])  # seconds until it ends all others


@pytest.fixture
def run(tmp_path):
    """Start a script on ranks that have the variables of torchrun, or by a launcher; (exit code, output)."""

    def run(text, ranks=2, head=HEAD, launcher=(), variables=None, **environment):
        script = tmp_path / "script.py"
        script.write_text(head + textwrap.dedent(text))
        if launcher:
            command = [*launcher, str(ranks), str(script)]
            return launch.finish(command, 90, cwd=tmp_path, env=forks.ONE_THREAD | environment)
        return forks.run(variables or forks.torchruns(), ranks, [script], 90, tmp_path, environment)

    return run


def test_world_says_that_torchrun_started_the_ranks(run):
    code, output = run("print(distopt.world())\nassert p.data[0] == -3", launcher=TORCHRUN)
    assert code == 0, output
    for rank in range(2):
        who = f"<ProcessGroupCommunicator, rank {rank} of 2, numpy: the script has not imported cupy; "
        said = who + f"torch [^;]+, gloo; torchrun set RANK={rank}, WORLD"
        assert re.search(said, output), output
    assert output.count("one host, memory shared") == 2


@pytest.mark.parametrize(
    ("end", "text"),
    [
        pytest.param("raise KeyError('broken here')", "KeyError: 'broken here'", marks=pytest.mark.full),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"PeerLeft: rank 1 has ended, before (the start of )?step 4"),
        ("sys.exit(0)", r"PeerLeft: rank 1 left after step 3, before (the start of )?step 4"),
        pytest.param(
            "import torch.distributed as d; d.destroy_process_group(); step()",
            "process group of torch.distributed was",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.parametrize(
    ("head", "launcher"), [(HEAD, SLOW_TORCHRUN), (AS_BETWEEN_HOSTS + HEAD, ())], ids=["one host", "as between hosts"]
)
def test_a_rank_that_ends_is_named_and_nobody_waits(head, launcher, end, text, run):
    script = f"if rank == 1:\n    {end}\nstep()\nprint('went on')"
    code, output = run(script, ranks=3, head=head, launcher=launcher)
    assert code != 0
    assert re.search(text, output), output
    assert "went on" not in output


def test_a_rank_that_waits_for_too_long_says_where(run):
    code, output = run("if rank == 1: time.sleep(600)\nstep()", DISTOPT_TIMEOUT="5")
    assert code != 0
    assert "distopt: rank 0 waits since" in output
    assert "for the vote on step 4" in output


def test_ranks_that_end_together_say_nothing(run):
    code, output = run("")
    assert (code, output) == (0, "")


def test_an_error_of_one_rank_is_raised_by_all_and_training_goes_on(run):
    code, output = run(
        """
        try:
            step(np.nan if rank else 1.0)
        except FloatingPointError as error:
            print("caught", error)
        step()
        assert p.data[0] == -4
        """
    )
    assert code == 0, output
    assert output.count("gradients of step 4 are not finite: rank 1: w") == 2, output


def test_a_process_group_of_ones_own_is_used(run):
    head = """
import torch.distributed as dist, numpy as np, distopt
dist.init_process_group("gloo")
"""
    code, output = run("print(distopt.world().size)\ndist.destroy_process_group()", head=head)
    assert (code, "".join(output.split())) == (0, "22"), output  # lines of ranks may mix


def test_a_process_group_that_all_have_destroyed_is_named(run):
    end = """
        import torch.distributed as dist
        dist.destroy_process_group()
        try:
            step()
        except RuntimeError as error:
            print(error)
        """
    code, output = run(end)
    assert code == 0, output
    assert output.count("the process group of torch.distributed was destroyed, and ranks cannot exchange") == 2, output


def test_one_process_of_torchrun_is_one_rank_alone(run):
    code, output = run("print(distopt.world())", ranks=1, launcher=TORCHRUN)
    assert code == 0, output
    assert "<LocalCommunicator, rank 0 of 1, numpy: torchrun started one process; " in output


def test_forked_children_are_no_ranks(run):
    """A child that ends, and workers that load data; the ranks go on."""
    code, output = run(
        """
        child = os.fork()
        if child == 0:
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        from torch.utils.data import DataLoader
        for batch in DataLoader(range(6), 2, num_workers=1, multiprocessing_context="fork"):
            step(float(batch.sum()))
        assert p.data[0] == -3 - 15
        """
    )
    assert (code, output) == (0, "")


# -------------------------------------------------------------------------------------------------- srun without PMI

LISTENS = """
def listens():
    \"\"\"The addresses, in hexadecimal, on which this process listens.\"\"\"
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(file) for file in files if os.path.lexists(file)}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/self/net/{kind}")]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}
"""


def test_ranks_of_srun_without_pmi_meet_on_the_loopback_interface(run):
    text = """
        print(f"{distopt.world()} {distopt.world('cpu').size}\\n", end="", flush=True)
        assert p.data[0] == -3
        assert listens() == {"0100007F"}, listens()
        """
    code, output = run(text, 3, head=HEAD + LISTENS, variables=forks.sruns())
    assert code == 0, output
    for rank in range(3):
        assert f"<ProcessGroupCommunicator, rank {rank} of 3, numpy: the script has not imported cupy; " in output
    assert output.count("gloo; srun without PMI set SLURM_STEP_NUM_TASKS=3; one host, memory shared> 3") == 3, output


OWN = {
    "of its own store": (
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[0]}.store', rank=rank, world_size=2)"
    ),
    "from variables": (
        "os.environ |= {'RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': sys.argv[1]}\n"
        "dist.init_process_group('gloo')"
    ),
}


@pytest.mark.parametrize("how", OWN)
def test_a_process_group_of_ones_own_is_used_in_a_step(how, run):
    head = f"""
import os, sys
import torch.distributed as dist, numpy as np, distopt
sys.argv[1:] = ["{forks.free_port()}"]
rank = int(os.environ["SLURM_PROCID"])
{OWN[how]}
own = dist.group.WORLD
"""
    text = """
        x = np.ones(4, np.float32)
        distopt.world().all_reduce(x)
        assert x[0] == 2 and dist.group.WORLD is own
        dist.destroy_process_group()
        """
    assert run(text, head=head, variables=forks.sruns()) == (0, "")


def test_variables_of_a_batch_script_are_taken_in_a_step(run):
    """As many scripts for torch export them; RANK is the rank of Slurm's task."""
    head = "import os; os.environ['RANK'] = os.environ['SLURM_PROCID']\n" + HEAD
    exported = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forks.free_port())}
    assert run("assert p.data[0] == -3 and opt.world_size == 2", head=head, variables=forks.sruns(), **exported) == (
        0,
        "",
    )


def test_a_rank_that_fails_in_a_step_is_named(run):
    code, output = run("if rank == 1: 1 / 0\nstep()\nprint('went on')", variables=forks.sruns())
    assert code != 0
    assert "ZeroDivisionError" in output
    assert "went on" not in output


def test_a_rank_that_never_comes_is_not_waited_for_without_limit(run):
    head = "import os, time\nif os.environ['SLURM_PROCID'] == '0': time.sleep(60)\n" + HEAD
    code, output = run("", head=head, variables=forks.sruns(), DISTOPT_TIMEOUT="4")
    assert code == 75, output
    assert "rank 1 waits since" in output
    assert "the first meeting of a communicator's ranks" in output


def test_a_port_that_is_taken_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        code, output = run("", variables=forks.sruns(), MASTER_PORT=port)
    assert code != 0
    assert f"rank 0 of a Slurm step: ranks cannot meet at 127.0.0.1, port {port} (" in output
    assert "export MASTER_ADDR and MASTER_PORT before srun" in output


def test_a_step_without_torch_says_what_to_do(run):
    head = "import sys; sys.modules['torch'] = None; sys.modules['mpi4py'] = None\n" + HEAD
    code, output = run("", head=head, variables=forks.sruns())
    assert code != 0
    assert "pip install 'distopt[mpi]', or 'distopt[torch]', with which ranks of torchrun or srun" in output


@pytest.mark.mpi
def test_a_step_without_torch_that_mpi_cannot_serve_is_refused(run):
    code, output = run("", head="import sys; sys.modules['torch'] = None\n" + HEAD, variables=forks.sruns())
    assert code != 0
    assert "(srun without PMI set SLURM_STEP_NUM_TASKS=2), but the MPI library of mpi4py, " in output
    assert "and every process would train alone. Start with: srun --mpi=pm" in output


def test_ranks_of_torchrun_in_a_step_are_torchruns(run, tmp_path):
    """Each task of the step is a torchrun, as one on each node."""
    (tmp_path / "inner.py").write_text(HEAD + "print(distopt.world())\nassert p.data[0] == -3")
    inner = [*TORCHRUN, "2", str(tmp_path / "inner.py")]
    code, output = run(f"import subprocess\nsubprocess.run({inner}, check=True)", head="", variables=forks.sruns())
    assert code == 0, output
    assert output.count("gloo; torchrun set RANK=") == 4, output


MODEL = """
import sys, time
import torch, distopt.torch as dt
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
sync = dt.synchronize(model)
rank = sync.communicator.rank

def backward():
    model(torch.ones(1, 3)).sum().backward()

backward()
"""


def test_a_rank_that_skips_a_backward_pass_and_ends_is_named(run):
    code, output = run("for k in range(2 - rank):\n    backward()\nprint(sync.step_counter)", head=MODEL)
    assert code != 0
    assert "PeerLeft: rank 1 left after step 2, before step 3" in output, output


def test_a_rank_that_skips_a_backward_pass_and_waits_elsewhere_is_named(run):
    end = "if rank == 0: backward()\ntorch.distributed.barrier()"
    code, output = run(end, head=MODEL, DISTOPT_TIMEOUT="4")
    assert code != 0
    assert "distopt: rank 0 waits since" in output, output
    assert "for the vote on step 2" in output


def test_an_exception_in_a_backward_pass_that_nobody_catches_ends_all(run):
    end = """
        class Fails(torch.autograd.Function):
            forward = staticmethod(lambda ctx, x: x.clone())
            backward = staticmethod(lambda ctx, gradient: {}["lost"])
        y = model(torch.ones(1, 3))
        (Fails.apply(y) if rank == 1 else y).sum().backward()
        """
    code, output = run(end, head=MODEL)
    assert code != 0
    assert "KeyError: 'lost'" in output
