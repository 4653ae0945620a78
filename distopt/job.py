"""What ``distopt run`` knows of its ranks: who they are, how far they came, and how they came to their ends.

Each rank leaves marks, empty files in a folder that the launcher made: a rank that is gone without a mark has been
killed, or was left by an exit of C's.  How far it came stands on a page that both see.
"""

import atexit
import ctypes
import mmap
import os
import signal
import struct
from pathlib import Path
from typing import NamedTuple

FOLDER = "DISTOPT_JOB"  # the environment variable that names it
LOOPBACK = "-loopback"  # of the library's name that the launcher is given
PID, VOTES, SEGMENT = "pid", "votes", "segment"
MPI, DONE, SPOKEN, STOPS, EXIT, OS_EXIT = "mpi", "done", "spoken", "stops", "exit", "os_exit"

HEAD, PAGE = struct.Struct("<qq"), 256  # a page: votes, the length of the last one's name, the name
PR_SET_PDEATHSIG = 1  # of linux/prctl.h

_rank: int | None = None  # among all of the job
_folder: Path | None = None
_process = 0  # children leave no marks
_page: mmap.mmap | None = None
_votes = 0


def enter(rank: int, folder: Path) -> None:
    """This process is a rank of ``distopt run`` from here on."""
    global _rank, _folder, _process, _page
    _rank, _folder, _process = rank, folder, os.getpid()
    handle = os.open(folder / f"{rank}.{VOTES}", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(handle, PAGE)
    _page = mmap.mmap(handle, PAGE)
    os.close(handle)
    mark(PID, _process)
    atexit.register(mark, DONE)


def is_rank() -> bool:
    """Is this process a rank of ``distopt run``?"""
    return _folder is not None and os.getpid() == _process


def note(vote: str) -> None:
    """This rank comes to a vote."""
    global _votes
    if _page is not None:
        _votes += 1
        text = vote.encode()[: PAGE - HEAD.size]
        _page[: HEAD.size + len(text)] = HEAD.pack(_votes, len(text)) + text


def mark(what: str, detail: object = "") -> None:
    """Leave a mark, if this is a rank.

    ``MPI``: it came to MPI's start; ``DONE``: its interpreter came to its end; ``STOPS``: it takes signals; ``SPOKEN``,
    ``EXIT``, ``OS_EXIT``: it ends with this code, the first after it has said why; ``SEGMENT``: it maps this memory.
    """
    if _folder is not None and is_rank():
        (_folder / f"{_rank}.{what}.{detail}").touch(mode=0o600)


class Rank(NamedTuple):
    """One rank, as its marks tell."""

    rank: int
    pid: int
    marks: dict[str, set[str]]  # the details of each
    votes: int
    last: str  # vote


def entered(folder: Path) -> list[Rank]:
    """All ranks that have entered."""
    marks: dict[int, dict[str, set[str]]] = {}
    for name in os.listdir(folder):
        rank, kind, *detail = name.split(".", 2)
        marks.setdefault(int(rank), {}).setdefault(kind, set()).update(detail)
    return [_rank_of(rank, found, folder) for rank, found in sorted(marks.items()) if PID in found]


def _rank_of(rank: int, marks: dict[str, set[str]], folder: Path) -> Rank:
    page = (folder / f"{rank}.{VOTES}").read_bytes()
    votes, length = HEAD.unpack_from(page)
    (pid,) = marks[PID]
    return Rank(rank, int(pid), marks, votes, page[HEAD.size : HEAD.size + length].decode(errors="replace"))


def absent() -> str:
    """Lines on the ranks of ``distopt run`` that have not come to MPI's start, where others wait for them."""
    ranks = entered(_folder) if _folder else []
    told = {"T": "stopped", "t": "stopped", "X": "dead", "Z": "dead"}
    missing = [(rank.rank, told.get(state(rank.pid), "it runs")) for rank in ranks if MPI not in rank.marks]
    return "\n".join(f"  rank {rank}: has not come to it ({how})" for rank, how in missing)


def state(pid: int) -> str:
    """The letter that ps(1) shows for a process; 'X' if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def end_with_parent() -> None:
    """From now on the end of the process that started this one ends this one too; Linux alone can do that."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
