"""A rank is killed while all save: every checkpoint is whole, and loads as what the survivors had."""

import hashlib
import importlib.util
import re

import forks
import numpy as np
import pytest

from distopt import DistOpt, Parameter
from distopt.comm import run_ranks
from distopt.optim import SGD

SAVES = 8
SCRIPT = """
import hashlib, os, random, signal, sys, threading
from pathlib import Path
import numpy as np
import distopt
from distopt.compress import ErrorFeedback, TopK

folder, victim, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
world = distopt.world()
member, rng = world.rank, np.random.default_rng(world.rank)
params = [distopt.Parameter(f"w{k}", np.zeros(100_000, np.float32)) for k in range(3)]
opt = distopt.DistOpt(distopt.optim.SGD(0.1, momentum=0.9))
for k in range(8):
    opt.step([(p, rng.standard_normal(p.data.shape, np.float32)) for p in params], ErrorFeedback(TopK(0.1)))
    if (k, member) == (3, victim):
        threading.Timer(random.Random(seed).uniform(0.0, 0.02), os.kill, [os.getpid(), signal.SIGKILL]).start()
    opt.save(folder / str(opt.step_counter), params)
    print("saved", opt.step_counter, hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest(), flush=True)
"""


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")
@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_is_whole_when_a_rank_is_killed_in_save(seed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    victim, folder = seed % 3, tmp_path / "checkpoints"
    command = ["--elastic", "--over", "torch", script, folder, victim, seed]
    code, output = forks.distopt_run(3, *command, timeout=60)
    assert code == 0, output
    assert output.count("was killed by SIGKILL") == 1, output
    saved = {int(step): digest for step, digest in re.findall(r"saved (\d) (\w+)", output)}
    assert sorted(saved) == list(range(1, SAVES + 1)), output
    assert sorted(path.name for path in folder.iterdir()) == sorted(map(str, saved)), "and nothing half done"
    for step, digest in saved.items():
        assert loaded(folder / str(step)) == (step, digest)


def loaded(folder):
    """What one rank loads: the step, and a digest of the parameters."""

    def main(comm):
        params = [Parameter(f"w{k}", np.zeros(100_000, np.float32)) for k in range(3)]
        opt = DistOpt(SGD(0.1, momentum=0.9), comm)
        opt.load(folder, params)
        return opt.step_counter, hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest()

    return run_ranks(1, main)[0]
