"""Which process is the rank that the environment describes: processes that a rank starts inherit its variables."""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping

from distopt.resilience.environment import IDENTITY, MPICH, OWNER, TORCHS, has_pmi_line, launched


def claim(over: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Note, for processes that this one starts, that this one is the rank that the environment describes."""
    environ[OWNER] = f"{os.getpid()} {_digest(over, environ)}"


def check(over: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Check that a launcher has made this very process a rank, and not the one that started it.

    Example:
        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
        >>> claim("gloo", torchrun)
        >>> check("gloo", "torchrun set RANK=1", torchrun)  # this process is the rank
        >>> child = torchrun | {OWNER: torchrun[OWNER].replace(str(os.getpid()), "1")}
        >>> check("gloo", "torchrun set RANK=1", child)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: this process is no rank: torchrun set RANK=1 for the process that has started it, 1. ...
        >>> check("gloo", "the script set RANK=0", child | {"RANK": "0"})
    """
    # A pool of multiprocessing replaces workers that end while they import the script by others, which end in the same
    # way, for ever.  Only the end of the process that has the pool stops that, so it is asked to end.
    owner, _, digest = environ.get(OWNER, "").partition(" ")
    launch = launched(environ)
    if over == "MPI" and launch and launch.by == MPICH.name and "PMI_FD" in environ:
        mine = has_pmi_line(environ)
    else:
        mine = owner in ("", str(os.getpid())) or digest != _digest(over, environ)
    if mine:
        return
    text = (
        f"this process is no rank: {reason} for the process that has started it{f', {owner}' if owner else ''}. "
        "Workers of multiprocessing's spawn and forkserver import the script anew: put what only ranks do, "
        'distopt.world() too, behind `if __name__ == "__main__":`'
    )
    worker = multiprocessing.current_process()
    if owner and "PoolWorker" in worker.name and getattr(worker, "_inheriting", False):
        print(f"{text}. The pool would start workers for ever: process {owner} is ended", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):  # another worker has ended it
            os.kill(int(owner), signal.SIGTERM)
    raise RuntimeError(text)


def _digest(over: str, environ: Mapping[str, str]) -> str:
    """Return a digest of what a launcher has set for a rank."""
    variables = [(k, environ[k]) for k in sorted(environ) if (k in TORCHS if over == "gloo" else IDENTITY.match(k))]
    return hashlib.blake2b(repr(variables).encode(errors="surrogateescape"), digest_size=8).hexdigest()
