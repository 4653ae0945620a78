"""What README.md and the pages under docs/ say is what happens: blocks run, links lead somewhere, names are names.

README's blocks run in test_two_ranks.py too, and .ci/run starts with its two commands.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import os
import re
import sys
import threading

import pages
import pytest
from layers import DOORS, LEVEL
from pages import PAGES, PROJECT, README

import distopt
from launch import distopt_run, finish, needs_mpi

COMMANDS = next(pages.blocks(README, "sh")).text.splitlines()
SHELL = [b for page in PAGES for b in pages.blocks(page, "sh", "console") if b.text.splitlines() != COMMANDS]
RUN = [block for block in SHELL if not block.below.startswith(pages.NOT_RUN)]
OWN_GROUP = PROJECT / "docs/guides/torch.md"  # its blocks make a process group
CODE = [p for folder in ("distopt", "tests", "native", "examples") for p in (PROJECT / folder).rglob("*.*")]
CODE = [p for p in CODE if p.suffix in (".py", ".cu", ".h", ".cpp")]


def name_of(page):
    return str(page.relative_to(PROJECT))


def with_python(needs):
    """The pages with Python blocks that need this beside distopt."""
    return [page for page in PAGES if any(block.needs == needs for block in pages.blocks(page, "python"))]


@needs_mpi
def test_python_blocks_of_pages_run_on_two_ranks(tmp_path):
    """One page after the other in the same processes; a traceback says which."""
    code, output = distopt_run(2, pages.__file__, "", *with_python(""), cwd=tmp_path, timeout=200)
    assert code == 0, output


@pytest.mark.torch
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=needs_mpi if p == OWN_GROUP else (), id=name_of(p)) for p in with_python("torch")]
)
def test_python_blocks_of_pages_with_torch_run_on_two_ranks(page, tmp_path):
    """Each in processes of its own."""
    pytest.importorskip("torch", reason="torch is missing: pip install 'distopt[torch]'")
    import forks

    command = [pages.__file__, "torch", page]
    if page == OWN_GROUP:
        code, output = distopt_run(2, *command, cwd=tmp_path, timeout=60)
    else:
        code, output = forks.run(forks.torchruns(), 2, command, 60, folder=tmp_path)
    assert code == 0, output


@needs_mpi
@pytest.mark.torch
@pytest.mark.parametrize("page", with_python("jax"), ids=name_of)
def test_python_blocks_of_pages_with_jax_run_on_two_ranks(page, tmp_path):
    pytest.importorskip("optax", reason="jax or optax is missing: pip install jax optax")
    code, output = distopt_run(2, pages.__file__, "jax", page, cwd=tmp_path, timeout=120)
    assert code == 0, output


@pytest.mark.full
@pytest.mark.parametrize("needs", ["", pytest.param("torch", marks=pytest.mark.torch)])
def test_python_blocks_of_pages_run_on_one_rank(needs, tmp_path):
    """Without a launcher, as one rank."""
    code, output = finish([sys.executable, pages.__file__, needs, *with_python(needs)], 200, cwd=tmp_path)
    assert code == 0, output


@pytest.mark.device
@pytest.mark.parametrize("page", with_python("cupy"), ids=name_of)
def test_python_blocks_of_pages_run_on_stand_ins_for_gpus(page, arithmetic, monkeypatch):
    on_gpus = pytest.importorskip("doubles.ranks").on_gpus

    def main(comm):
        local.comm = comm
        return pages.run(page, "cupy")

    local = threading.local()
    monkeypatch.setattr(distopt, "world", lambda: local.comm)
    assert min(on_gpus(2, main)) > 0


@needs_mpi
@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{name_of(block.page)}:{block.line}")
def test_shell_blocks_of_pages_run(block, tmp_path):
    """In a folder with the examples, with this environment's commands."""
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    code, output = finish(command, 120, cwd=tmp_path, env={"PATH": path})
    assert code == 0, output


def test_the_readme_is_short_and_begins_with_two_commands():
    assert len(COMMANDS) == 2
    assert len(README.read_text().splitlines()) <= 150
    assert len(list(pages.blocks(README, "python"))) >= 2


