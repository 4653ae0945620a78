"""The benchmark beside DistributedDataParallel: its cases compute the same steps, and all of them run."""

import numpy as np
import pytest
from gloo_launch import run_torch

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
from benchmarks import torch_ddp  # noqa: E402
from benchmarks.torch_models import loss_on_random_images, resnet18, small_cnn  # noqa: E402

pytestmark = pytest.mark.torch

IMAGES = 8, 1, 8, 8


def parameters_after(make, rank, *rule):
    """The parameters of a small CNN after three steps of a case, which has not seen it before."""
    torch.manual_seed(0)
    model = small_cnn()
    step = make(model, loss_on_random_images(IMAGES, rank), *rule)
    for _ in range(3):
        step()
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def all_cases(comm):
    found = {}
    for rule in torch_ddp.RULES:
        found |= {f"{rule} {name}": parameters_after(make, comm.rank, rule) for name, make in torch_ddp.CASES.items()}
    for family in torch_ddp.between_hosts():
        found |= {name: parameters_after(make, comm.rank) for name, make in family.items()}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_torch(2, all_cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("rule", torch_ddp.RULES)
def test_all_cases_of_a_table_make_the_steps_of_the_anchor(ranks, rule):
    wanted = ranks[0][f"{rule} {torch_ddp.DDP}"]
    differs = (
        {torch_ddp.FUSED, torch_ddp.SHARED} if rule == "AdamW" else set()
    )  # its epsilon is added before the bias correction
    for rank in ranks:
        for name in torch_ddp.CASES.keys() - {torch_ddp.ALONE} - differs:
            np.testing.assert_allclose(rank[f"{rule} {name}"], wanted, rtol=1e-5, atol=1e-7, err_msg=name)


def test_ranks_have_the_same_parameters_after_every_case_between_hosts(ranks):
    for name in {name for family in torch_ddp.between_hosts() for name in family}:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name], err_msg=name)


def test_the_resnet_has_the_parameters_of_resnet18_without_the_wide_stem():
    model = resnet18()
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    loss_on_random_images((2, 3, 32, 32), 0)(model).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
