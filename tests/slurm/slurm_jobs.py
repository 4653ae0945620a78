"""Jobs on the cluster of ``cluster.py``, from the scripts of examples/slurm."""

import re
import sys
import time
from pathlib import Path

from launch import PROJECT

SCRIPTS = PROJECT / "examples" / "slurm"
PATIENCE = 120  # seconds


class Job:
    """A job that runs a script of examples/slurm, changed as its user would change it.

    Args:
        cluster: where it runs.
        folder: for its script, its output, and its checkpoints or records.
        name: the script's, without '.sbatch'.
        changes: texts of the script and what takes their place; each must be there.
        options: those of sbatch.
    """

    def __init__(self, cluster, folder, name, changes, *options):
        self._cluster, self.folder, self.output = cluster, folder, folder / "output-0.txt"
        text = (SCRIPTS / f"{name}.sbatch").read_text()
        for old, new in changes.items():
            assert old in text, f"{name}.sbatch has no {old!r}"
            text = text.replace(old, new)
        script = folder / f"{name}.sbatch"
        script.write_text(text)
        output = f"--output={folder}/output-%a.txt" if "--array" in text else f"--output={self.output}"
        command = ["sbatch", "--parsable", f"--chdir={PROJECT}", output, *options, str(script)]
        self.number = cluster.call(*command, PYTHON=sys.executable, OMP_NUM_THREADS="1").strip()
        assert self.number.isdigit(), cluster.logs()

    @classmethod
    def training(cls, cluster, folder, name, steps, *options):
        """A training of so many steps, with one CPU for each rank."""
        changes = {"--folder checkpoints": f"--folder {folder}/checkpoints --steps {steps}"}
        return cls(cluster, folder, name, changes, "--cpus-per-task=1", *options)

    def read(self):
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for(self, pattern):
        """The match of a pattern in the output, when it is there."""
        return self._until(lambda: re.search(pattern, self.read()), pattern)

    def end(self):
        """The state in which the job, or each of an array, ended: 'COMPLETED', 'CANCELLED', ..."""
        states = self._until(lambda: self._ended(), "an end")
        return states.pop() if len(states) == 1 else states

    def _ended(self):
        states = set(re.findall(r"JobState=(\w+)", self.show()))
        return None if states & {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"} else states

    def show(self):
        """What Slurm knows of the job."""
        return self._cluster.call("scontrol", "show", "job", self.number)

    def call(self, *command):
        """A command of Slurm, with the job's number after it."""
        return self._cluster.call(*command, self.number)

    def processes(self, node):
        """Numbers of the job's Python processes on a node."""
        wanted = {f"SLURM_JOB_ID={self.number}", f"SLURMD_NODENAME={node}"}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            if (
                wanted <= set(_text(folder / "environ").split("\0"))
                and "python" in _text(folder / "cmdline").split("\0")[0]
            ):
                found.append(int(folder.name))
        return found

    def has_ended_on_nodes(self):
        """Whether no process of Slurm for the job is left: a step that PMIx starts before that fails."""
        titles = (folder / "cmdline" for folder in Path("/proc").glob("[0-9]*"))
        return not any(_text(title).startswith(f"slurmstepd: [{self.number}.") for title in titles)

    def _until(self, ready, what):
        deadline = time.monotonic() + PATIENCE
        while not (found := ready()):
            assert time.monotonic() < deadline, f"{what} must come within {PATIENCE} s\n{self.show()}\n{self.read()}"
            time.sleep(0.2)
        return found


def _text(file):
    """What a file of /proc says; nothing if its process has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
