"""examples/train_gpu.py as users run it: from begin to end, with a rank that is killed, and on from what it saved."""

import contextlib
import functools
import importlib
import io
import re
import sys

import spawned

import distopt
from launch import PROJECT, finish

SCRIPT = PROJECT / "examples/train_gpu.py"


def ends(output):
    """The digest of the parameters, if a job has come to its end."""
    found = re.search(r"after \d+ steps, parameters (\w{16})", output)
    return found and found[1]


def loses_a_rank_and_goes_on(train, folder, *options):
    """``train(*options)`` runs the script and returns its output; the job is killed after it has saved once."""
    options = [*options, "--every", "3", "--steps", "8"]
    whole = train(*options)
    assert "from step 0 of 8" in whole, whole
    assert ends(whole), whole
    options += ["--folder", str(folder)]
    broken = train(*options, "--kill", "5")
    assert not ends(broken), broken
    resumed = train(*options)
    assert "from step 3 of 8" in resumed, resumed
    assert ends(resumed) == ends(whole), f"{whole}\n{resumed}"


def launched(*command, timeout=120.0, **environment):
    """For ``train``: a command in front of the script's options."""

    def train(*options):
        code, output = finish([*map(str, command), *options], timeout, env=environment)
        assert (code == 0) == bool(ends(output)), output
        return output

    return train


def as_a_child(comm, options):
    """The script in a process that has found the others already: it is given their communicator."""
    sys.path.insert(0, str(SCRIPT.parent))
    sys.argv, distopt.world = [str(SCRIPT), *options], lambda device: comm
    with contextlib.redirect_stdout(io.StringIO()) as said:
        importlib.import_module(SCRIPT.stem).main()
    return said.getvalue()


def of_children(size, folder, begin, timeout=120.0):
    """For ``train``: ranks which may share a GPU; what the first one said, or raised."""
    folder.mkdir()

    def train(*options):
        for file in folder.iterdir():
            file.unlink()
        return spawned.run(functools.partial(as_a_child, options=options), size, folder, begin, timeout=timeout)["0"]

    return train
