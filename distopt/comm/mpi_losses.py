"""Ranks that MPI has lost: Open MPI 5 tells the others (User Level Failure Mitigation, ULFM), and lets them go on.

W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of MPI communication capability:
Design and rationale.  International Journal of High Performance Computing Applications 27(3), 2013.

What Open MPI 5.0.11 cannot do:

* When a rank ends while the others make a communicator, within some 0.1 ms, they can crash: Open MPI handles the loss
  on all communicators, the half-made one too.  So none is made but at the start, after a loss, and where the engine
  first needs one.
* It tells of losses on standard error ("NBC_Progress: an error 75 was found"), which nothing can turn off.
* Where a request has failed, its ``Waitall`` and ``Test`` free it, and ``Waitall`` also those that are under way on a
  revoked communicator, and it ends the job when such a send fails later ("Send error after request freed").  Its
  collectives do so inside.  So arrays go by ``Isend`` and ``Irecv`` alone, which are asked by ``Get_status``, and none
  that has failed is freed.  Only numbers and short texts, which need no answer of their receivers, go by collectives.
* It is not told of a rank that ends with a code other than 0 (``mpi_start.fail_by_signal``).
"""

import functools
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distopt.comm.control import PeerLeft
from distopt.comm.mpi_start import brand, is_running, mpi
from distopt.resilience import membership

if TYPE_CHECKING:
    from mpi4py import MPI

# classes of errors; not every MPI has them
LOSSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
SETTLE = 5.0  # seconds in which requests of a revoked communicator end

_unsettled: list["MPI.Request"] = []  # keep memory alive that MPI might still use


class Exchange(NamedTuple):
    """Messages of an exchange with other ranks."""

    receives: "list[MPI.Request]"  # requests that write to memory
    sends: "list[MPI.Request]"  # requests that read it


class Waiter(Protocol):
    """Object that waits for an exchange."""

    # seconds to sleep between two polls, 0 for busy waiting; may change during a wait
    patience: float


@functools.cache
def elastic() -> bool:
    """Tell if this job goes on without the ranks it loses, and its MPI can: MPICH waits for them."""
    return membership.wanted() and brand().startswith("Open MPI")


def is_loss(error: BaseException) -> bool:
    """Tell if an error of MPI means that a rank has ended, or that another one has revoked the communicator."""
    if not is_running():
        return False
    MPI = mpi()
    classes = {getattr(MPI, name, None) for name in LOSSES} - {None, getattr(MPI, "ERR_UNKNOWN", None)}
    return isinstance(error, MPI.Exception) and error.Get_error_class() in classes


def is_loss_on(comm: "MPI.Comm", error: BaseException) -> bool:
    """Tell if an error on ``comm``, or in making another one of it, means that one of its ranks was lost."""
    if isinstance(error, PeerLeft) or is_loss(error):
        return True
    return is_running() and isinstance(error, mpi().Exception) and elastic() and has_losses(comm)


class Checked:
    """A context for MPI's collectives, which raises PeerLeft in an elastic job if a rank is known to be lost."""

    # Their own errors do not always tell.  When a rank ends, collectives of Open MPI 5.0.11 can return without an error
    # though memory is not written (an `Allgatherv`), or with an error of another class (an `Iallreduce`).

    def __init__(self, comm: "MPI.Comm"):
        self._comm = comm

    def __enter__(self) -> None:
        """Nothing is to be done before."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if elastic() and (error is None or isinstance(error, mpi().Exception)) and has_losses(self._comm):
            raise PeerLeft("a rank of MPI has ended") from None


def has_losses(comm: "MPI.Comm") -> bool:
    """Tell if this process knows that a rank of ``comm`` has ended, or that one has revoked it."""
    failed = comm.Get_failed()
    count = failed.size
    failed.Free()
    return bool(count or comm.Is_revoked())


def finish(requests: Sequence["MPI.Request"], waiter: Waiter) -> None:
    """Wait until exchanges are complete; raise the error of a request, such as the loss of a rank."""
    # It polls, since MPI moves data only during calls, and sleeps between polls, since MPI's wait occupies a core.
    while waiter.patience:
        if _all_complete(requests):
            return
        time.sleep(waiter.patience)
    _wait_for_all(requests)


def _wait_for_all(requests: "Sequence[MPI.Request]") -> None:
    """Wait until requests are complete; raise the error of the first that has one."""
    # Of several requests, MPI only tells that one has failed.
    MPI = mpi()
    statuses = [MPI.Status() for _ in requests]
    try:
        MPI.Request.Waitall(requests, statuses)
    except MPI.Exception as error:
        raise _first(error, statuses) from None


def _all_complete(requests: "Sequence[MPI.Request]") -> bool:
    """Tell if requests are complete; raise as ``_wait_for_all``."""
    MPI = mpi()
    statuses = [MPI.Status() for _ in requests]
    try:
        return bool(MPI.Request.Testall(requests, statuses))
    except MPI.Exception as error:
        raise _first(error, statuses) from None


def _first(error: "MPI.Exception", statuses: "Sequence[MPI.Status]") -> "MPI.Exception":
    MPI = mpi()
    if error.Get_error_class() != MPI.ERR_IN_STATUS:
        return error
    codes = [status.error for status in statuses if status.error not in (MPI.SUCCESS, MPI.ERR_PENDING)]
    return MPI.Exception(codes[0]) if codes else error


def wait_while_all_live(comm: "MPI.Comm", requests: "Sequence[MPI.Request]", waiter: Waiter) -> None:
    """Wait until messages have arrived."""
    # Raises PeerLeft: a rank of the communicator was lost before that; some of the requests are still under way.
    for request in requests:
        while not request.Get_status():
            if has_losses(comm):
                raise PeerLeft("a rank of MPI has ended")
            if waiter.patience:
                time.sleep(waiter.patience)


def settle(exchanges: Iterable[Exchange]) -> None:
    """Wait until nothing that was begun on a revoked communicator writes to memory any more."""
    # The memory must not be used again before that.  It polls, as a request without an end must not stop the others.
    # What is sent is kept alive instead: a lost rank does not take it.
    exchanges = list(exchanges)
    deadline, pending = time.monotonic() + SETTLE, [request for each in exchanges for request in each.receives]
    while pending and time.monotonic() < deadline:
        pending = [request for request in pending if not _has_ended(request)]
    _unsettled.extend(pending + [request for each in exchanges for request in each.sends if not request.Get_status()])


def _has_ended(receive: "MPI.Request") -> bool:
    """Tell if a receive has ended."""
    # Open MPI cancels a receive whose sender has not begun, or was lost.
    if receive != mpi().REQUEST_NULL:
        receive.Cancel()
    return bool(receive.Get_status())


def agree(comm: "MPI.Comm", well: bool) -> bool:
    """Return whether all ranks of an MPI communicator live, and all say that all is well.  Collective of the living."""
    # The answer is the same on all that live, also where the communicator was revoked, or a rank ends during the call.
    try:
        return bool(comm.Agree(int(well)))
    except Exception as error:
        if not is_loss(error):
            raise
        return False
