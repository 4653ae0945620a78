"""The states of all ranks in what rank 0 writes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import distopt.torch as dt  # noqa: E402
from distopt import run_ranks  # noqa: E402
from distopt.compress import ErrorFeedback, TopK  # noqa: E402

pytestmark = pytest.mark.torch


def synchronized(comm):
    model = torch.nn.Linear(5, 3).double() if comm.size == 2 else torch.nn.Linear(5, 3)
    return model, dt.synchronize(model, ErrorFeedback(TopK(0.2)), group=comm)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rank_0_has_the_states_of_all_ranks(size):
    def main(comm):
        model, sync = synchronized(comm)
        x = torch.full((2, 5), comm.rank + 1.0, dtype=model.weight.dtype)
        model(x).sum().backward()
        gathered, own, mean = sync.gathered_state_dict(), sync.state_dict(), sync.full_state_dict()
        sync.load_state_dict({"states": [own["state"]] * size, "mean": None})
        return gathered, own["state"], mean["state"]

    found = run_ranks(size, main)
    gathered = found[0][0]
    torch.testing.assert_close(gathered["states"], [own for _, own, _ in found], rtol=0, atol=0)
    torch.testing.assert_close(gathered["mean"], found[0][2], rtol=0, atol=0)


def test_other_numbers_of_ranks_go_on_with_the_mean():
    def save(comm):
        model, sync = synchronized(comm)
        model(torch.full((2, 5), comm.rank + 1.0, dtype=model.weight.dtype)).sum().backward()
        return sync.gathered_state_dict()

    saved = run_ranks(3, save)[0]

    def load(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        sync = dt.synchronize(model, ErrorFeedback(TopK(0.2)), group=comm)
        sync.load_state_dict(saved)
        return sync.full_state_dict()["state"]["states"]

    for kind, arrays in run_ranks(4, load)[0].items():
        for name, a in arrays.items():
            np.testing.assert_array_equal(a, saved["mean"]["states"][kind][name])
