"""The marks by which ``distopt run`` learns of its ranks: who they are, how far they came, and how they ended.

Each rank leaves marks, empty files in a folder that the launcher made: a rank that is gone without a mark was killed,
or left by C's ``exit``.  Its last vote, and what would be lost with it, stand on a memory page that both map.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import io
import itertools
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "DISTOPT_JOB"  # the environment variable that names the folder of marks
# the environment variable that has the number of ranks that the launcher starts
RANKS = "DISTOPT_RUN"
AWAITED = "awaited"  # the file in it that says that a process waits to be let in
# the folder in it of what the launcher asks ranks to start, each a file named by its number
REQUESTS = "requests"
LOOPBACK = "-loopback"  # the suffix of the library that the launcher preloads
MEMORY = Path("/dev/shm")
# how the names of MPICH's and of Open MPI's shared memory begin
SEGMENTS = ("mpich_shm_", "sm_segment.")
# told in the place of what is lost with a rank
ADOPTED = "the others adopt its logical ranks"
PID, VOTES, SEGMENT, CRASH, ALIVE = "pid", "votes", "segment", "crash", "alive"
MPI, DONE, SPOKEN, STOPS, LATE, EXIT, OS_EXIT = "mpi", "done", "spoken", "stops", "late", "exit", "os_exit"
STARTED, CAME = "started", "came"

# A page: votes, the length of the last one's name, the name; at TOLD the length of a text, the text.
HEAD, LENGTH, TOLD, PAGE = struct.Struct("<qq"), struct.Struct("<q"), 256, 512
TOGETHER = 5.0  # seconds for all ranks to leave by os._exit(0)
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# Linux releases what an ended process had open from the highest number down (4.4 and later): the pipe must be closed
# before the sockets over which MPI's launcher hears of the end, and ends all others.
HIGH = 100

starter: Any = None  # MPI communicator of the rank that has started this process, and of this one
_rank: int | None = None  # this process's number in the job
_folder: Path | None = None
_awaited: str | None = None  # the path of the file AWAITED
_requests: Path | None = None  # the folder REQUESTS, if there is one
_process = 0  # its process ID: forked children leave no marks
_page: mmap.mmap | None = None
_votes = 0
_complaints = itertools.count()
_outputs: list[io.TextIOWrapper] = []  # standard output as it was, and as it is


class _Lines(io.TextIOWrapper):
    """Text that is passed on at the end of each write that ends a line."""

    # Line buffering passes on the text of `print("two\nlines")` before the end of its last line, and the launcher tags
    # what it reads: lines of other ranks would come between.

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.endswith("\n"):
            self.flush()
        return written


def write_whole_lines() -> None:
    """Standard output passes on lines as soon as they end, so that what a rank has said is not lost with it."""
    # Call it before the script runs: what stands at `sys.stdout` later may be the script's own.
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        out.flush()
        # Both are kept, since the end of either closes the buffer that they share.
        _outputs[:] = out, _Lines(out.buffer, out.encoding, out.errors)
        sys.stdout = _outputs[1]
        setattr(sys, "__stdout__", sys.stdout)  # noqa: B010  mypy takes it for a constant


def enter(rank: int, folder: Path) -> None:
    """Make this process a rank of ``distopt run``, with a folder of marks."""
    global _rank, _folder, _process, _page, _awaited, _requests
    _rank, _folder, _process, _awaited = rank, folder, os.getpid(), str(folder / AWAITED)
    _requests = folder / REQUESTS if (folder / REQUESTS).exists() else None
    handle = os.open(folder / f"{rank}.{VOTES}", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(handle, PAGE)
    _page = mmap.mmap(handle, PAGE)
    os.close(handle)
    os.mkfifo(folder / f"{rank}.{ALIVE}", 0o600)
    alive = os.open(folder / f"{rank}.{ALIVE}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # this process may not have so many files open
        fcntl.fcntl(alive, fcntl.F_DUPFD_CLOEXEC, max(HIGH, int(os.environ.get("PMI_FD", 0))))
        os.close(alive)  # the other one stays open for as long as this process lives
    mark(PID, _process)
    atexit.register(mark, DONE)
    # -X faulthandler: the traceback of a crash goes to standard error
    if not faulthandler.is_enabled():
        faulthandler.enable((folder / f"{rank}.{CRASH}").open("w"), all_threads=False)
        # a child's crash, on standard error, is not the rank's
        os.register_at_fork(after_in_child=faulthandler.enable)


def memory(folder: Path | None = None) -> Path | None:
    """Return the folder in this machine's memory for what outlives a process of a job, by default of this one's job."""
    folder = folder or _folder
    return None if folder is None else MEMORY / f"distopt-{folder.name}"


def is_rank() -> bool:
    """Tell if this process is a rank of ``distopt run``."""
    return _folder is not None and os.getpid() == _process


def awaited() -> bool:
    """Tell if the launcher knows of a process that waits to be admitted."""
    return _awaited is not None and os.path.exists(_awaited)


def request(member: int, text: str, folder: Path) -> None:
    """Ask the ranks of a job to start one more."""
    # text: what `requested` returns.
    # folder: of the job; it has a folder `REQUESTS`.
    whole = folder / f"{REQUESTS}.part"
    whole.write_text(text)
    whole.rename(folder / REQUESTS / str(member))


def requested() -> str:
    """Return what the launcher asks this rank to start next, and forget it; '' if it asks for nothing."""
    names = os.listdir(_requests) if _requests else []
    if _requests is None or not names:
        return ""
    path = _requests / min(names, key=int)
    text = path.read_text()
    path.unlink()
    return text


def note(vote: str) -> None:
    """Write onto this rank's page which vote it comes to."""
    global _votes
    if _page is not None:
        _votes += 1
        text = vote.encode()[: TOLD - HEAD.size]
        _page[: HEAD.size + len(text)] = HEAD.pack(_votes, len(text)) + text


