"""Optimizers of torch, and of packages for it: docs/guides/optimizers_table.md says what is."""

import pytest

pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import any_optimizer

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("package", [pytest.param("torch", marks=pytest.mark.torch), *any_optimizer.PACKAGES[1:]])
def test_the_table_is_true(package, tmp_path):
    pytest.importorskip(package, reason=f"{package} is missing: pip install {package.replace('_', '-')}")
    rows = dict(any_optimizer.rows_of(package, None, tmp_path))
    page = any_optimizer.TABLE.read_text().splitlines()
    for line in any_optimizer.lines_of(package, rows):
        assert line in page, rows
