"""The benchmarks for a GPU, on its double: every case runs and launches its kernel."""

import gc
import inspect
import sys

import pytest

cupy = pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu = pytest.importorskip("doubles.gpu")

from benchmarks import gpu as benchmark_gpu  # noqa: E402
from benchmarks import gpu_kernels, gpu_models  # noqa: E402
from launch import PROJECT, finish  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


@pytest.mark.parametrize("cases", [gpu_kernels.elementwise, gpu_kernels.selection, gpu_kernels.summation])
def test_every_kernel_case_launches_its_kernel_and_nothing_on_the_host(cases):
    found = cases(5000)
    for name, (nbytes, case) in found.items():
        case()
        gpu.machine().log.clear()
        gpu.machine().host.clear()
        case()
        assert any("_float" in op.name for op in gpu.machine().log), name
        assert gpu.machine().host == [], name
        assert 4 * 5000 <= nbytes <= 48 * 5000


def bytes_used():
    gc.collect()  # arrays of tests before this one, in cycles, would otherwise be freed halfway
    return sum(nbytes for _, nbytes in gpu.allocations.values())


@pytest.mark.parametrize("cases", [gpu_kernels.elementwise, gpu_kernels.selection, gpu_kernels.summation])
def test_all_kernel_cases_find_room_in_the_bytes_that_are_counted_for_each_element(cases):
    n, before = 1 << 18, bytes_used()
    found = [benchmark_gpu.copy_case(n), *cases(n).values()]
    for _, case in found:
        case()
    assert 0.5 * gpu_kernels.BYTES_EACH * n < bytes_used() - before <= gpu_kernels.BYTES_EACH * n


@pytest.mark.parametrize(("gigabytes", "elements"), [(80, 1 << 28), (16, 149 << 20), (8, 74 << 20)])
def test_arrays_are_as_large_as_the_free_memory_allows(gigabytes, elements, monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: (gigabytes * 10**9, 10**11))
    assert benchmark_gpu.elements_that_fit(gpu_kernels.BYTES_EACH, gpu_kernels.ELEMENTS) == elements


@pytest.mark.parametrize("rule", gpu_models.RULES)
def test_every_model_case_packs_and_updates_on_the_gpu(rule):
    for name, case in gpu_models.ours(rule, [(300,), (7, 3)]).items():
        case()
        gpu.machine().log.clear()
        case()
        launches = [op.name for op in gpu.machine().log if "_float" in op.name]
        assert any("pack" in n for n in launches), name
        assert any("sgd" in n or "adam" in n for n in launches), name


def test_the_stubs_of_the_hosts_table_carry_a_step_of_one_of_several_ranks():
    code = """
from benchmarks import stub_cuda
from distopt import DistOpt, Parameter, optim
stub_cuda.install()
opt = DistOpt(optim.SGD(0.1), stub_cuda.communicator(8))
param = Parameter("w", stub_cuda.array((100,)))
for _ in range(2):
    opt.step([(param, stub_cuda.array((100,)))])
assert stub_cuda.counts["kernels"] and stub_cuda.counts["NCCL calls"]
"""
    assert finish([sys.executable, "-c", code], 60, cwd=PROJECT) == (0, "")


@pytest.mark.torch
@pytest.mark.parametrize("rule", gpu_models.RULES)
def test_torchs_ddp_steps_with_the_gradients_that_it_is_given(rule):
    torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    step = gpu_models.ddp_step(rule, [(300,), (7, 3)], place="cpu", transport="gloo")
    model = inspect.getclosurevars(step).nonlocals["model"]
    step()
    step()
    for p, g in zip(model.parameters(), model.module.gradients(), strict=True):
        assert torch.equal(p.detach().sign(), -g.sign())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("table", [gpu_kernels, gpu_models])
def test_gpu_benchmarks_without_a_gpu_print_one_line_and_exit_0(table, capsys, monkeypatch):
    monkeypatch.setattr("distopt.device.gpu_state", lambda: "there is none")
    monkeypatch.setattr("sys.argv", ["a benchmark"])
    with pytest.raises(SystemExit) as end:
        table.main()
    assert end.value.code == 0
    assert capsys.readouterr().out == "no GPU, so nothing to measure: there is none\n"