def tell(text: str) -> None:
    """Write onto this rank's page what else is lost if it ends now, in place of what was there."""
    # text: a few words, such as 'its residual (norm 0.31 after step 10)'.
    if _page is not None:
        words = text.encode()[: PAGE - TOLD - LENGTH.size]
        _page[TOLD : TOLD + LENGTH.size + len(words)] = LENGTH.pack(len(words)) + words


def complain() -> None:
    """Leave a mark that this rank has waited for others for too long, at the vote it came to last."""
    mark(LATE, f"{_votes}.{next(_complaints)}")


def mark(what: str, detail: object = "") -> None:
    """Leave a mark, if this process is a rank of ``distopt run``."""
    # what: the kind of mark.  `MPI`: it came to MPI's start; `DONE`: its interpreter came to its end; `STOPS`: it takes
    # signals; `SPOKEN`, `EXIT`, `OS_EXIT`: it ends with this code, the first after it has said why; `LATE`: it waits
    # for too long; `STARTED`: MPI's start is over, in a process that a rank has started; `CAME`: others have admitted
    # it; `SEGMENT`: it maps this memory.
    # detail: the code or name that belongs to the mark.
    if _folder is not None and is_rank():
        (_folder / f"{_rank}.{what}.{detail}").touch(mode=0o600)


def segments(maps: Path = Path("/proc/self/maps")) -> set[str]:
    """The names of the shared memory segments of an MPI that a process maps, as far as this one may look."""
    with contextlib.suppress(OSError):
        names = (line.rpartition("/")[2] for line in maps.read_text().splitlines() if "/dev/shm/" in line)
        return {name for name in names if name.startswith(SEGMENTS)}
    return set()


def leave_together() -> None:
    """Wait a while for all ranks to come to ``os._exit(0)`` as this one has."""
    # A launcher of MPI ends the others as soon as one has left so.  There is no wait for ranks that wait for this one.
    deadline = time.monotonic() + TOGETHER
    while _folder is not None and is_rank() and time.monotonic() < deadline:
        ranks = entered(_folder)
        ahead = any(rank.votes > _votes or DONE in rank.marks for rank in ranks)
        if ahead or all_left(ranks, int(os.environ.get(RANKS, 0))):
            break
        time.sleep(0.01)


def all_left(ranks: Sequence["Rank"], size: int) -> bool:
    """Tell if all ranks of a job have left by ``os._exit(0)``: where none did anything else, the script meant it."""
    return len(ranks) == size and all(rank.marks.get(OS_EXIT) == {"0"} and not rank.crash for rank in ranks)


class Rank(NamedTuple):
    """The marks of one rank."""

    rank: int
    pid: int
    # marks: the details of each kind of mark
    marks: dict[str, set[str]]
    votes: int  # number of votes that it came to
    last: str  # name of the last vote
    crash: str  # what `faulthandler` wrote when a signal such as SIGSEGV ended it, else ''
    unsent: str = ""  # what else is lost if it ends, in its own words, or ''

    @property
    def where(self) -> str:
        """How far it came, in words."""
        return f"after {self.last}" if self.votes else "before distopt.world()"


def entered(folder: Path) -> list[Rank]:
    """Return all ranks that have entered, by the marks in a folder."""
    marks: dict[int, dict[str, set[str]]] = {}
    for name in os.listdir(folder):
        if name[0].isdigit():  # and is not AWAITED
            rank, kind, *detail = name.split(".", 2)
            marks.setdefault(int(rank), {}).setdefault(kind, set()).update(detail)
    return [_rank_of(rank, kinds, folder) for rank, kinds in sorted(marks.items()) if PID in kinds]


def _rank_of(rank: int, marks: dict[str, set[str]], folder: Path) -> Rank:
    page = (folder / f"{rank}.{VOTES}").read_bytes()
    votes, length = HEAD.unpack_from(page)
    (pid,) = marks[PID]
    last = page[HEAD.size : HEAD.size + length].decode(errors="replace")
    (length,) = LENGTH.unpack_from(page, TOLD)
    unsent = page[TOLD + LENGTH.size : TOLD + LENGTH.size + length].decode(errors="replace")
    crash = (folder / f"{rank}.{CRASH}").read_text(errors="replace") if CRASH in marks else ""
    return Rank(rank, int(pid), marks, votes, last, crash, unsent)


def absent() -> str:
    """Lines on the ranks of ``distopt run`` that have not come to MPI's start, where others wait for them."""
    ranks = entered(_folder) if _folder else []
    words = {"T": "stopped", "t": "stopped", "X": "dead", "Z": "dead"}
    missing = {rank.rank: words.get(state(rank.pid), "it runs") for rank in ranks if MPI not in rank.marks}
    never = set(range(int(os.environ.get(RANKS, 0)))) - {rank.rank for rank in ranks} if _folder else set()
    missing |= dict.fromkeys(never, "it has not begun its script")
    return "\n".join(f"  rank {rank}: has not come to it ({missing[rank]})" for rank in sorted(missing))


def state(pid: int) -> str:
    """Return the letter that ps(1) shows for the state of a process; 'X' if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def end_with_parent() -> None:
    """From now on the end of the parent process ends this one too; only Linux can do that."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