def test_shell_blocks_that_do_not_run_are_counted():
    text = (PROJECT / "docs" / "contributing.md").read_text()
    counts = re.search(r"of the other shell blocks\s+(\d+) run and (\d+)", text)
    assert [int(n) for n in counts.groups()] == [len(RUN), len(SHELL) - len(RUN)]


def anchors(page):
    """The links that a page's headings have."""
    headings = re.findall(r"^#+ (.+)$", pages.without_blocks(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", pages.without_blocks(page))
    for link in links:
        assert "://" not in link, f"{link} is outside of the repository"
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert target.is_relative_to(PROJECT), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_on_the_index():
    index = PROJECT / "docs" / "index.md"
    linked = {(index.parent / path).resolve() for path in re.findall(r"\]\(([\w./-]+\.md)\)", index.read_text())}
    assert linked | {index} == set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_files_and_tests_are_names(page):
    """``tests/test_x.py::test_y`` or a file; a test alone is in the file that a line 'Tests: ...' above has named."""
    file = None
    for line in pages.without_blocks(page).splitlines():
        if named := re.search(r"Tests: `(.+)`", line):
            file = PROJECT / named[1]
        for code in re.findall(r"`([^`]+)`", line):
            path, _, function = code.partition("::")
            if re.fullmatch(r"(tests|benchmarks|examples|native|distopt|docs)/[\w./-]*", path):
                assert (PROJECT / path).exists(), path
            elif re.fullmatch(r"test_\w+", code):
                path, function = file, code
            if function and PROJECT / path in CODE:
                assert f"def {function}(" in (PROJECT / path).read_text(), code


@pytest.mark.parametrize("file", [f for f in CODE if "docs/" in f.read_text()], ids=name_of)
def test_pages_that_code_names_are_there(file):
    for page in re.findall(r"(?<![\w/])docs/[\w/]+\.md", file.read_text()):
        assert (PROJECT / page).is_file(), page


SENTENCE = "Numbers of laws and bugs are explained in docs/concepts/laws.md."


def comments_of(file):
    return "\n".join(a or b for a, b in re.findall(r'"""(.*?)"""|(?:#|//) ([^\n]*)', file.read_text(), re.S))


def test_numbers_of_laws_and_bugs_are_on_their_page():
    """A comment that says Law 3, or S9, can be looked up, and its module says where: docs/concepts/laws.md."""
    text = (PROJECT / "docs" / "concepts" / "laws.md").read_text()
    known = set(re.findall(r"^\| ([A-Z]\d+b?) \|", text, re.M)) | set(re.findall(r"^### (Law \d):", text, re.M))
    for file in CODE:
        comments = comments_of(file)
        used = set(re.findall(r"\b([SDPGTML]\d{1,2}b?)(?=[:,)]| to |$)", comments, re.M))
        used |= {f"Law {number}" for number in re.findall(r"\b[Ll]aw (\d)", comments)}
        assert used <= known, f"{file} has {used - known}"
        assert not used or SENTENCE in comments, f"the docstring of {file} should say '{SENTENCE}'"


@pytest.mark.parametrize("words", ["Seed 0", "DESIGN", "SEMANTICS"])
def test_nothing_points_to_papers_outside_of_the_repository(words):
    for file in [*CODE, *PAGES]:
        assert words not in comments_of(file), file


def test_tests_are_not_named_after_numbers():
    for file in CODE:
        assert not re.search(r"def test_[a-z]\d+_", file.read_text()), file


def test_the_tree_names_what_is_there():
    text = (PROJECT / "docs" / "concepts" / "architecture.md").read_text()
    tree = re.search(r"```\nnative/.*?```", text, re.S)[0]
    rooms = [room for line in re.findall(r"^  ((?:\w+, )*\w+)", tree, re.M) for room in line.split(", ")]
    levels = [LEVEL[room] for room in rooms if room not in DOORS]
    assert levels == sorted(levels, reverse=True), "imports go down this list"
    assert {p.stem for p in (PROJECT / "distopt").iterdir() if not p.stem.startswith(("_", "py", "."))} == set(rooms)
