"""``distopt.torch.synchronize`` goes on without lost ranks: threads that end at any instant, and killed processes."""

import re
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

import forks  # noqa: E402

import distopt.torch as dt  # noqa: E402
from distopt.comm import Elastic, ThreadCommunicator  # noqa: E402
from distopt.comm.joiner import Joiner  # noqa: E402
from distopt.resilience.environment import WANTED  # noqa: E402
from faults import losses  # noqa: E402
from laws.fate import instants, present_fates  # noqa: E402
from laws.lost import SYNCHRONIZED, Judge, run  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def fate(request, monkeypatch):
    """Return a function that makes a fate the present one; ranks share memory as the mode wants."""
    if not SYNCHRONIZED[request.getfixturevalue("mode")][3]:
        monkeypatch.setattr(ThreadCommunicator, "peers", lambda self, x: None)
    return present_fates(monkeypatch)


@pytest.mark.parametrize("mode", SYNCHRONIZED)
def test_survivors_have_the_bits_of_fewer_ranks(mode, fate):
    """Three instants of each mode; the slow tier has all of them."""
    judge, rng = Judge(mode, fate, run), np.random.default_rng(zlib.crc32(mode.encode()))
    counts = instants(mode, fate, 3)
    for seed in range(3):
        victim = int(rng.integers(2))
        judge.judge(seed=seed, **{f"rank{victim}": (int(rng.integers(1, counts[victim] + 1)), bool(rng.integers(2)))})


@pytest.mark.slow  # three minutes; the thorough tier has every instant of the modes without torch
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", SYNCHRONIZED)
def test_survivors_have_the_bits_of_fewer_ranks_whenever_one_ends(mode, victim, fate):
    judge = Judge(mode, fate, run)
    for at in range(1, instants(mode, fate, 3)[victim] + 1):
        for after in (False, True):
            judge.judge(seed=at, **{f"rank{victim}": (at, after)})


@pytest.mark.parametrize(
    "mode",
    [
        "synchronized, top-K",
        "synchronized, overlap",
        *(pytest.param(f"synchronized{more}", marks=pytest.mark.full) for more in ("", ", dgc", ", three passes")),
    ],
)
def test_killed_ranks_are_done_without(mode, tmp_path):
    assert len(losses.one(mode, "torch", 3, 1, 1, tmp_path)) == 1


SCRIPT = """
import os, signal, torch
import distopt.torch as dt
from distopt.compress import ErrorFeedback, TopK

member = int(os.environ["DISTOPT_MEMBER"])
torch.manual_seed(member)
layers = torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.ReLU(), torch.nn.Linear(50, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 500, 0.9)
sync = dt.synchronize(model, ErrorFeedback(TopK(0.1)), optimizer=optimizer)
last = None


def resized(rank, size):
    global last
    if size == 3:
        last = sync.step_counter + 10


sync.on_resize(resized)
extra = sync.rejoin(extra=lambda: {"schedule": schedule.state_dict()})
if extra:
    schedule.load_state_dict(extra["schedule"])
    last = sync.step_counter + 10
    print("came with", int(layers[1].num_batches_tracked) - sync.step_counter, len(optimizer.state), "states")
while sync.step_counter != last:
    if member == 0 and sync.step_counter == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 20)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    schedule.step()
bits = [p.detach().double().sum().item().hex() for p in model.parameters()]
print("end", schedule.get_last_lr()[0].hex(), *bits)
"""


def test_a_process_takes_the_place_of_rank_0(tmp_path):
    """It has the model, its buffers, the optimizer's state and the schedule's, and goes on as the others."""
    (tmp_path / "script.py").write_text(SCRIPT)
    options = "--elastic", "--over", "torch", "--restarts", "1"
    code, output = forks.distopt_run(3, *options, tmp_path / "script.py", timeout=240)
    assert code == 0, output
    ends = re.findall(r"^\[\d+\] end (.*)$", output, re.M)
    assert len(ends) == 3, output
    assert len(set(ends)) == 1, output
    assert "came with 1 6 states" in output  # the others were in the middle of a step


def test_rejoin_wants_the_optimizer():
    with pytest.raises(ValueError, match="optimizer must be the script's for rejoin, got None"):
        dt.synchronize(torch.nn.Linear(3, 2)).rejoin()


@pytest.fixture
def group():
    """A default process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_groups_of_torch_are_refused_where_ranks_may_be_lost(group, monkeypatch):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    monkeypatch.setenv(WANTED, "1")
    with pytest.raises(RuntimeError, match=r"got a DistributedDataParallel .* use distopt.torch.synchronize\(model\)"):
        dt.compress(ddp)
    with pytest.raises(RuntimeError, match=r"group must be None under distopt run --elastic"):
        dt.synchronize(torch.nn.Linear(3, 2), group=group)


LOCAL = """
import os, signal, torch
import distopt.torch as dt

member = int(os.environ["DISTOPT_MEMBER"])
torch.manual_seed(member)
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
windows = dt.local_steps(model, optimizer, every=4)
for step in range(24):
    if member == 0 and step == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 20)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
bits = [p.double().sum().item().hex() for p in windows.global_parameters.values()]
print("end", windows.communicator.size, windows.step_counter, *bits)
"""


def test_local_steps_go_on_without_rank_0(tmp_path):
    (tmp_path / "script.py").write_text(LOCAL)
    options = "--elastic", "--over", "torch"
    code, output = forks.distopt_run(3, *options, tmp_path / "script.py", timeout=240)
    assert code == 0, output
    ends = re.findall(r"^\[\d+\] end (2 24 .*)$", output, re.M)
    assert len(ends) == 2, output
    assert len(set(ends)) == 1, output


def test_local_steps_take_nobody_in():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outside = Elastic(Joiner(lambda text: pytest.fail("nobody is asked"), True))
    with pytest.raises(RuntimeError, match="local steps must begin on all ranks together"):
        dt.local_steps(model, optimizer, every=2, group=outside)
