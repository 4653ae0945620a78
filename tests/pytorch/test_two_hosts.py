"""``distopt.torch.synchronize`` where ranks share hosts."""

import numpy as np
import pytest
from gloo_launch import run_torch

from distopt.comm import process_group
from distopt.compress import ErrorFeedback, Half, Int8, TopK, TwoBit

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import distopt.torch as dt  # noqa: E402

pytestmark = pytest.mark.torch
SENT = {"dense": None, "half": Half(), "int8": Int8(), "int8 with memory": ErrorFeedback(Int8())}
SENT |= {"topk": ErrorFeedback(TopK(0.1)), "2bit": ErrorFeedback(TwoBit(0.01))}
NODES = {"half": 1e-3, "int8": 0.02, "int8 with memory": 0.02}  # what is sent by nodes, and how far it is from dense


def synchronized_on_two_hosts(comm):
    """The gradients of three passes, of two ranks on each of two hosts, and the plan's last line."""
    patch = pytest.MonkeyPatch()
    patch.setattr(process_group.Board, "open", lambda *_: None)
    patch.setattr(process_group, "_machine", lambda: f"host {comm.rank // 2}")
    there, found = process_group.ProcessGroupCommunicator(), {}
    for name, compressor in SENT.items():
        for overlap in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(150, 150) for _ in range(4)))
            sync = dt.synchronize(model, compressor, group=there, threshold=20_000, overlap=overlap)
            gradients = []
            for step in range(3):
                model.zero_grad()
                x = torch.randn(8, 150, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                (model(x) ** 2).mean().backward()
                gradients += [p.grad.numpy().ravel() for p in model.parameters()]
            found[f"{name}, {overlap}"] = np.concatenate(gradients)
            found[f"{name}, {overlap}, plan"] = np.array(str(sync.plan).splitlines()[-1])
            sync.close()
    return found


def test_gradients_of_models_are_added_up_inside_of_hosts(tmp_path):
    """All ranks, and buckets that leave early, have the same bits; but for rounding they are the dense means."""
    first, *others = run_torch(4, synchronized_on_two_hosts, tmp_path)
    for name, x in first.items():
        for other in others:
            np.testing.assert_array_equal(other[name], x, name)
    for name in SENT:
        x = first[f"{name}, False"]
        np.testing.assert_array_equal(first[f"{name}, True"], x, name)
        assert ("2 nodes of 2 ranks" in str(first[f"{name}, True, plan"])) == (name in NODES)
        if name in NODES:
            assert np.linalg.norm(x - first["dense, False"]) <= NODES[name] * np.linalg.norm(x)
