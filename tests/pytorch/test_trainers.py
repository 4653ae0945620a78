"""distopt in the loops of accelerate, transformers and Lightning, each as it is, on ranks of torchrun."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
import forks  # noqa: E402

from distopt import run_ranks  # noqa: E402
from distopt.torch.integrations import exchange_of  # noqa: E402
from launch import distopt_run  # noqa: E402

pytestmark = pytest.mark.torch
CASES = Path(__file__).with_name("trainer_cases.py")
EPOCHS = slice(4), slice(-4, None)  # the steps of the first one and of the last one
LIBRARIES = {"accelerate": "accelerate", "transformers": "transformers.trainer", "lightning": "lightning.pytorch"}


def by_torchrun(size, command, timeout):
    return forks.run(forks.torchruns(), size, command, timeout, imported=[LIBRARIES[command[1]]])


@pytest.fixture
def train(tmp_path):
    """Run a phase of a library's training on two ranks; (exit code, output, what the ranks have left)."""

    def train(library, phase, launch=by_torchrun):
        pytest.importorskip(library, reason=f"{library} is missing: pip install {library}")
        code, output = launch(2, [CASES, library, phase, tmp_path], timeout=120)
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{phase}-*.json"))]
        return code, output, found

    return train


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_trainer_trains_as_with_ddp_and_goes_on_after_a_kill(library, train):
    """Dense has DistributedDataParallel's bits; a compressed run that was killed and resumed those of a whole one."""
    code, output, ranks = train(library, "whole")
    assert code == 0, output
    for found in ranks:
        assert {name: run["digest"] for name, run in found.items()} == {
            name: run["digest"] for name, run in ranks[0].items()
        }
        assert found["dense"] == found["plain"]
        assert found["compressed"]["digest"] != found["dense"]["digest"]
    first, last = (sum(sum(found["compressed"]["losses"][epoch]) for found in ranks) for epoch in EPOCHS)
    assert last < first

    code, output, _ = train(library, "killed")
    assert code != 0, output
    code, output, resumed = train(library, "resumed")
    assert code == 0, output
    for found, whole in zip(resumed, ranks, strict=True):
        done = found["compressed"]["losses"]
        assert done == whole["compressed"]["losses"][-len(done) :]
        assert found["compressed"]["digest"] == whole["compressed"]["digest"]


@pytest.mark.mpi
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_distopt_run_starts_a_trainer(library, train):
    """It tells MPI's ranks where torch is to meet, which accelerate asks for; Lightning asks mpi4py."""
    code, output, ranks = train(library, "whole", lambda n, script, timeout: distopt_run(n, *script, timeout=timeout))
    assert code == 0, output
    assert ranks[0]["dense"]["digest"] == ranks[0]["plain"]["digest"] == ranks[1]["dense"]["digest"]
    assert ranks[0]["compressed"]["digest"] == ranks[1]["compressed"]["digest"] != ranks[0]["dense"]["digest"]


def test_a_trainer_that_takes_itself_for_one_process_of_one_is_refused():
    with pytest.raises(ValueError, match=r"must train a DistributedDataParallel, got a Linear in .*, rank \d of 2"):
        run_ranks(2, lambda _: exchange_of(torch.nn.Linear(3, 2), None, {}))
