"""What torch.profiler shows of a step, on real ranks, and what it leaves behind."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

import distopt.torch as dt  # noqa: E402
from distopt.comm import Metered, MpiCommunicator  # noqa: E402
from distopt.compress import ErrorFeedback, TopK  # noqa: E402
from launch import needs_mpi, run_mpi  # noqa: E402

pytestmark = pytest.mark.torch


def profiled(comm, path):
    """Ranges and bytes of three steps of PyTorch, and the ledger's of the same; then a step with no profiler."""
    torch.manual_seed(0)
    comm, model = Metered(comm), torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dt.synchronize(model, ErrorFeedback(TopK(0.1)), optimizer=optimizer, group=comm)
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(comm.rank))

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    own = MpiCommunicator.all_gather
    step()
    comm.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
    payload, during = comm.ledger.total()["payload"], MpiCommunicator.all_gather
    step()
    profile.export_chrome_trace(f"{path}/{comm.rank}.json")
    return {"payload": np.array(payload), "changed": np.array([during is own, MpiCommunicator.all_gather is own])}


@needs_mpi
def test_its_bytes_are_the_ledgers_and_nothing_is_left_when_it_has_stopped(tmp_path):
    for rank, found in enumerate(run_mpi(2, profiled, tmp_path, str(tmp_path))):
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        ranges = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("distopt ")]
        assert {name.split(",")[0] for name in ranges} >= {
            f"distopt {p}" for p in ("pack", "vote", "select", "exchange")
        }
        exchanged = [int(name.split()[-2]) for name in ranges if name.startswith("distopt exchange")]
        assert sum(exchanged) == found["payload"] > 0
        assert [name for name in ranges if name.startswith("distopt pack")] == [
            "distopt pack, bucket 0, 2720 bytes"
        ] * 3
        assert found["changed"].tolist() == [False, True]
