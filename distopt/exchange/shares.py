"""All-reduce in shared memory: every rank adds its share of a bucket up, and the sum stays where it was formed.

So nothing is copied, and the optimizer's kernel reads each share from the rank that owns it.  Before it, every rank
must have packed its gradients; after it, every rank must have added before one reads; and all must have read before one
packs again.  Votes and barriers see to that.
"""

import json
from collections.abc import Callable, Iterable, Sequence

from distopt.buckets import Buffer, Buffers, Sum, shared
from distopt.comm import Communicator
from distopt.compress import At, Half


def add_shares(buffer: Buffer, comm: Communicator) -> Sum:
    """The sum over ranks of a bucket's gradients, in rank order, of which this rank forms its share."""
    assert buffer.peers is not None
    buffer.bad_parts[:] = 0
    comm.add_parts(buffer.gradients, buffer.peers, buffer.bad_parts.reshape(-1))
    return shared(buffer.peers)


def add_halves(buffers: Buffers, compressor: Half, comm: Communicator, at: Callable[[Buffer], At]) -> list[Sum] | None:
    """The sums over ranks of what a ``Half`` takes of all buckets, with the bits of its all-reduce; collective.

    None if the ranks share no memory for that.  What is written and read once is half of what Dense has.
    """
    if not buffers.share_halves(comm):
        return None
    halves = [buffers.halves(buffer, compressor.stored) for buffer in buffers]
    for buffer, wires in zip(buffers, halves, strict=True):
        compressor.write(buffer.gradient, wires[comm.rank], at(buffer))
    comm.barrier()
    for buffer, wires in zip(buffers, halves, strict=True):
        with comm.on_behalf_of(at(buffer).purpose):
            comm.add_half_parts(buffer.gradients, wires, buffer.gradient, compressor.scale(comm.size))
    comm.barrier()
    return [shared(buffer.peers or ()) for buffer in buffers]


def nonfinite(buffers: Buffers) -> str:
    """What is not finite in this rank's share, for ``describe``; '' if all is."""
    found = [
        (rank, name, size, int(count))
        for b in buffers
        if b.bad_parts[-1].any()
        for rank, counts in enumerate(b.bad_parts)
        for name, size, count in zip(b.bucket.names, b.bucket.sizes, counts, strict=True)
        if count
    ]
    return json.dumps(found) if found else ""


def describe(reports: Sequence[str], order: Iterable[str]) -> str:
    """What is not finite in all shares together, by rank and in the parameters' order.

    What is not finite only in the sum is said of that.
    """
    counts: dict[tuple[int, str, int], int] = {}
    for report in filter(None, reports):
        for rank, name, size, count in json.loads(report):
            counts[rank, name, size] = counts.get((rank, name, size), 0) + count
    if not counts:
        return ""
    ranks, place = len(reports), {name: k for k, name in enumerate(order)}
    blamed = {name for rank, name, _ in counts if rank < ranks}
    lines: dict[int, list[str]] = {}
    for (rank, name, size), count in sorted(counts.items(), key=lambda item: (item[0][0], place[item[0][1]])):
        if rank < ranks or name not in blamed:
            lines.setdefault(rank, []).append(f"{name} ({count} of {size} entries)")
    speakers = [f"rank {r}" for r in range(ranks)] + ["the sum over ranks"]
    return "; ".join(f"{speakers[rank]}: {', '.join(names)}" for rank, names in lines.items())
