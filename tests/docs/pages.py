"""The pages of the documentation: README.md and docs/, and their blocks.

As a script, ``pages.py NEEDS PAGE ...``, it runs the Python blocks of pages that need '', torch, cupy or jax, each in a
namespace of its own; a traceback shows the page and the line.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
README = PROJECT / "README.md"
PAGES = [README, *sorted((PROJECT / "docs").rglob("*.md"))]
NOT_RUN = "*Not run by the tests"  # how the line below a shell block begins that no test can run
NEEDS = re.compile(r"^\s*(?:import|from) (torch|cupy|jax)\b", re.M)


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        page: the page.
        line: the number of the line that opens it.
        language: what follows the fence.
        text: what is between the fences.
        below: the next line below it that is not empty.
        needs: what it needs beside distopt: 'torch', 'cupy', 'jax' or ''.
    """

    page: Path
    line: int
    language: str
    text: str
    below: str
    needs: str


def blocks(page, *languages):
    """The page's blocks in these languages."""
    lines, first = page.read_text().splitlines(), None
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and first is None:
            first = number
        elif line.startswith("```"):
            language, text = lines[first - 1].removeprefix("```"), "\n".join(lines[first : number - 1])
            if language in languages:
                below, needs = next(filter(None, lines[number:]), ""), NEEDS.search(text)
                yield Block(page, first, language, text, below, needs[1] if needs else "")
            first = None


def without_blocks(page):
    """The page's text."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def run(page, needs=""):
    """Run a page's Python blocks that need this beside distopt, and return how many there are."""
    found = [block for block in blocks(page, "python") if block.needs == needs]
    for block in found:
        code = compile("\n" * block.line + block.text, page, "exec")
        exec(code, {"__name__": "__main__"})
    if "distopt" in sys.modules:
        from distopt.comm import Logical, world

        if isinstance(comm := world(), Logical):
            comm.comm._logical = None  # the next page is a script of its own, whose processes are ranks
    return len(found)


def main():
    """Run the Python blocks of pages, one after the other."""
    this = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != this]  # a block sees what a script of a reader sees
    for page in sys.argv[2:]:
        run(Path(page), sys.argv[1])


if __name__ == "__main__":
    main()
