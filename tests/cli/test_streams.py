"""Standard output under ``distopt run``: what a script puts in its place stays there, and is not closed."""

import pytest

from launch import distopt_run

pytestmark = pytest.mark.mpi

SCRIPT = """
import contextlib, io, sys
import distopt

class Tee:
    def __init__(self, under):
        self.write = under.write

    def flush(self):
        pass

what, real = sys.argv[1], sys.stdout
match what:
    case "redirected":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            distopt.world()
            print("hidden")
        assert out.getvalue() == "hidden\\n"
    case "captured":
        sys.stdout = io.TextIOWrapper(io.BytesIO())
        distopt.world()
        print("hidden")
        sys.stdout.flush()
        assert sys.stdout.buffer.getvalue() == b"hidden\\n"
        sys.stdout = real
    case "tee":
        sys.stdout = Tee(sys.stdout)
        distopt.world()
        assert type(sys.stdout) is Tee
    case "none":
        sys.stdout = None
        distopt.world()
        print("hidden")
        sys.stdout = real
    case "put back":
        sys.stdout = io.StringIO()
        del real
        distopt.world()
        print("hidden")
        sys.stdout = sys.__stdout__
print("two\\nlines")
"""


@pytest.mark.parametrize("what", ["redirected", "captured", "tee", "none", "put back"])
def test_what_a_script_puts_in_the_place_of_standard_output_stays_there(what, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, output = distopt_run(2, script, what, timeout=60)
    assert (code, output.count("two"), output.count("lines")) == (0, 2, 2), output
    assert "hidden" not in output


@pytest.mark.parametrize("stream", ["None", "object()"])
def test_an_exception_ends_the_job_whatever_standard_output_is(stream, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, distopt\n"
        "world = distopt.world()\n"
        f"sys.stdout = {stream}\n"
        "if world.rank: raise KeyError('lost')\n"
        "world.barrier()\n"
    )
    code, output = distopt_run(2, script, timeout=60, env={"DISTOPT_TIMEOUT": "20", "DISTOPT_FLIGHT": str(tmp_path)})
    assert code == 1, output
    assert "rank 1: Traceback" in output
    assert "KeyError: 'lost'" in output


TESTS = """
import numpy as np
import distopt

def test_mean():
    x = np.full(2, 1.0 + distopt.world().rank)
    distopt.world().all_reduce(x)
    assert x[0] == 3

def test_print(capsys):
    print("hello")
    assert capsys.readouterr().out == "hello\\n"

def test_wrong():
    assert 2 + 2 == 5, "a real failure"
"""


def test_tests_that_run_on_ranks_report_their_failures(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    code, output = distopt_run(2, *command, timeout=120, cwd=tmp_path)
    assert code == 1, output
    assert output.count("2 passed") == output.count("1 failed") == 2, output
    assert "a real failure" in output
