"""Pods of Kubernetes on one machine: what controllers and kubelets make of a manifest, in namespaces of Linux.

Each pod has its own network, host name, processes, memory and ``/etc``, and runs the words of its container as user
1000.  The image is a folder, found at ``/srv``, and this environment of Python.  Needs root.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.namespaces import ADDRESSES, joined_hosts

NAMESPACE = "default.svc.cluster.local"
SECRETS = {("distopt", "secret"): "9f3c51e0"}
# In the first process of a pod, as root; --inh-caps: to read the folders of this environment, whoever owns them.
START = """
hostname "$POD"
mount --bind "$FOLDER/etc" /etc && mount --bind "$IMAGE" /srv && mount --bind "$FOLDER/sbin" /usr/sbin
if test -e /usr/bin/ssh; then mount --bind "$FOLDER/sbin/ssh" /usr/bin/ssh; fi
for volume in $VOLUMES; do
  if test "$volume" = /dev/shm; then mount -t tmpfs tmpfs /dev/shm; else mount --bind "$CLAIM" "$volume"; fi
done
cd "$WORKDIR"
exec setpriv --reuid 1000 --regid 1000 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search \
  --no-new-privs env -i "$@"
"""


class Pod(NamedTuple):
    """A pod, as its controller makes it."""

    name: str
    domain: str  # of the headless service
    container: dict
    given: dict  # environment variables that the controller sets
    files: dict  # in /etc, by their names

    def environment(self):
        """The container's variables, of which ``$(NAME)`` in its command may be one."""
        found = {}
        for variable in self.container.get("env", ()):
            secret = variable.get("valueFrom", {}).get("secretKeyRef")
            found[variable["name"]] = SECRETS[secret["name"], secret["key"]] if secret else variable["value"]
        return found | self.given

    def words(self):
        """The command and its arguments, with variables replaced as Kubernetes does it."""
        known = self.environment()
        words = [*self.container.get("command", ()), *self.container.get("args", ())]
        return [re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), word) for word in words]


def pods_of_jobset(jobset, given=()):
    """What the controllers of JobSet and of Jobs make: host names, and the variable of an indexed Job."""
    name, made = jobset["metadata"]["name"], []
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            variables = {"JOB_COMPLETION_INDEX": str(index)}
            variables |= {key: str(index) if value is None else value for key, value in dict(given).items()}
            made.append(Pod(f"{name}-{job['name']}-0-{index}", name, container, variables, {}))
    return made


def pods_of_trainjob(runtime, trainjob):
    """What Kubeflow's trainer makes of the policy torch: a JobSet of the runtime's template, with PET_* in it."""
    trainer, name = trainjob["spec"]["trainer"], trainjob["metadata"]["name"]
    assert runtime["metadata"]["name"] == trainjob["spec"]["runtimeRef"]["name"]
    assert runtime["spec"]["mlPolicy"] == {"torch": {}}
    spec = runtime["spec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    container |= {key: trainer[key] for key in ("command", "args", "env") if key in trainer}
    node["template"]["spec"]["completions"] = trainer["numNodes"]
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": None,  # the completion index
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    return pods_of_jobset({"metadata": {"name": name}, "spec": spec}, given)


def pods_of_mpijob(mpijob):
    """What the operator of MPI makes: a launcher with the workers' names in a file, and these."""
    name, spec = mpijob["metadata"]["name"], mpijob["spec"]
    replicas = {kind: of["template"]["spec"]["containers"][0] for kind, of in spec["mpiReplicaSpecs"].items()}
    workers = [f"{name}-worker-{number}" for number in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])]
    assert spec["mpiImplementation"] == "MPICH"
    variables = {"HYDRA_HOST_FILE": "/etc/mpi/hostfile", "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"}
    hosts = "".join(f"{worker}.{name}.default.svc:{spec['slotsPerWorker']}\n" for worker in workers)
    launcher = Pod(f"{name}-launcher", name, replicas["Launcher"], variables, {"mpi/hostfile": hosts})
    return [launcher, *(Pod(worker, name, replicas["Worker"], {}, {}) for worker in workers)]


