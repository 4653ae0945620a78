"""All-reduce in shared memory: every process sums up its shard of a bucket, and the sum stays where it was formed.

So nothing is copied, and the optimizer's kernel reads each shard from the rank that owns it.  Before it, every rank
must have packed its gradients; after it, every rank must have added before one reads; and all must have read before one
packs again.  Votes and barriers see to that.  For an optimizer that is given whole means, or a script that is, the sum
is written to every rank's memory where it is formed.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from distopt import kernels
from distopt.buckets import Bucket, BucketSet, Reduced, unsharded
from distopt.comm import Communicator
from distopt.comm.communicator import BFLOAT16
from distopt.comm.exact import largest_of_ranks
from distopt.comm.message import MessageTag
from distopt.compress import ExchangeContext, Half
from distopt.kernels.layout import BucketLayout


def reduce_shards(bucket: Bucket, comm: Communicator) -> Reduced:
    """Return the sum over ranks of a bucket's gradients, of which this process forms its shard.

    The others form theirs; a barrier or a vote must come before anybody reads them.
    """
    assert bucket.peers is not None
    bucket.bad_parts[:] = 0
    sum_shard(bucket.gradients, bucket.peers, bucket.own, bucket.bad_parts, comm)
    return bucket.peer_shards


def reduce_everywhere(bucket: Bucket, comm: Communicator) -> Reduced:
    """Return the sum over ranks of a bucket's gradients, of which each process forms a shard for all.

    A barrier or a vote must come before anybody reads it; nobody reads another process's memory afterwards.
    """
    assert bucket.peers is not None
    bucket.bad_parts[:] = 0
    sum_shard(bucket.gradients, bucket.peers, bucket.lasts, bucket.bad_parts, comm)
    return unsharded(bucket.gradient)


def sum_shard(
    members: BucketLayout,
    arrays: Sequence[np.ndarray],
    sums: Sequence[np.ndarray],
    nonfinite: np.ndarray,
    comm: Communicator,
) -> None:
    """Write this process's shard of the sum over ranks, as ``comm`` adds.  Collective.

    A ledger has it as an all-reduce for each rank that lives here.

    Args:
        members: the arrays of a bucket.
        arrays: every rank's flat array of it, ``(members.extent,)``, in rank order.
        sums: the arrays that it is written to, which may be some of these.
        nonfinite: entries that are not finite, by rank and member, and at last of the sum, ``(ranks + 1, members)``.
        comm: whose ranks these are.
    """
    shard, counts = members.shard(comm.rank, comm.size), nonfinite.reshape(-1)
    own = [arrays[rank] for rank in comm.ranks.here]
    if comm.exact and members.dtype == np.float32:
        # When all have these, nobody reads more than its shard.
        kernels.add_parts_on_grid(shard, arrays, sums, largest_of_ranks(comm.unwrapped, own), counts)
    else:
        kernels.add_parts(shard, arrays, sums, counts)
    for x in own:
        comm.count_all_reduce(x)


def reduce_half_shards(
    buckets: BucketSet,
    compressor: Half,
    comm: Communicator,
    context: Callable[[Bucket], ExchangeContext],
    tag: Callable[[Bucket], MessageTag],
) -> list[Reduced] | None:
    """Return the sums over ranks of what a ``Half`` sends of all buckets, with the bits of its all-reduce.  Collective.

    What is written and read once is half of what dense has.

    Args:
        buckets: all buckets.
        compressor: what is sent of them.
        comm: the ranks.
        context: of the call for a bucket.
        tag: of the messages of a bucket.

    Returns:
        A sum per bucket, or None if the ranks share no memory for 16-bit numbers.
    """
    if not buckets.share_halves(comm):
        return None
    payloads = [buckets.halves(bucket, compressor.stored) for bucket in buckets]
    for bucket, payloads_by_rank in zip(buckets, payloads, strict=True):
        compressor.write(bucket.gradient, payloads_by_rank[comm.rank], context(bucket))
    comm.barrier()
    kernel = kernels.add_bfloat16_parts if compressor.stored == BFLOAT16 else kernels.add_half_parts
    for bucket, payloads_by_rank in zip(buckets, payloads, strict=True):
        with comm.tagged(tag(bucket)):
            shard = bucket.gradients.shard(comm.rank, comm.size)
            kernel(shard, payloads_by_rank, bucket.gradient, compressor.scale(comm.size))
            comm.count_all_reduce(payloads_by_rank[comm.rank])
    comm.barrier()
    return [bucket.peer_shards for bucket in buckets]


def nonfinite(buckets: BucketSet, but: Collection[str] = ()) -> str:
    """Report what is not finite in this rank's shard, for ``describe``; '' if all is finite.

    Args:
        buckets: the buckets.
        but: parameters that do not count.
    """
    counts = [
        (rank, name, size, int(count))
        for b in buckets
        if b.bad_parts.any()
        for rank, row in enumerate(b.bad_parts)
        for name, size, count in zip(b.spec.names, b.spec.sizes, row, strict=True)
        if count and name not in but
    ]
    return json.dumps(counts) if counts else ""


def describe(reports: Sequence[str], order: Iterable[str], ranks: int) -> str:
    """Describe what is not finite in all shards together, by rank and in the parameters' order.

    What is not finite only in the sum is said of the sum.
    """
    counts: dict[tuple[int, str, int], int] = {}
    for report in filter(None, reports):
        for rank, name, size, count in json.loads(report):
            counts[rank, name, size] = counts.get((rank, name, size), 0) + count
    if not counts:
        return ""
    place = {name: k for k, name in enumerate(order)}
    blamed = {name for rank, name, _ in counts if rank < ranks}
    lines: dict[int, list[str]] = {}
    for (rank, name, size), count in sorted(counts.items(), key=lambda item: (item[0][0], place[item[0][1]])):
        if rank < ranks or name not in blamed:
            lines.setdefault(rank, []).append(f"{name} ({count} of {size} entries)")
    speakers = [f"rank {r}" for r in range(ranks)] + ["the sum over ranks"]
    return "; ".join(f"{speakers[rank]}: {', '.join(names)}" for rank, names in lines.items())
