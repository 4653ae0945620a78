"""distopt run --elastic --nodes: launchers of one job on several machines, here on the loopback interface of one."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
from elastic_script import HEAD, all_gone, told

from distopt.cli import main
from distopt.comm.listener import TIMEVAL
from distopt.run import nodes
from distopt.run.nodes import Place, place

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")


@pytest.fixture
def start(tmp_path):
    """Start a launcher for each node of a job; returns these."""
    launchers = []

    def start(text, *options, ranks=(2, 2), secrets=("s", "s"), counts=(2, 2), **environment):
        script = tmp_path / "script.py"
        script.write_text(HEAD + text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            at = f"127.0.0.1:{free.getsockname()[1]}"
        for node, (number, secret, count) in enumerate(zip(ranks, secrets, counts, strict=True)):
            command = [sys.executable, "-m", "distopt", "run", "-n", str(number), "--elastic", *options]
            command += ["--nodes", str(count), "--node", str(node), "--at", at, str(script)]
            env = {**os.environ, "OMP_NUM_THREADS": "1", nodes.SECRET: secret, **environment}
            launchers.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        return launchers

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.stdout.close()
        launcher.wait()


@pytest.fixture
def run(start):
    """Run a job on two nodes, and return the exit code and the output of each launcher."""

    def run(*args, **options):
        launchers = start(*args, **options)
        outputs = [launcher.communicate(timeout=40)[0] for launcher in launchers]
        return [launcher.returncode for launcher in launchers], outputs

    return run


@pytest.mark.faults
@needs_torch
class TestJobs:
    def test_ranks_of_two_nodes_are_one_job(self, run):
        codes, outputs = run("meet(); steps(1, 3); meet()", ranks=(1, 3))
        assert codes == [0, 0], outputs
        assert [told(output) for output in outputs] == [[], []]
        for output, ranks in zip(outputs, ([0], [1, 2, 3]), strict=True):
            for epoch in (0, 1):
                assert sorted(re.findall(rf"\[(\d)\] epoch {epoch} \[0, 1, 2, 3\]", output)) == list(map(str, ranks))

    def test_what_one_puts_comes_to_the_ranks_of_the_other_node(self, run):
        codes, outputs = run(
            "meet()\nif me == 3: line.put('a', b'of 3', [0, 3])\n"
            "if me in (0, 3): line.wait(lambda: line.value('a') is not None, 20); print(line.value('a'))\nmeet()"
        )
        assert codes == [0, 0], outputs
        assert ["b'of 3'" in output for output in outputs] == [True, True]

    @pytest.mark.parametrize("victim", [1, 2])
    def test_a_rank_that_is_killed_on_either_node_is_named_by_the_first(self, run, victim):
        codes, outputs = run(f"meet(); steps(1, 5)\nif me == {victim}: die()\nmeet(); time.sleep(1)")
        left = [rank for rank in range(4) if rank != victim]
        assert codes == [0, 0], outputs
        assert sum(output.count(f"epoch 1 {left}") for output in outputs) == 3, outputs
        (line,) = told(outputs[0])
        assert line.startswith(f"rank {victim} was killed by SIGKILL after step 5; lost with it: ")
        assert line.endswith("; 3 ranks go on")
        assert told(outputs[1]) == []

    def test_the_exit_code_is_that_of_the_last_rank_on_whichever_node(self, run):
        codes, outputs = run("meet(); time.sleep(0.4 * me)\nif me == 3: sys.exit(5)")
        assert codes == [5, 5], outputs

    def test_a_stopped_rank_of_the_other_node_is_ended(self, run):
        codes, outputs = run(
            "Watchdog(me, recorder, limits(), None)\nlog = OperationLog(recorder, 'votes', [0, 1, 2, 3])\n"
            "meet(); steps(1, 4)\nif me == 3: steps(5, 5); os.kill(os.getpid(), signal.SIGSTOP)\nsteps(5, 5)\n"
            "with log('vote', 0, 'step 5'): meet()\nsteps(6, 9)",
            DISTOPT_TIMEOUT="1",
        )
        assert codes == [0, 0], outputs
        # on a machine under load a rank may have done its last step while another has not
        lines = [line for line in told(outputs[0]) if "has ended its script" not in line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("rank 3 was ended after step 5, as ranks 0 to 2 wait for too long")

    def test_when_the_launcher_of_a_node_ends_its_ranks_end_and_the_others_go_on(self, start):
        first, second = start(
            "print('pid', os.getpid(), flush=True); meet(); steps(1, 5); time.sleep(1); print('later', flush=True)\n"
            "if me > 1: time.sleep(60)\nmeet()"
        )
        pids = [int(second.stdout.readline().split()[-1]) for _ in range(2)]
        while "later" not in second.stdout.readline():
            pass
        second.kill()
        output, _ = first.communicate(timeout=40)
        assert first.returncode == 0, output
        assert output.count("epoch 1 [0, 1]") == 2, output
        assert [line[:58] for line in told(output)] == [
            f"rank {rank} is lost with node 1, which cannot be reached, after"[:58] for rank in (2, 3)
        ]
        assert all_gone(pids)

    def test_ranks_of_a_launcher_that_comes_again_are_let_in(self, start):
        """Also where the first one with its number still runs: it is given up."""
        first, second = start(
            "joins = os.environ.get('DISTOPT_JOINS') == '1'\nmeet() if not joins else None\nsteps(1, 5)\n"
            "if me < 2: line.wait(lambda: len(line.lost(range(4))) == 2, 20)\n"
            "if me in (2, 3): time.sleep(60)\n"
            "def enter(): return line.ask('world', f'I am {me}', lets_in=True).members\n"
            "members = enter()\n"
            "while members != [0, 1, 4, 5]: steps(6, 7); members = enter()\n"
            "print('all', members, flush=True)"
        )
        while "epoch" not in second.stdout.readline():
            pass
        again = subprocess.Popen(
            second.args,
            env={**os.environ, "OMP_NUM_THREADS": "1", nodes.SECRET: "s"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        outputs = [launcher.communicate(timeout=40)[0] for launcher in (first, again, second)]
        assert (first.returncode, again.returncode, second.returncode) == (0, 0, 1), outputs
        assert [output.count("all [0, 1, 4, 5]") for output in outputs] == [2, 2, 0], outputs
        assert "node 1 has come again, with ranks 4, 5" in told(outputs[0])
        assert told(outputs[2]) == ["node 0 cannot be reached; ended the ranks of this node"]

    def test_when_the_launcher_of_node_0_ends_all_end(self, start):
        first, second = start("print('pid', os.getpid(), flush=True); meet(); time.sleep(60)")
        pids = [int(launcher.stdout.readline().split()[-1]) for launcher in (first, second) for _ in range(2)]
        while "epoch" not in second.stdout.readline():
            pass
        first.kill()
        output, _ = second.communicate(timeout=40)
        assert (second.returncode, told(output)) == (1, ["node 0 cannot be reached; ended the ranks of this node"])
        assert all_gone(pids)

    @pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)])
    def test_a_signal_to_one_launcher_or_to_both_ends_all(self, start, asked):
        launchers = start("print('pid', os.getpid(), flush=True); meet(); time.sleep(60)")
        pids = [int(launcher.stdout.readline().split()[-1]) for launcher in launchers for _ in range(2)]
        for number in asked:
            launchers[number].send_signal(signal.SIGTERM)
        outputs = [launcher.communicate(timeout=40)[0] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [143, 143], outputs
        assert [told(output) for output in outputs] == [[], []]
        assert all_gone(pids)

    def test_a_job_that_takes_too_long_is_ended_on_all_nodes(self, run):
        codes, outputs = run("meet(); time.sleep(60)", "--timeout", "3")
        assert codes == [124, 124], outputs
        assert told(outputs[0])[-1] == "not done after 3 s; ended the job"

    def test_who_does_not_know_the_secret_is_no_node(self, start, monkeypatch):
        first, second = start("meet()", secrets=("s", "other"))
        output, _ = second.communicate(timeout=40)
        assert second.returncode == 2
        assert re.search(r"who listens at 127.0.0.1:\d+ has not the same DISTOPT_SECRET", output), output
        assert first.poll() is None

    def test_nodes_that_differ_in_their_number_are_told(self, start):
        launchers = start("meet()", counts=(2, 3))
        outputs = [launcher.communicate(timeout=40)[0] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [2, 2]
        assert [told(output) for output in outputs] == [["node 1 was told --nodes 3, node 0 --nodes 2"]] * 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((2, None, None), "--node and --at must be given with --nodes"),
        ((2, 2, "a:1"), "--node must be from 0 to 1, got 2"),
        ((2, 0, "host"), "--at must be HOST:PORT, with a port from 1 to 65535, got 'host'"),
        ((2, 0, "host:70000"), "--at must be HOST:PORT, with a port from 1 to 65535, got 'host:70000'"),
    ],
)
def test_a_place_must_fit(given, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        place(*given, {nodes.SECRET: "s"})


def test_a_name_may_come_to_be_known_later(monkeypatch):
    """And not for ever."""
    monkeypatch.setenv(nodes.SECRET, "s")
    answers = iter([socket.gaierror(-2, "Name or service not known"), "127.0.0.1"])

    def known(host):
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "gethostbyname", known)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes.listen(Place(2, 0, "later.example", port)).close()

    monkeypatch.undo()
    monkeypatch.setenv("DISTOPT_TIMEOUT", "0.01")
    monkeypatch.setattr(nodes, "LEAST", 0.01)
    with pytest.raises(RuntimeError, match=r"--at: never.invalid has no address after 0.01 s: "):
        nodes.listen(Place(2, 0, "never.invalid", port))


def test_a_secret_is_needed():
    with pytest.raises(ValueError, match="DISTOPT_SECRET must be the same text on all nodes"):
        place(2, 0, "host:1", {})


def test_slurm_tells_the_place():
    environ = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2"}
    environ |= {"SLURM_STEP_NODELIST": "gpu[07-08]", nodes.SECRET: "s"}
    assert place(2, None, None, environ) == Place(2, 1, "gpu07", 20570)
    assert place(2, 0, "other:99", environ) == Place(2, 0, "other", 99)
    with pytest.raises(ValueError, match="--node and --at"):
        place(3, None, None, environ)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nodes", "2", "script.py"], "--nodes 2 must be given with --elastic"),
        (["--elastic", "--nodes", "2", "--over", "mpi", "script.py"], "--over must be torch with --nodes, got mpi"),
        (["--elastic", "--nodes", "2", "--restarts", "1", "script.py"], "--restarts must be 0 with --nodes, got 1"),
    ],
)
def test_options_that_do_not_fit(options, text, capsys):
    assert main(["run", "-n", "2", *options]) == 2
    assert text in capsys.readouterr().err


def test_an_end_that_does_not_read_is_given_up():
    """It must not hold up the launcher that tells all others of a loss."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    link, other = nodes.NodeLink(Connection(os.dup(ours.fileno()))), nodes.NodeLink(Connection(theirs.detach()))
    other.send(ranks=2)
    assert link.receive() == {"ranks": 2}
    limit = socket.SOL_SOCKET, socket.SO_SNDTIMEO
    assert ours.getsockopt(*limit, TIMEVAL.size) == TIMEVAL.pack(nodes.GRACE, 0)
    ours.setsockopt(*limit, TIMEVAL.pack(0, 100_000))  # so that this test need not wait as long
    for _ in range(20):  # more than the buffers of a connection hold
        link.send(message="x" * 1_000_000)
    assert link.receive() is None
    ours.close()
