"""Jobs whose ranks are killed from outside: ranks of Open MPI, and of a stand-in for ``distopt run --elastic``."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forks

from distopt.run.rendezvous import RankLinks, Rendezvous

SCRIPT = str(Path(__file__).with_name("survivors_launch.py"))


class Job:
    """Ranks that exchange until ``end`` tells them that it is enough."""

    def __init__(self, size, what, folder, script=SCRIPT, **environment):
        self.size, self.folder = size, Path(folder)
        self.environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "DISTOPT_ELASTIC": "1"} | environment
        for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
            self.environment.pop(name, None)
        self.killed = {}
        self.start([sys.executable, script, self.transport, what, str(folder)])

    def process(self, member):
        return int((self.folder / f"{member}.process").read_text())

    def wait_until_all_exchange(self, timeout=60):
        self.wait_for(lambda: all(self.sums(member) for member in range(self.size)), timeout)

    def wait_for(self, condition, timeout=60):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.stop()
            assert self.running(), f"the job has ended: {self.end()}"
            time.sleep(0.01)

    def say_that_it_is_enough(self):
        (self.folder / "enough").touch()

    def kill(self, member, how=signal.SIGKILL):
        self.killed[member] = time.monotonic()
        os.kill(self.process(member), how)

    def sums(self, member):
        """(when, of whom) of each first sum that a rank has written."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{member}.sums").read_text().splitlines()
            return [(float(line.split()[0]), json.loads(line.split(maxsplit=1)[1])) for line in lines if line]
        return []

    def first_sum_without(self, *members):
        """When the last of the others has its first sum without these; None before that."""
        others = [member for member in range(self.size) if member not in self.killed]
        times = [next((t for t, of in self.sums(m) if not set(of) & set(members)), None) for m in others]
        return None if None in times else max(times)


class GlooJob(Job):
    """Processes that this one has started, each with a line to it, as ``distopt run --elastic`` does."""

    transport = "gloo"

    def start(self, command):
        self._marks = tempfile.TemporaryDirectory()
        self.ranks, self._lines = {}, RankLinks(lambda *said: rendezvous.hear(*said))
        rendezvous = Rendezvous(range(self.size), self._lines.send, Path(self._marks.name))
        for member in range(self.size):
            theirs = self._lines.add(member)
            names = {
                "DISTOPT_LINE": str(theirs.fileno()),
                "DISTOPT_MEMBER": str(member),
                "DISTOPT_RUN": str(self.size),
                "DISTOPT_JOB": self._marks.name,
            }
            log = (self.folder / f"{member}.log").open("wb")
            self.ranks[member] = forks.Fork(command[1:], self.environment | names, log, pass_fds=[theirs.fileno()])
            theirs.close()
            log.close()
        self._lines.start()

    def running(self):
        return any(rank.poll() is None for rank in self.ranks.values())

    def end(self, timeout=60):
        """Exit codes of all ranks but those killed, and the output."""
        self.say_that_it_is_enough()
        deadline = time.monotonic() + timeout
        for rank in self.ranks.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        late = [member for member, rank in self.ranks.items() if rank.poll() is None]
        output = self.stop()
        codes = [rank.returncode for member, rank in self.ranks.items() if member not in self.killed]
        return ([*codes, f"late: {late}"] if late else codes), output

    def stop(self):
        for rank in self.ranks.values():
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        lines, self._lines = self._lines, None
        if lines:
            lines.close()
        self._marks.cleanup()
        return "\n".join(f"-- {m}\n{(self.folder / f'{m}.log').read_text()}" for m in self.ranks)


class MpiJob(Job):
    """Ranks of Open MPI with its support for ranks that fail."""

    transport = "mpi"

    def start(self, command):
        launcher = [str(Path(sys.executable).with_name("mpirun")), "--with-ft", "ulfm", "--oversubscribe"]
        more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,sm"}
        self.log = (self.folder / "log").open("wb")
        self.job = subprocess.Popen(
            [*launcher, "-n", str(self.size), *command],
            env=self.environment | more,
            stdout=self.log,
            stderr=self.log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def running(self):
        return self.job.poll() is None

    def end(self, timeout=60):
        """The launcher's exit code, in a list, and the output."""
        self.say_that_it_is_enough()
        try:
            code = self.job.wait(timeout)
        except subprocess.TimeoutExpired:
            code = "late"
        return [code], self.stop()

    def stop(self):
        if self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGTERM)
            try:
                self.job.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.job.pid, signal.SIGKILL)
                self.job.wait()
        self.log.close()
        for member in range(self.size):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(self.process(member), signal.SIGKILL)
        return (self.folder / "log").read_text(errors="replace")


JOBS = {"gloo": GlooJob, "mpi": MpiJob}