class Container:
    """A running container of a pod: its first process, and what it has written."""

    def __init__(self, command, env):
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines, self._done, self._changed = [], False, threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with self.process.stdout as output:
            for line in output:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._done = True
            self._changed.notify_all()

    @property
    def output(self):
        return "".join(self.lines)

    def wait_for(self, pattern, seconds=90):
        """The matches of a pattern in the output, as soon as there is one."""
        with self._changed:
            found = self._changed.wait_for(lambda: re.findall(pattern, self.output) or self._done, seconds)
        assert isinstance(found, list), f"no {pattern!r} within {seconds} s:\n{self.output}"
        return found

    def signal(self, number):
        """Send a signal to the first process: with SIGKILL, all end."""
        (first,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(first), number)

    def wait_until_ready(self, probe):
        """Wait until the port of a readiness probe is open."""
        until = time.monotonic() + 60
        listens = f":{probe['tcpSocket']['port']:04X} 00000000:0000 0A "
        while listens not in Path(f"/proc/{self.process.pid}/net/tcp").read_text():
            assert time.monotonic() < until, self.output
            time.sleep(0.05)

    def ended(self, seconds=60):
        """The exit code, when it has ended."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {seconds} s:\n{self.output}") from None
        self._reader.join()
        return code


class Cluster:
    """Machines for pods, a volume that all of them mount, and an image."""

    def __init__(self, hosts, pods, folder, image, programs):
        # programs: texts of what the image has in /usr/sbin
        self.pods, self.claim = pods, folder / "claim"
        self._hosts, self._folder, self._image, self._running = hosts, folder, image, {}
        self.claim.mkdir()
        os.chown(self.claim, 1000, 1000)
        for pod in pods:
            own = folder / pod.name
            shutil.copytree("/etc", own / "etc", symlinks=True, ignore=lambda *_: {"shadow", "gshadow", "ssl"})
            for name, text in pod.files.items():
                (own / "etc" / name).parent.mkdir(exist_ok=True)
                (own / "etc" / name).write_text(text)
            for name in ("sbin", "tmp"):
                (own / name).mkdir()
            for name, text in programs.items():
                (own / "sbin" / name).write_text(text)
                (own / "sbin" / name).chmod(0o755)
            os.chown(own / "tmp", 1000, 1000)
            self._set_hosts(pod, [(pod, False)])

    def publish(self):
        """From now on all names are known, as those of a headless service are some time after its pods have begun."""
        for pod in self.pods:
            self._set_hosts(pod, [(other, True) for other in self.pods])

    def _set_hosts(self, pod, known):
        lines = ["127.0.0.1 localhost"]
        for other, by_service in known:
            name = f"{other.name}.{other.domain}"
            names = [f"{name}.{NAMESPACE}", *[name, f"{name}.default.svc"] * by_service, other.name]
            lines.append(" ".join([ADDRESSES[self.pods.index(other)], *names]))
        (self._folder / pod.name / "etc/hosts").write_text("\n".join([*lines, ""]))

    def start(self, number):
        """Start the container of a pod, or start it again."""
        pod = self.pods[number]
        own = self._folder / pod.name
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin"
        inside = {"PATH": path, "HOME": "/", "HOSTNAME": pod.name, "TMPDIR": str(own / "tmp")} | pod.environment()
        volumes = " ".join(mount["mountPath"] for mount in pod.container.get("volumeMounts", ()))
        outside = {"POD": pod.name, "FOLDER": own, "IMAGE": self._image, "CLAIM": self.claim, "VOLUMES": volumes}
        outside |= {"PATH": os.environ["PATH"], "WORKDIR": pod.container["workingDir"]}
        variables = [f"{name}={value}" for name, value in inside.items()]
        command = self._hosts.on(number, ["sh", "-euc", START, "sh", *variables, *pod.words()])
        self._running[number] = Container(command, {name: str(value) for name, value in outside.items()})
        return self._running[number]

    def start_all(self):
        """Start what does not run, the first pod last, and return all."""
        self.publish()
        for number in reversed(range(len(self.pods))):
            if number not in self._running or self._running[number].process.poll() is not None:
                started = self.start(number)
                if probe := self.pods[number].container.get("readinessProbe"):
                    started.wait_until_ready(probe)
        return [self._running[number] for number in range(len(self.pods))]

    def close(self):
        """End what runs."""
        for container in self._running.values():
            if container.process.poll() is None:
                with contextlib.suppress(ValueError, ProcessLookupError):
                    container.signal(signal.SIGKILL)
                container.process.kill()
            container.ended()


@contextlib.contextmanager
def cluster_of(pods, folder, image, programs=()):
    """A cluster for as long as the context lasts."""
    with joined_hosts(len(pods)) as hosts:
        made = Cluster(hosts, pods, folder, image, dict(programs))
        try:
            yield made
        finally:
            made.close()
