"""Two real ranks, as everyone starts them: the part of the tiers ``mpi`` and ``faults`` that every machine tries.

A process takes long to start, so all that two healthy ranks do is one job; each fault is a job of its own.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import comm_checks
import numpy as np
import pages
import pytest
import saving

import laws
from distopt import run_ranks
from launch import distopt_run, run_mpi

DIGITS = Path(__file__).parent.parent / "examples" / "digits.py"


def digests_of_modes(comm):
    """A digest of the parameters after four steps of each mode, without what is the transport's own: its sums."""
    return [laws.digest(laws.train(comm, mode=mode, deterministic=True)[0]) for mode in laws.MODES]


def printed(script, *arguments):
    """What a script prints, run in this process as a user would start it."""
    sys.argv, output = [str(script), *map(str, arguments)], io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


def healthy(comm, folder):
    """Every verb, every mode, the laws of dense training, a NaN of one rank, a training, an example, the README."""
    comm_checks.verbs(comm)
    laws.ranks_agree_with_whole_batch(comm)
    laws.modes_agree(comm)
    laws.nothing_is_lost(comm, "topk")
    laws.resume(comm, "topk")
    laws.nan_is_refused_by_all(comm, ("dense", "topk"), rank=1)
    os.chdir(folder)
    return {
        "modes": np.array(digests_of_modes(comm)),
        "unbroken": np.array(saving.train(Path(folder, "unbroken"), 20, 0)),
        "stopped": np.array(saving.train(Path(folder, "stopped"), 10, 10)),
        "digits": np.array(printed(DIGITS, "--epochs", 4, "--mode", "topk")),
        "readme": np.array(pages.run(pages.README)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_mpi(2, healthy, folder, str(folder))


@pytest.fixture(scope="module")
def threads():
    return run_ranks(2, digests_of_modes)


@pytest.mark.parametrize("mode", laws.MODES)
def test_processes_have_the_bits_of_threads(mode, ranks, threads):
    k = list(laws.MODES).index(mode)
    assert [found["modes"][k] for found in ranks] == [digests[k] for digests in threads]


ENDS = {  # what rank 1 does after its first step: the exit code, and what is said
    "raise ValueError('no shard')": (1, "ValueError: no shard"),
    "os.kill(os.getpid(), signal.SIGKILL)": (None, "rank 1"),
    "sys.exit()": (1, "PeerLeft: rank 1 left after step 1, before step 2"),
}


@pytest.mark.sampled(2)  # an error, and a rank that is gone
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_ends_ends_the_job_and_is_named(end, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"""
import os, signal, sys
import numpy as np
import distopt
world = distopt.world()
opt, w = distopt.DistOpt(distopt.optim.SGD(0.1)), distopt.Parameter("w", np.zeros(3))
for step in range(10):
    if step and world.rank == 1:
        {end}
    opt([(w, np.ones(3))])
""")
    code, output = distopt_run(2, script, timeout=60)
    wanted, text = ENDS[end]
    assert code == wanted if wanted is not None else code != 0, output
    assert text in output


def test_a_run_that_stopped_goes_on_with_the_bits_of_one_that_did_not(ranks, folder):
    """In other processes."""
    code, output = distopt_run(2, saving.__file__, folder / "stopped", 20, 0, timeout=60)
    assert code == 0, output
    assert "from step 10 with" in output, output
    assert re.findall(r"digest (\w+) after", output) == [str(found["unbroken"]) for found in ranks]


def test_the_python_blocks_of_the_readme_run_on_two_ranks(ranks):
    assert [int(found["readme"]) for found in ranks] == [2, 2]


def test_the_digits_example_learns_on_two_ranks(ranks):
    assert float(re.search(r"test accuracy (\S+)$", str(ranks[0]["digits"]), re.M)[1]) > 0.9
