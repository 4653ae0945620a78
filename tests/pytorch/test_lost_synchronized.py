"""``distopt.torch.synchronize`` goes on without lost ranks: threads that end at any instant, and killed processes."""

import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")

from distopt.comm import ThreadCommunicator  # noqa: E402
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
    """Three instants of each mode; the thorough tier has all of them."""
    judge, rng = Judge(mode, fate, run), np.random.default_rng(zlib.crc32(mode.encode()))
    counts = instants(mode, fate, 3)
    for seed in range(3):
        victim = int(rng.integers(2))
        judge.judge(seed=seed, **{f"rank{victim}": (int(rng.integers(1, counts[victim] + 1)), bool(rng.integers(2)))})


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("mode", SYNCHRONIZED)
def test_survivors_have_the_bits_of_fewer_ranks_whenever_one_ends(mode, victim, fate):
    judge = Judge(mode, fate, run)
    for at in range(1, instants(mode, fate, 3)[victim] + 1):
        for after in (False, True):
            judge.judge(seed=at, **{f"rank{victim}": (at, after)})
