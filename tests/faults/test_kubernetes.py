"""The manifests of ``examples/kubernetes``: what runs, and what becomes of it when somebody ends a pod."""

import importlib.util
import re
import signal
import time

import pytest
from pods import cluster_of, pods_of_jobset, pods_of_mpijob, pods_of_trainjob

from benchmarks.namespaces import missing
from distopt.checkpoint.folder import names
from distopt.run.launcher import find_launcher
from launch import PROJECT, has_mpi

yaml = pytest.importorskip("yaml", reason="PyYAML is missing: pip install pyyaml")

pytestmark = pytest.mark.faults
FOLDER = PROJECT / "examples" / "kubernetes"
# In the image in the place of the user's own script: it steps until somebody leaves a file, and says what it has.
SCRIPT = """
import argparse, hashlib, os, socket, sys, time
import numpy as np
import distopt

parser = argparse.ArgumentParser()
parser.add_argument("--folder")
folder = parser.parse_args().folder
world = distopt.world()
w, end = distopt.Parameter("w", np.ones(1000, np.float32)), distopt.Parameter("end", np.zeros(1))
opt = distopt.DistOpt(distopt.optim.SGD(lr=0.01, momentum=0.9))
opt.save_when_stopped(folder, [w, end])
opt.load(folder, [w, end])
opt.rejoin([w, end])
print(f"rank {world.rank} of {world.size} on {socket.gethostname()} begins at {opt.step_counter}", flush=True)
while not end.data[0]:
    time.sleep(0.02)
    opt([(w, w.data - opt.step_counter % 7 - world.rank), (end, -np.float64([os.path.exists("/mnt/end")]))])
    if opt.step_counter % 10 == 0:
        opt.save(folder, [w, end], keep=2)
        print(f"at {opt.step_counter}", flush=True)
print(f"has {hashlib.sha256(w.data).hexdigest()} of {world.size}", flush=True)
"""
# In the place of ssh and of its daemon: commands of any other pod are run.
SSHD = """#!/usr/bin/env python
import socketserver, subprocess
class Session(socketserver.StreamRequestHandler):
    def handle(self):
        command = self.rfile.readline().decode()
        subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=self.request, stderr=self.request)
socketserver.TCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("", 2222), Session).serve_forever()
"""
SSH = """#!/usr/bin/env python
import shutil, socket, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2 if words[0] == "-o" else 1:]
with socket.create_connection((words[0], 2222)) as line:
    line.sendall(" ".join(words[1:]).encode() + b"\\n")
    shutil.copyfileobj(line.makefile("rb", 0), sys.stdout.buffer)
    sys.stdout.flush()
"""


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods_of(name):
    """The pods of a manifest."""
    makers = {"JobSet": pods_of_jobset, "TrainingRuntime": pods_of_trainjob, "MPIJob": pods_of_mpijob}
    found = documents(name)
    return makers[found[0]["kind"]](*found)


@pytest.fixture
def cluster(tmp_path):
    """Returns a function that makes a cluster for the pods of a manifest."""
    if reason := missing():
        pytest.skip(reason)
    image = tmp_path / "image"
    image.mkdir()
    (image / "train.py").write_text(SCRIPT)
    return lambda name: cluster_of(pods_of(name), tmp_path, image, {"sshd": SSHD, "ssh": SSH})


def newest(folder):
    """The step of the newest checkpoint."""
    return int(names(folder)[0].rpartition("-")[2])


needs_mpich = pytest.mark.skipif(
    not has_mpi() or find_launcher().brand != "MPICH", reason="needs MPICH: pip install 'distopt[mpi]'"
)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")


@needs_torch
@pytest.mark.parametrize("name", ["jobset-elastic.yaml", pytest.param("trainjob-elastic.yaml", marks=pytest.mark.full)])
def test_an_elastic_job_goes_on_without_a_pod_which_joins_it_again(name, cluster):
    """Pods come in any order, before their names; one is killed, and started again; all save when one is evicted."""
    with cluster(name) as pods:
        second = pods.start(1)
        first = pods.start(0)
        time.sleep(1)
        assert [pod.process.poll() for pod in (first, second)] == [None, None], first.output + second.output
        pods.publish()
        for pod, rank in ((first, 0), (first, 1), (second, 2), (second, 3)):
            pod.wait_for(rf"rank {rank} of 4 on .*-node-0-{rank // 2} begins at 0\n")
        first.wait_for("at 10\n")

        second.signal(signal.SIGKILL)
        assert second.ended() != 0
        first.wait_for("rank 3 is lost with node 1, which cannot be reached, after .*; 2 ranks go on\n")
        before = int(first.wait_for(r"at (\d+)\n")[-1])
        again = pods.start(1)
        first.wait_for("node 1 has come again, with ranks 4, 5\n")
        (began,) = again.wait_for(r"rank 3 of 4 on .*-node-0-1 begins at (\d+)\n")
        assert int(began) > before
        first.wait_for(f"at {int(began) + 20 - int(began) % 10}\n")

        again.signal(signal.SIGTERM)
        assert [first.ended(), again.ended()] == [143, 143], first.output + again.output
        assert newest(pods.claim / "run") > int(began)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("jobset.yaml", "rank [23] has ended", marks=[needs_torch, pytest.mark.full]),
        pytest.param("trainjob.yaml", "rank [23] has ended", marks=needs_torch),
        pytest.param(
            "mpijob.yaml", "mpiexec@digits-launcher", marks=[pytest.mark.mpi, needs_mpich]
        ),  # which names no rank
    ],
)
def test_a_job_whose_pod_is_killed_ends_and_goes_on_from_its_checkpoint(name, words, cluster):
    """The exit code is not 0, so that the controller starts containers again; the same commands go on."""
    with cluster(name) as pods:
        first, *_, last = pods.start_all()
        first.wait_for("at 20\n")
        last.signal(signal.SIGKILL)
        last.ended()
        assert first.ended() != 0, first.output
        assert re.search(words, first.output), first.output

        saved = newest(pods.claim / "run")
        first, *others = pods.start_all()
        first.wait_for(f"rank 1 of 4 on .* begins at {saved}\n")
        first.wait_for(f"at {saved + 10}\n")
        (pods.claim / "end").touch()
        assert first.ended() == 0, first.output
        outputs = "".join(pod.output for pod in (first, *others))
        has = re.findall(r"has (\w+) of 4", outputs)
        assert (len(has), len(set(has))) == (4, 1), outputs
