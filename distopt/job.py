"""What ``distopt run`` knows of its ranks: who they are, and how they came to their ends.

Each rank leaves marks, empty files in a folder that the launcher made: a rank that is gone without a mark has been
killed, or has left by ``os._exit``, whatever its exit code says.  How far it came stands on a page that both see.
"""

import atexit
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

FOLDER = "DISTOPT_JOB"  # the environment variable that names it
PID, VOTES, DONE, SPOKEN, STOPS = "pid", "votes", "done", "spoken", "stops"

HEAD, PAGE = struct.Struct("<qq"), 256  # a page: votes, the length of the last one's name, the name

_rank: int | None = None  # among all of the job
_page: mmap.mmap | None = None
_votes = 0


def enter(rank: int) -> None:
    """This process is a rank from here on; once is enough."""
    global _rank, _page
    if _rank is not None:
        return
    _rank, folder = rank, _folder()
    if folder is not None:
        handle = os.open(folder / f"{rank}.{VOTES}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(handle, PAGE)
        _page = mmap.mmap(handle, PAGE)
        os.close(handle)
        mark(f"{PID}.{os.getpid()}")
        atexit.register(mark, DONE)


def note(vote: str) -> None:
    """This rank comes to a vote."""
    global _votes
    if _page is not None:
        _votes += 1
        text = vote.encode()[: PAGE - HEAD.size]
        _page[: HEAD.size + len(text)] = HEAD.pack(_votes, len(text)) + text


def mark(what: str) -> None:
    """``DONE``: its interpreter came to its end; ``SPOKEN``: it has said why it fails; ``STOPS``: it takes signals."""
    folder = _folder()
    if folder is not None and _rank is not None and os.getpid() == _process:
        (folder / f"{_rank}.{what}").touch(mode=0o600)


class Rank(NamedTuple):
    """One rank, as its marks tell."""

    rank: int
    pid: int
    marks: frozenset[str]
    votes: int
    last: str  # vote


def entered(folder: Path) -> list[Rank]:
    """All ranks that have entered."""
    names = [f.name.split(".") for f in folder.iterdir()]
    found = []
    for rank, kind, *rest in names:
        if kind == PID:
            page = (folder / f"{rank}.{VOTES}").read_bytes()
            votes, length = HEAD.unpack_from(page)
            last = page[HEAD.size : HEAD.size + length].decode(errors="replace")
            marks = frozenset(n[1] for n in names if n[0] == rank)
            found.append(Rank(int(rank), int(rest[0]), marks, votes, last))
    return sorted(found)


def _folder() -> Path | None:
    return Path(os.environ[FOLDER]) if FOLDER in os.environ else None


_process = os.getpid()  # children leave no marks
