"""A Slurm cluster of two nodes on this machine, from the distribution's packages, without root or systemd.

    python tests/slurm/cluster.py bash      # a shell in which sbatch, srun and squeue know the cluster

munged, slurmctld and two slurmd are processes of the cluster's own: key, state, spool, logs and sockets are in a
temporary folder, and all ports are on the loopback interface.  They are ended by their process numbers.  Each node has
eight CPUs, whatever the machine has, and no cgroups.

Debian and Ubuntu: apt-get install slurmctld slurmd slurm-client munge libpmix-dev
"""

import contextlib
import ctypes
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = 2
CPUS = 8  # of each node
START_SECONDS, END_SECONDS = 60, 30
# In /sbin, which is on PATH of root alone.
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# config_overrides: the nodes have as many CPUs as is said here.  NoCtldInAddrAny, NoInAddrAny: all listen on loopback.
CONFIGURATION = """\
ClusterName=distopt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing():
    """What of Slurm this machine lacks, in words; '' for nothing."""
    lacks = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SEARCHED) is None]
    return f"{', '.join(lacks)} missing: apt-get install slurmctld slurmd slurm-client munge" if lacks else ""


def lacks_pmix():
    """Why srun cannot start ranks by PMIx, in words; '' if it can."""
    try:
        ctypes.CDLL("libpmix.so")  # by this name Slurm's plugin opens it
    except OSError:
        return "libpmix.so is missing: apt-get install libpmix-dev"
    return ""


class Cluster:
    """The cluster's processes.

    Attributes:
        environment: with it sbatch, srun and their like find the cluster, and ranks find rank 0, whose node's name
            no name service knows.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="distopt-slurm-"))
        self.environment = {"SLURM_CONF": f"{self.folder}/slurm.conf", "MASTER_ADDR": "127.0.0.1"}
        self._processes = []

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self):
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        controller_port, *ports = free_ports(1 + NODES)
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} State=UNKNOWN"
            for i, port in enumerate(ports, 1)
        ]
        for name in ("state", *(f"{what}-node{i}" for what in ("spool", "tmp") for i in range(1, NODES + 1))):
            (self.folder / name).mkdir()
        names = {"host": host, "user": getpass.getuser(), "folder": self.folder, "controller_port": controller_port}
        Path(self.environment["SLURM_CONF"]).write_text(CONFIGURATION.format(nodes="\n".join(nodes), **names))
        options = [f"--{what}-file={self.folder}/munged.{what}" for what in ("pid", "log", "seed")]
        munge_socket = self.folder / "munge.socket"
        # --force: the folder of temporary files may be written by all
        self._process("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}", *options)
        self.wait(munge_socket.exists, "munged")
        self._process("slurmctld", "-D")
        for i in range(1, NODES + 1):
            self._process("slurmd", "-D", "-N", f"node{i}")
        self.wait(lambda: self.call("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * NODES, "the nodes")

    def _process(self, name, *arguments):
        with open(self.folder / f"{name}.out", "ab") as out:
            command = [shutil.which(name, path=SEARCHED), *arguments]
            environment = os.environ | self.environment
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))

    def wait(self, ready, what):
        """Wait until a function returns True."""
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"{what} must be ready within {START_SECONDS} s, and are not:\n{self.logs()}")
            time.sleep(0.1)

    def call(self, *command, **variables):
        """What a command of Slurm prints."""
        environment = os.environ | self.environment | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    def logs(self):
        """The ends of all logs."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def close(self):
        """End all jobs, and then the cluster."""
        if len(self._processes) > 1:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.call("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
                self.call("scancel", f"--user={getpass.getuser()}")
                deadline = time.monotonic() + END_SECONDS
                while self.call("squeue", "-h").strip() and time.monotonic() < deadline:
                    time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count):
    """Ports of the loopback interface that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main():
    if lacks := missing():
        sys.exit(lacks)
    with Cluster() as cluster:
        return subprocess.run(sys.argv[1:] or ["sinfo"], env=os.environ | cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
