"""distopt run and distopt doctor, as a user starts them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import distopt
from distopt.cli import main
from distopt.run import doctor as doctor_command
from distopt.run import launcher
from distopt.run.launcher import Launcher, check_brands
from distopt.run.processes import descendants
from launch import distopt_run, find_launcher, finish, needs_mpi
from tiers import any_brand


def doctor(*args, **options):
    return finish([sys.executable, "-m", "distopt", "doctor", *args], 300, **options)


@needs_mpi
def test_doctor_reports_what_is_installed_and_a_remedy_for_what_is_not():
    code, output = doctor()
    assert code == 0, output
    for text in (
        f"ok    distopt {distopt.__version__}",
        "host library",
        "runs at",
        "mpi4py",
        "two ranks added an array",
    ):
        assert text in output
    findings = json.loads(doctor("--json")[1])
    assert {f["status"] for f in findings} <= {"ok", "warn"}
    assert all(f["fix"] for f in findings if f["status"] != "ok"), "every finding that is not ok says what to do"


@needs_mpi
def test_prints_of_several_lines_are_not_torn(tmp_path):
    """Line buffering would pass on what is before the last newline, and other ranks' text came between."""
    (tmp_path / "script.py").write_text(
        "import distopt\nrank = distopt.world().rank\n"
        "for _ in range(300): print(f'{rank} one\\n{rank} two\\n{rank} three')\n"
    )
    code, output = distopt_run(4, tmp_path / "script.py")
    lines = [line.replace("<stdout>:", "") for line in output.splitlines()]  # Open MPI's tag is longer
    assert code == 0, output
    assert {line: lines.count(line) for line in set(lines)} == {
        f"[{rank}] {rank} {word}": 300 for rank in range(4) for word in ("one", "two", "three")
    }


def test_distopt_alone_names_its_commands(capsys):
    assert main([]) == 2
    output = capsys.readouterr().out
    assert all(command in output for command in ("run", "doctor", "prove", "advise"))


@needs_mpi
def test_doctor_warns_of_open_mpis_slow_tcp_between_hosts():
    warning = "warn  a bare mpirun runs a TCP network in one direction at a time"
    environment = dict.fromkeys(launcher.OPEN_MPI_TCP)
    assert (warning in doctor(env=environment)[1]) == (find_launcher().brand == "Open MPI")
    assert warning not in doctor(env=launcher.OPEN_MPI_TCP)[1]


