"""What the README says is what happens: every Python block runs on two ranks; .ci/run starts with its commands."""

import re
import sys
from pathlib import Path

import pytest

from launch import distopt_run, finish, needs_mpi
from test_layers import LEVEL

PROJECT = Path(__file__).parent.parent
README = (PROJECT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = re.findall(r"```sh\n(.*?)```", README, re.S)[0].splitlines()


@needs_mpi
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_block(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[block])
    code, output = distopt_run(2, script)
    assert code == 0, output


@pytest.mark.thorough
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_block_alone(block, tmp_path):
    """Without a launcher, as one rank."""
    code, output = finish([sys.executable, "-c", BLOCKS[block]], 60, cwd=tmp_path)
    assert code == 0, output


def test_there_are_blocks_and_two_commands():
    assert len(BLOCKS) >= 4
    assert len(COMMANDS) == 2


def test_the_tree_names_what_is_there():
    tree = re.search(r"```\nnative/.*?```", README, re.S)[0]
    rooms = re.findall(r"^  (\w+)", tree, re.M)
    levels = [LEVEL[room] for room in rooms]
    assert levels == sorted(levels, reverse=True), "imports go down this list"
    assert {p.stem for p in (PROJECT / "distopt").iterdir() if not p.stem.startswith(("_", "py", "."))} == set(rooms)
