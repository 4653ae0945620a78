"""The commands of docs/claims.md: each is a program that exists, and those of pytest select tests."""

import os
import re
import shlex
import sys

import pytest
from pages import PROJECT

from distopt.cli import COMMANDS
from launch import finish

TEXT = (PROJECT / "docs" / "claims.md").read_text()
ROWS = [line for line in TEXT.partition("## Without a command")[0].splitlines() if line.startswith("| ")]
CLAIMS = sorted({row.split("|")[2].strip().strip("`") for row in ROWS if "`" in row.split("|")[2]})
PYTEST = [command for command in CLAIMS if " pytest " in command]
PROGRAMS = [command for command in CLAIMS if command not in PYTEST]


def test_every_claim_has_a_command():
    assert len(PYTEST) > 15
    assert len(PROGRAMS) > 15
    told = [row for row in ROWS if "`" not in row.split("|")[2]]
    assert [row.split("|")[1].strip() for row in told] == ["claim"] * 3 + ["each reproduction"]


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_command_is_a_program_that_exists(command):
    first, *rest = shlex.split(command)
    if first == "make":
        assert re.search(rf"^{rest[0]}:", (PROJECT / "Makefile").read_text(), re.M)
        return
    if first == "distopt" and rest[0] != "run":
        assert rest[0] in [module.__name__.rpartition(".")[2] for module in COMMANDS]
        return
    module = rest[rest.index("-m") + 1].replace(".", "/") + ".py" if "-m" in rest else rest[0]
    assert (PROJECT / module).is_file()


@pytest.mark.thorough
@pytest.mark.parametrize("command", PYTEST)
def test_a_command_of_pytest_selects_tests(command):
    words = shlex.split(command)
    selected = words[words.index("pytest") + 1 :]
    env = os.environ | dict(word.split("=") for word in words[: words.index("python")])
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *selected]
    code, output = finish(command, 60, cwd=PROJECT, env=env)
    assert code == 0, output
    assert re.search(r"^\d+(/\d+)? tests? collected", output, re.M), output