@pytest.mark.parametrize("wrong", [[""], ["lost", ""], ["lost", "still lost"]])
@pytest.mark.parametrize("load", [0.5, 40.0])
def test_doctor_calls_two_ranks_that_fail_twice_broken_unless_the_machine_has_much_other_work(wrong, load, monkeypatch):
    answers = iter(wrong)
    monkeypatch.setattr(doctor_command, "_wrong_sum", lambda launcher: next(answers))
    monkeypatch.setattr(doctor_command, "find_launcher", lambda: Launcher("/bin/mpiexec", "MPICH"))
    monkeypatch.setattr(doctor_command, "check_brands", lambda launcher: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    _, found = doctor_command.mpi()
    worst = "fail" if load < 4 else "warn"
    assert found.status == ("ok", "warn", worst)[len(wrong) - (wrong[-1] == "")]
    assert wrong[-1] in found.text
    assert ("40 processes want 2 cores" in found.fix) == (load > 4 and wrong != [""])


@needs_mpi
def test_doctor_leaves_no_rank_of_a_trial_that_hangs(monkeypatch):
    """Ranks hold their launcher's pipes, for which it was waited without end."""
    monkeypatch.setattr(doctor_command, "SELF_TEST", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor_command, "TRIAL_SECONDS", 3.0)
    before = set(descendants(os.getpid()))
    assert doctor_command._wrong_sum(find_launcher()) == "no answer within 3 s"
    assert set(descendants(os.getpid())) <= before


@needs_mpi
@pytest.mark.any_brand
def test_the_trial_of_doctor_has_no_limit_of_the_shell(monkeypatch):
    monkeypatch.setenv("DISTOPT_TIMEOUT", "0.000001")
    assert [f.status for f in doctor_command.mpi() if "two ranks" in f.text] == ["ok"]


@pytest.mark.thorough
def test_doctor_without_mpi_warns_and_says_what_to_install(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('gone')")
    code, output = doctor(env={"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)})
    assert code == 0, output
    assert "warn  MPI: " in output
    assert "pip install 'distopt[mpi]'" in output


@needs_mpi
def test_run_passes_arguments_tags_lines_and_sets_threads(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys; print('threads', os.environ['OMP_NUM_THREADS'], *sys.argv[1:], end='!' * 50 + chr(10))"
    )
    code, output = distopt_run(2, script, "-n", "7", "--flag", env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": None})
    assert code == 0, output
    lines = sorted(output.splitlines())
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"[{rank}]")
        assert line.endswith(f"threads {share} -n 7 --flag" + "!" * 50)


@needs_mpi
@pytest.mark.any_brand
def test_run_starts_a_module_on_every_rank(tmp_path):
    code, output = distopt_run(2, "-m", "timeit", "-n", "1", "-r", "1", "pass")
    assert code == 0
    assert output.count("1 loop") == 2


@needs_mpi
@pytest.mark.parametrize("code", [3, *any_brand(0, 1, 42)])
def test_run_has_the_scripts_exit_code(code, tmp_path):
    script = tmp_path / "code.py"
    script.write_text(f"import sys, distopt; distopt.world(); sys.exit({code})")
    assert distopt_run(2, script)[0] == code


@needs_mpi
def test_run_ends_a_job_at_its_time_limit_and_kills_ranks_that_ignore_signals(tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, time, distopt\nworld = distopt.world()\n"
        "if world.rank: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", "--timeout", "10", str(script)]
    code, output = finish(command, 30)
    assert code == 124, output
    assert "not done after 10 s; ended the job" in output
    _all_gone(output)


CODES = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@needs_mpi
@pytest.mark.parametrize("options", [[], ["--elastic", "--over", "mpi"]])
@pytest.mark.parametrize(("number", "wanted"), CODES)
def test_run_passes_signals_on_and_has_their_exit_code(number, wanted, options, tmp_path):
    if options and find_launcher().brand != "Open MPI":
        pytest.skip("MPICH waits for the dead")
    code, lines = asked_to_end(number, "time.sleep(60)", options, tmp_path)
    assert code == wanted, lines
    _all_gone(lines)


@needs_mpi
def test_a_job_that_is_asked_to_end_has_the_code_of_ranks_that_end_by_themselves(tmp_path):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True); time.sleep(60)"
    code, lines = asked_to_end(signal.SIGTERM, script, [], tmp_path)
    assert code == 7, lines


def asked_to_end(number, rest, options, folder):
    """(exit code, what two ranks have printed until then) of a job that gets a signal."""
    script = folder / "script.py"
    script.write_text(f"import os, signal, sys, time, distopt; distopt.world(); print(os.getpid(), flush=True); {rest}")
    command = [sys.executable, "-m", "distopt", "run", "-n", "2", *options, str(script)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [job.stdout.readline() for _ in range(2 + 2 * ("print" in rest))]
    job.send_signal(number)
    job.communicate(timeout=60)
    return job.returncode, "".join(lines)


def _all_gone(output):
    """The ranks printed their process ids; none of them may be left."""
    pids = [int(line.split()[-1]) for line in output.splitlines() if line.startswith("[") and line[-1:].isdigit()]
    assert len(pids) == 2, output
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return
        time.sleep(0.1)
    pytest.fail(f"ranks {pids} are still there")


def test_run_needs_ranks_and_a_script(capsys):
    assert main(["run", "-n", "0", "x.py"]) == 2
    assert "-n must be at least 1, got 0" in capsys.readouterr().err
    assert main(["run", "-n", "2"]) == 2
    assert "the script must be given, got none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "x.py"])


def test_run_without_mpiexec_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(launcher.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["run", "-n", "2", "x.py"]) == 2
    assert "there is no mpiexec in this environment or on PATH: pip install 'distopt[mpi]'" in capsys.readouterr().err


def test_an_mpiexec_of_another_brand_than_mpi4pys_is_refused(monkeypatch):
    monkeypatch.setattr(launcher, "library_brand", lambda: "Open MPI")
    check_brands(Launcher("/x/mpiexec", "Open MPI"))
    with pytest.raises(
        RuntimeError, match="/x/mpiexec is MPICH's, but mpi4py runs on Open MPI: each process would be alone"
    ):
        check_brands(Launcher("/x/mpiexec", "MPICH"))


@needs_mpi
@pytest.mark.skipif(
    "DISTOPT_OTHER_MPIEXEC" not in os.environ, reason="needs the other brand's mpiexec: .ci/run names one"
)
def test_a_real_mpiexec_of_the_other_brand_does_not_train():
    """N singletons must not train: the job ends with an error, whichever side notices."""
    other = os.environ["DISTOPT_OTHER_MPIEXEC"]
    script = "import distopt; print('a world of', distopt.world().size)"
    brand = "Open MPI" if find_launcher().brand == "MPICH" else "MPICH"
    started = Launcher(other, brand)
    code, output = finish([*started.command(2), sys.executable, "-c", script], 30, env=started.environment(2))
    assert code != 0, output
    assert "a world of" not in output


ADVISE = [sys.executable, "-m", "distopt", "advise", "--no-measure"]


@pytest.mark.thorough
def test_a_reader_of_standard_output_may_close_it_early():
    """As ``distopt advise | head`` does."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(ADVISE, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.stderr, done.returncode) == (b"", 0)


@pytest.mark.thorough
def test_a_command_that_fails_does_so_where_nobody_reads_what_it_says():
    read, write = os.pipe()
    os.close(read)
    script = (
        "import sys; from distopt import cli; from distopt.run import trace\n"
        "trace.main = lambda args: print('said') or 3\n"
        "sys.exit(cli.main(['trace', '.']))"
    )
    command = [sys.executable, "-E", "-c", script]  # with PYTHONUNBUFFERED it would end in the middle
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.stderr, done.returncode) == (b"", 3)


@pytest.mark.thorough
def test_a_full_disk_is_an_error_of_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(ADVISE, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "distopt advise: [Errno 28] No space left on device\n")


@pytest.mark.thorough
def test_characters_that_the_terminal_lacks_are_escaped(tmp_path):
    (tmp_path / "\u00e9.json").write_text('{"a": [1000000]}')
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*ADVISE, "--model", "\u00e9.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.partition(" on")[0]) == (0, r"\xe9.json")


def test_ctrl_c_exits_with_130_and_no_traceback(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("distopt.lab.commands.setting.wire", interrupted)
    assert main(["volume"]) == 130


def test_help_texts_have_no_markup(capsys):
    for command in ("volume", "bench"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "``" not in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["0", "-1", "nan"])
def test_a_time_limit_that_is_not_above_0_is_refused(limit, capsys):
    assert main(["run", "-n", "1", "--timeout", limit, "script.py"]) == 2
    assert f"--timeout must be above 0, got {limit}" in capsys.readouterr().err
