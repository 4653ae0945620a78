"""Sparse gradients of embeddings: means of rows, the same as dense means and as one process has them."""

import numpy as np
import pytest
from gloo_launch import run_torch

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import distopt.torch as dt  # noqa: E402
from distopt import run_ranks  # noqa: E402
from distopt.comm import Elastic, Metered, Voted  # noqa: E402
from distopt.compress import ErrorFeedback, Int8  # noqa: E402

pytestmark = pytest.mark.torch

ROWS, WIDTH = 50, 4


class Words(torch.nn.Module):
    """An embedding and a layer."""

    def __init__(self, sparse, seed=0):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse), torch.nn.Linear(WIDTH, 1)
        rng = np.random.default_rng(seed)  # torch's generator is that of all threads
        for p in self.parameters():
            p.data.copy_(torch.from_numpy(rng.standard_normal(p.shape)))

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def batch(rank, step):
    """Words of a rank, another number on each, some of them twice."""
    rng = np.random.default_rng([rank, step])
    return torch.from_numpy(rng.integers(0, ROWS, (3 + 5 * rank, 6)))


def loss_of(model, x):
    return model(x).square().mean()


def trained(comm, sparse=True, adam=False, compressor=None, idle=None, **options):
    """Four steps; ``idle``: a rank that has no batch in the third."""
    model, meter = Words(sparse, comm.rank), Metered(comm)
    sync = dt.synchronize(model, compressor, group=meter, **options)
    rest = torch.optim.SGD(model.parameters() if not adam else model.out.parameters(), lr=0.1)
    optimizers = [rest, torch.optim.SparseAdam([model.words.weight], lr=0.1)] if adam else [rest]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == 2 and comm.rank == idle:
            sync.exchange()
        else:
            loss_of(model, batch(comm.rank, step)).backward()
        layout = model.words.weight.grad.layout
        for optimizer in optimizers:
            optimizer.step()
    sync.close()
    return [p.detach().numpy().copy() for p in model.parameters()], str(layout), meter.report()


def alone(size, idle=None):
    """What one process makes of the mean of all ranks' losses."""
    model = Words(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(size):
            if (step, rank) != (2, idle):
                (loss_of(model, batch(rank, step)) / size).backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}], ids=["rows", "as dense"])
def test_ranks_train_as_one_process_does(size, options):
    found = run_ranks(size, lambda comm: trained(comm, idle=1, **options))
    for parameters, layout, _ in found:
        close(parameters, alone(size, idle=1))
        assert layout == ("torch.strided" if options else "torch.sparse_coo")
        for x, y in zip(parameters, found[0][0], strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_ledger_has_the_bytes_of_the_rows():
    for rank, (_, _, report) in enumerate(run_ranks(2, trained)):
        rows = sum(len(np.unique(batch(rank, step))) for step in range(4))
        assert report["all_gather"]["payload"] == rows * (4 + 4 * WIDTH)
        assert report["all_reduce"]["payload"] / 4 < 4 * ROWS  # each of four steps, of singles


def test_a_compressor_leaves_them_alone_and_sparse_adam_takes_them():
    found = run_ranks(2, lambda comm: trained(comm, adam=True, compressor=ErrorFeedback(Int8())))
    for x, y in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(x, y)
    exact = run_ranks(2, lambda comm: trained(comm, adam=True))
    assert abs(found[0][0][0] - exact[0][0][0]).max() < 0.05


def test_a_model_may_have_nothing_else_and_passes_may_add_up():
    def main(comm):
        model = torch.nn.EmbeddingBag(10, 2, mode="sum", sparse=True)
        sync = dt.synchronize(model, group=comm, optimizer=torch.optim.SparseAdam(list(model.parameters())))
        with sync.no_sync():
            model(torch.tensor([[comm.rank, 3]])).sum().backward()
        own = model.weight.grad.to_dense()[3, 0].item()
        model(torch.tensor([[3, 9]])).sum().backward()
        assert model.weight.grad.is_coalesced()
        return own, model.weight.grad.to_dense()[:, 0].tolist()

    assert run_ranks(2, main) == [(1.0, [0.5, 0.5, 0, 2.0, 0, 0, 0, 0, 0, 1.0])] * 2


def test_the_others_go_on_without_a_lost_rank():
    def main(comm):
        comm, member = Elastic(comm), comm.rank
        model = Words(True)
        dt.synchronize(model, group=comm)
        for step in range(3):
            if (member, step) == (1, 1):
                return None
            model.zero_grad()
            loss_of(model, batch(member, step)).backward()
        comm.leave()
        return model.words.weight.grad.to_dense().numpy()

    model = Words(False)
    for rank in (0, 2):
        (loss_of(model, batch(rank, 2)) / 2).backward()
    found = run_ranks(3, main)
    for rank in (0, 2):
        np.testing.assert_allclose(found[rank], model.words.weight.grad.numpy(), rtol=1e-5, atol=1e-7)


def both(comm):
    gathered = Voted(comm).all_gather(torch.arange(3 + comm.rank), ragged=True)
    assert [x.tolist() for x in gathered] == [[0, 1, 2], [0, 1, 2, 3]]
    state_of_rank_0(comm)
    return dict(zip("words weight bias".split(), trained(comm, adam=True)[0], strict=True))


def test_processes_of_torch_have_the_bits_of_threads(tmp_path):
    wanted = run_ranks(2, both)[0]
    for found in run_torch(2, both, tmp_path):
        for name, x in wanted.items():
            np.testing.assert_array_equal(found[name], x)


def state_of_rank_0(comm):
    """Rank 0 has trained; all go on from its optimizer's state."""
    model = Words(False, comm.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    if comm.rank == 0:
        for step in range(3):
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
    before = optimizer.state_dict()
    optimizer.load_state_dict(comm.broadcast_object(before))
    model.load_state_dict(comm.broadcast_object(model.state_dict()))
    found = optimizer.state_dict()
    assert found["param_groups"][0]["betas"] == (0.9, 0.999)
    assert set(found["state"]) == {0, 1, 2}
    if comm.rank == 0:
        for k, state in before["state"].items():
            assert all(torch.equal(x, found["state"][k][name]) for name, x in state.items())
    optimizer.zero_grad()
    loss_of(model, batch(7, 7)).backward()
    optimizer.step()
    for p in model.parameters():
        np.testing.assert_array_equal(*comm.all_gather(p.detach().numpy()))


def test_an_optimizers_state_of_rank_0_goes_to_all_ranks():
    run_ranks(2, state_of_rank_0)
