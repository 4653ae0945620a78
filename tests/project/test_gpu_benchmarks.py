"""The benchmarks for a GPU, on its double: every case runs and launches its kernel."""

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")
gpu = pytest.importorskip("doubles.gpu")

from benchmarks import gpu_kernels, gpu_models  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("doubles")]


@pytest.mark.parametrize("cases", [gpu_kernels.elementwise, gpu_kernels.selection])
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


@pytest.mark.parametrize("rule", gpu_models.RULES)
def test_every_model_case_packs_and_updates_on_the_gpu(rule):
    for name, case in gpu_models.ours(rule, [(300,), (7, 3)]).items():
        case()
        gpu.machine().log.clear()
        case()
        launches = [op.name for op in gpu.machine().log if "_float" in op.name]
        assert any("pack" in n for n in launches), name
        assert any("sgd" in n or "adam" in n for n in launches), name


@pytest.mark.parametrize("table", [gpu_kernels, gpu_models])
def test_gpu_benchmarks_without_a_gpu_print_one_line_and_exit_0(table, capsys, monkeypatch):
    monkeypatch.setattr("distopt.device.gpu_state", lambda: "there is none")
    monkeypatch.setattr("sys.argv", ["a benchmark"])
    with pytest.raises(SystemExit) as end:
        table.main()
    assert end.value.code == 0
    assert capsys.readouterr().out == "no GPU, so nothing to measure: there is none\n"
