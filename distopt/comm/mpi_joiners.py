"""Processes that ranks of Open MPI start in the place of lost ones, and admit.

``distopt run`` asks rank 0, which alone waits for Open MPI to start the process (MPI_Comm_spawn).  When the process is
ready, all ranks accept it as they would any process that connects to a port: in some 10 ms, where a spawn by all of
them takes as long as Python's start, and leaves rank 0 in it for ever if another rank is lost meanwhile.

Between processes that were not started together Open MPI 5.0.11 has no way through shared memory: messages go over the
loopback interface (``cli.elastic.GROWING``).
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import time
from typing import TYPE_CHECKING, cast

from distopt.comm.mpi_losses import Checked, agree, has_losses, is_loss, is_loss_on
from distopt.comm.mpi_start import mpi
from distopt.resilience import job
from distopt.resilience.environment import JOINS, SPAWNED

if TYPE_CHECKING:
    from mpi4py import MPI

READY, PORT = 1, 2  # MPI tags: the joiner's process ID; the port to which it is to connect
STARTER, NEWCOMER = 0, 1  # ranks of the communicator of a joiner and the rank that has started it
PORT_BYTES = 1024  # at most
TICK = 0.002  # seconds between two looks for the port


class SpawnedJoiner:
    """A process that this rank has started, which waits to be admitted."""

    def __init__(self, request: str):
        asked = json.loads(request)
        variables = {JOINS: "1", SPAWNED: str(asked["member"])}
        info = mpi().Info.Create()
        info.Set("wdir", asked["folder"])
        info.Set("PMIX_ENVAR", "\n".join(f"{name}={value}" for name, value in variables.items()))
        program, *arguments = asked["command"]
        spawned = mpi().COMM_SELF.Spawn(program, arguments, 1, info)
        info.Free()
        # Open MPI tells no loss on the other kind
        self._comm: MPI.Intracomm = spawned.Merge(high=False)

    @property
    def waits(self) -> bool:
        """Whether it is ready to be admitted."""
        return not self.lost and bool(self._comm.Iprobe(NEWCOMER, READY))

    @property
    def lost(self) -> bool:
        """Whether the process has ended."""
        return has_losses(self._comm)

    def call(self, port: str) -> int:
        """Tell it to connect to a port; return its process ID."""
        process: int = self._comm.recv(source=NEWCOMER, tag=READY)
        self._comm.Send(port.encode(), NEWCOMER, PORT)
        return process


class SpawnedJoiners:
    """The process that this rank has started and not admitted yet, if there is one."""

    def __init__(self) -> None:
        self._waiting: SpawnedJoiner | None = None

    def start(self) -> None:
        """Start one if ``distopt run`` asks for it, and none waits to be admitted."""
        if self._waiting is None or self._waiting.lost:
            request = job.requested()
            self._waiting = SpawnedJoiner(request) if request else None

    @property
    def one_waits(self) -> bool:
        """Whether one is ready to be admitted."""
        return self._waiting is not None and self._waiting.waits

    def take(self) -> SpawnedJoiner | None:
        """Return the process, and forget it."""
        joiner, self._waiting = self._waiting, None
        return joiner


def admit_joiner(living: "MPI.Comm", joiner: SpawnedJoiner | None) -> "MPI.Comm | None":
    """Return a communicator of these ranks and, last, a joiner; None if a rank was lost meanwhile.  Collective."""
    # A joiner that is not admitted is ended: it might wait for ever for ranks that train on.
    # living: rank 0 of these has started the joiner.
    port, process, all_of_them = "", None, None
    try:
        waits = joiner is not None and joiner.waits
        if joiner and waits:
            port = mpi().Open_port()
            process = joiner.call(port)
        with Checked(living):
            if living.rank or waits:  # else the others learn from the revocation that nobody comes
                all_of_them = cast("MPI.Intracomm", living).Accept(port).Merge(high=False)
    except Exception as error:
        if not is_loss_on(living, error):
            raise
    if all_of_them is None:
        living.Revoke()
    if agree(living, all_of_them is not None):
        return all_of_them
    if all_of_them is not None:
        all_of_them.Revoke()
    if process:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return None


def be_admitted() -> "MPI.Intracomm":
    """Return a communicator of this process and the ranks that admit it.  Collective of all."""
    # Raises RuntimeError if a rank has ended meanwhile, or the one that has started this process.
    runtime, port = mpi(), bytearray(PORT_BYTES)
    try:
        job.starter.send(os.getpid(), STARTER, READY)
        request, status = job.starter.Irecv(port, STARTER, PORT), runtime.Status()
        # MPI's own wait would take a core from the ranks that train
        while not request.Test(status):
            time.sleep(TICK)
        ranks = runtime.COMM_SELF.Connect(port[: status.count].decode())
        merged: MPI.Intracomm = ranks.Merge(high=True)
        return merged
    except runtime.Exception as error:
        if not is_loss(error):
            raise
    raise RuntimeError("the rank that has started this process has ended before all have let it in")


def leave_quietly() -> None:
    """Tell the launcher that this process, which ranks have started, ends: else it reports an error."""
    # MPI's own end would wait for the other ranks, which may train on for long, or be lost.
    spec = importlib.util.find_spec("mpi4py.MPI")
    if spec and spec.origin:
        ctypes.CDLL(spec.origin).PMIx_Finalize(None, ctypes.c_size_t(0))
