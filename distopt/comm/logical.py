"""Logical ranks: what a job learns depends on how many there are, and not on the number of its processes."""

import json
import logging
from collections.abc import Sequence

import numpy as np

from distopt import device
from distopt.checks import check_int
from distopt.comm.communicator import Communicator, Wrapper, slices, split, sum_in_rank_order
from distopt.comm.exact import sum_exactly
from distopt.comm.message import ALIGNED, message_bytes, message_starts
from distopt.comm.ordered import in_rank_order
from distopt.comm.ranks import Ranks, placed

LOG = logging.getLogger("distopt")


class Logical(Wrapper):
    """Communicator of processes in which so many ranks live, each with its own gradients, residuals, random numbers.

    ``rank`` and ``size`` are those of the processes, as are its collectives.  Sums of gradients are in the order of
    ranks.

    Args:
        comm: the processes.
        size: the number of ranks, at least that of processes.

    Raises:
        TypeError: ``size`` is no integer.
        ValueError: it is below the number of processes, or these have GPUs.

    Example:
        >>> from distopt.comm import LocalCommunicator
        >>> Logical(LocalCommunicator(), 3).ranks.here
        (0, 1, 2)
    """

    rank_ordered = True

    def __init__(self, comm: Communicator, size: int):
        super().__init__(in_rank_order(comm))
        if comm.gpu is not None:
            raise ValueError(f"logical must be None for ranks on GPUs, which are one process each, got {size}")
        if check_int("logical", size, least=1) < comm.size:
            raise ValueError(f"logical must be at least {comm.size}, the number of processes, got {size}")
        self._size, self._ranks = size, Ranks(size, (), logical=True)
        if not comm.outside:
            self._place([[]] * comm.size)
        # Those that lived here when the last transaction ended, and how many had ended when they were placed anew.
        self._kept, self._placed_after = self._ranks.here, -1
        if comm.membership:
            comm.membership.on_epoch(self._place_again)

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    def _place_again(self) -> None:
        """Give the ranks of processes that were lost to others, and some to those that have come.  Collective."""
        # Where a process is lost meanwhile, some may have heard of all others' ranks, and some not.
        if self.membership.ended != self._placed_after:
            self._kept, self._placed_after = self._ranks.here, self.membership.ended
        self._place([json.loads(text) for text in self.control.gather(json.dumps(self._kept))])

    def _place(self, kept: Sequence[Sequence[int]]) -> None:
        by_process = placed(self._size, kept)
        # A process that may take over more ranks always exchanges in the same way.
        own = not self.membership and by_process == tuple((rank,) for rank in range(self.size))
        self._ranks = Ranks(self._size, by_process[self.rank], () if own else by_process, logical=True)
        if self.rank == 0 and self._size % self.size:
            counts = ", ".join(str(len(there)) for there in by_process)
            LOG.warning("distopt: %d logical ranks live in %d processes as %s", self._size, self.size, counts)

    def __repr__(self) -> str:
        return f"Logical({self.comm!r}, {self._size})"


def with_ranks(processes: Communicator, size: int) -> Communicator:
    """Return the communicator of so many ranks that live in these processes, the same one at every call."""
    if processes._logical is None:
        processes._logical = Logical(processes, size)
    if (known := processes._logical.ranks.size) != size:
        raise ValueError(f"logical must stay {known}, got {size}")
    return processes._logical


# -- collectives of ranks of which processes have several: each takes what those that live here have, in their order


def sum_of_ranks(comm: Communicator, arrays: Sequence[np.ndarray]) -> None:
    """Replace the last array by the sum of those of all ranks, added in their order, or exactly.  Collective."""
    if comm.exact and arrays[-1].dtype == np.float32:
        sum_exactly(comm, arrays, comm.ranks.size)
        return
    flat, ranks = arrays[-1].reshape(-1), comm.ranks
    counts, shares = list(map(len, ranks.by_process)), slices(flat.size, comm.size)
    n = shares[comm.rank].stop - shares[comm.rank].start
    parts = [device.concatenated([x.reshape(-1)[share] for x in arrays]) for share in shares]
    received = comm.all_to_all(parts, ragged=[n * count for count in counts])
    each = ranks.in_order([split(x, [n] * count) for x, count in zip(received, counts, strict=True)])
    total = sum_in_rank_order(each)
    for share, x in zip(shares, comm.all_gather(total, ragged=[s.stop - s.start for s in shares]), strict=True):
        device.copy(flat[share], x)


def numbers_of_ranks(comm: Communicator, numbers: Sequence[int]) -> list[int]:
    """Return a number of each rank.  Collective."""
    gathered = comm.all_gather(np.array(numbers, np.int64), ragged=list(map(len, comm.ranks.by_process)))
    return comm.ranks.in_order([x.tolist() for x in gathered])


def gather_of_ranks(
    comm: Communicator, arrays: Sequence[np.ndarray], lengths: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Return an array of bytes of each rank.  Collective.  ``lengths``: by rank; None if they must be sent too."""
    known = numbers_of_ranks(comm, [x.size for x in arrays]) if lengths is None else lengths
    of_processes = [[known[rank] for rank in there] for there in comm.ranks.by_process]
    messages = comm.all_gather(device.concatenated(arrays, ALIGNED), ragged=list(map(message_bytes, of_processes)))
    return comm.ranks.in_order(list(map(_parts, messages, of_processes)))


def exchange_of_ranks(
    comm: Communicator, parts: Sequence[Sequence[np.ndarray]], lengths: Sequence[Sequence[int]] | None = None
) -> list[list[np.ndarray]]:
    """Send arrays of bytes from each rank to each, and return what each rank here gets, by sender.  Collective.

    ``lengths``: of what each rank here gets, by sender; None if they must be sent too.
    """
    ranks, of_processes = comm.ranks, comm.ranks.by_process
    if lengths is None:
        told = [np.array([x[r].size for x in parts for r in there], np.int64) for there in of_processes]
        counts = [len(there) * len(ranks.here) for there in of_processes]
        sizes = [x.tolist() for x in comm.all_to_all(told, ragged=counts)]
    else:
        sizes = [[of_rank[sender] for sender in there for of_rank in lengths] for there in of_processes]
    messages = [device.concatenated([x[r] for x in parts for r in there], ALIGNED) for there in of_processes]
    received = map(_parts, comm.all_to_all(messages, ragged=list(map(message_bytes, sizes))), sizes)
    n = len(ranks.here)
    by_sender = ranks.in_order([[x[k : k + n] for k in range(0, len(x), n)] for x in received])
    return [list(of_rank) for of_rank in zip(*by_sender, strict=True)]


def peers_of_ranks(
    comm: Communicator, arrays: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Return the arrays of all ranks, and the last one of each process; None unless all can open them.  Collective.

    ``arrays``: as ``Communicator.peers`` takes each of them.
    """
    counts = list(map(len, comm.ranks.by_process)) or [1] * comm.size
    # A process with fewer ranks has its last array opened again.
    found = [comm.peers(x) for x in (*arrays, *[arrays[-1]] * (max(counts) - len(arrays)))]
    opened = [of_processes for of_processes in found if of_processes is not None]
    if len(opened) < len(found):
        return None
    of_ranks = [of_process[:n] for of_process, n in zip(zip(*opened, strict=True), counts, strict=True)]
    return comm.ranks.in_order(of_ranks), opened[-1]


def _parts(message: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    starts = message_starts(lengths)
    return [message[start : start + n] for start, n in zip(starts, lengths, strict=False)]
