"""The pages of the documentation: README.md and docs/, and their blocks.

As a script, ``pages.py PAGE ...``, it runs the Python blocks of pages, each in a namespace of its own; a traceback
shows the page and the line.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
README = PROJECT / "README.md"
PAGES = [README, *sorted((PROJECT / "docs").rglob("*.md"))]
NOT_RUN = "*Not run by the tests"  # how the line below a shell block begins that no test can run


class Block(NamedTuple):
    """A fenced block, the number of the line that opens it, and the text of the next line below it."""

    page: Path
    line: int
    language: str
    text: str
    below: str


def blocks(page, *languages):
    """The page's blocks in these languages."""
    lines, first = page.read_text().splitlines(), None
    for number, line in enumerate(lines, 1):
        if line.startswith("```") and first is None:
            first = number
        elif line.startswith("```"):
            language, text = lines[first - 1].removeprefix("```"), "\n".join(lines[first : number - 1])
            if language in languages:
                yield Block(page, first, language, text, next(filter(None, lines[number:]), ""))
            first = None


def without_blocks(page):
    """The page's text."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def run(page):
    """Run a page's Python blocks, and return how many there are."""
    found = list(blocks(page, "python"))
    for block in found:
        code = compile("\n" * block.line + block.text, page, "exec")
        exec(code, {"__name__": "__main__"})
    return len(found)


def main():
    """Run the Python blocks of the pages that are named."""
    this = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder for folder in sys.path if folder != this]  # a block sees what a script of a reader sees
    for page in map(Path, sys.argv[1:]):
        run(page)


if __name__ == "__main__":
    main()
