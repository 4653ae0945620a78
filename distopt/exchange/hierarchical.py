"""Sums inside a node first, and an exchange of these between nodes: what leaves a node does not grow with its ranks.

Each bucket belongs to one rank of a node, which gets its sum over the node, exchanges that with the ranks of the same
number in the other nodes, and gives the sum over all to its neighbours.  So all ranks of a node use the network at the
same time, and compressors see as many gradients as there are nodes, each the sum of a node's.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distopt import device
from distopt.buckets import Bucket
from distopt.comm import Communicator
from distopt.comm.communicator import sum_in_rank_order
from distopt.compress import Compressor
from distopt.compress.base import of_sum
from distopt.compress.state import pending, state_array
from distopt.exchange.choice import GATHER_BELOW, TwoPhase, gathered_bytes, two_phases
from distopt.kernels.layout import BucketLayout

Shares = Sequence[Sequence[int]]  # of each rank of a node the numbers of its buckets, ascending


class Nodes(NamedTuple):
    """Where a rank stands in a job of several nodes.

    Args:
        inside: the ranks of its node.
        between: the ranks with the same number in each node that has so many.
    """

    inside: Communicator
    between: Communicator


class NodeExchange(NamedTuple):
    """How the buckets of a step are exchanged between nodes: a pure function of the plan, the compressor and the ranks.

    Args:
        shares: of each rank of the largest node the numbers of its buckets; none of a rank whose number is not in all.
        compressor: what is sent of sums over a node.
        phases: of each rank of a node, how it and those of the same number exchange its buckets in two phases; None if
            they gather payloads, or add them on the wire.
    """

    shares: Shares
    compressor: Compressor
    phases: Sequence[TwoPhase | None]

    def describe(self, plan: Sequence[BucketLayout], sizes: Sequence[int], by_bucket: bool = False) -> str:
        """Return a line on what it does.

        Args:
            plan: the layout of each bucket.
            sizes: the ranks of each node.
            by_bucket: in two phases each bucket has shards of its own.

        Example:
            >>> import numpy as np
            >>> from distopt.compress import TopK
            >>> plan = [BucketLayout(["w"], [(1000, 1000)], [0], np.float32)]
            >>> node_exchange(TopK(0.01), plan, [4, 4]).describe(plan, [4, 4])
            '2 nodes of 4 ranks, between them gather'
            >>> node_exchange(TopK(0.01), plan, [3, 1]).describe(plan, [3, 1])
            '2 nodes of 3 and 1 ranks, between them gather'
        """
        phases, share = self.phases[0], self.shares[0]
        between = "all-reduce" if self.compressor.traits.summable else "gather"
        if phases:
            between = phases.describe([plan[k] for k in share], len(sizes), (), by_bucket)
        *most, last = sizes if len(set(sizes)) > 1 else sizes[:1]
        ranks = f"{', '.join(map(str, most))} and {last}" if most else last
        return f"{len(sizes)} node{'s' * (len(sizes) > 1)} of {ranks} rank{'s' * (ranks != 1)}, between them {between}"


def node_exchange(
    compressor: Compressor, plan: Sequence[BucketLayout], sizes: Sequence[int], break_even: bool = True
) -> NodeExchange:
    """Choose how the buckets of a step are exchanged between nodes.

    As many ranks of each node have buckets as the smallest one has, so that all have partners everywhere.

    Args:
        compressor: what is sent of gradients.
        plan: the layout of each bucket.
        sizes: the ranks of each node.
        break_even: as of ``two_phases``.

    Raises:
        ValueError: the compressor is none for nodes of such sizes (``fits_nodes``).
    """
    if not fits_nodes(compressor, sizes):
        raise ValueError(
            f"exchange must be 'auto', 'gather' or 'two_phase' for {compressor!r}, whose codes mean so much for each "
            f"rank of a node, unless every node has as many ranks, got 'nodes' with nodes of {str(sizes)[1:-1]} ranks"
        )
    of_sums = of_sum(compressor, max(sizes))
    shares = share_out([layout.extent for layout in plan], min(sizes)) + [[] for _ in range(max(sizes) - min(sizes))]
    columns = [[plan[k] for k in share] for share in shares]
    phases = [two_phases("auto", of_sums, column, len(sizes), break_even) if column else None for column in columns]
    return NodeExchange(shares, of_sums, phases)


def fits_nodes(compressor: Compressor, sizes: Sequence[int]) -> bool:
    """Tell if sums over nodes of these numbers of ranks can be compressed, and be decompressed by all.

    Where numbers differ that cannot be a threshold: one that grows with the ranks of a sum is another on each node.

    Example:
        >>> from distopt.compress import Int8, TwoBit
        >>> [fits_nodes(compressor, sizes) for compressor in (Int8(), TwoBit(0.1)) for sizes in ([2, 2], [3, 1])]
        [True, True, True, False]
    """
    return len({repr(of_sum(compressor, size)) for size in sizes}) == 1


def adds_inside(
    exchange: str, compressor: Compressor, plan: Sequence[BucketLayout], hosts: Sequence[int], hosts_summed: int = 2
) -> bool:
    """Tell if gradients are added up inside of nodes before they are compressed: if that is asked for, or if it pays.

    Of what leaves a node it pays for all that is not dense: n ranks send one payload in place of n.  For dense sums it
    pays with more nodes than those of which the communicator's own sum sends as little.  It is not what was asked for
    where it would train something else: what may be added up has the trait ``of_sums``.  Payloads that are few bytes
    stay apart, since an exchange inside a node takes longer than they do; and so do ranks of which one would add up
    what more than two have, since another node has so few.  No measurement takes part, so all ranks choose alike.

    Args:
        exchange: 'nodes', or 'auto', which chooses.
        compressor: what is sent.
        plan: the layout of each bucket.
        hosts: of each rank a number, equal for ranks of one node.
        hosts_summed: as of the communicator; MPI libraries send little between two hosts.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import Int8, TopK
        >>> plan, hosts = [BucketLayout(["w"], [(1000, 1000)], [0], np.float32)], [0, 0, 1, 1]
        >>> [adds_inside("auto", compressor, plan, hosts) for compressor in (Int8(), TopK(0.01))]
        [True, False]
    """
    if exchange != "auto" or not compressor.traits.of_sums:
        return exchange == "nodes"
    sizes, ranks = node_sizes(hosts), len(hosts)
    pays = (hosts_summed if compressor.traits.lossless else 1) < len(sizes) < ranks and max(sizes) <= 2 * min(sizes)
    return pays and (ranks - 1) * gathered_bytes(compressor, plan) >= GATHER_BELOW


def nodes_of(comm: Communicator) -> Nodes:
    """Return the nodes of a communicator, whose ranks are those of one host.  Collective at the first call.

    Example:
        >>> from distopt.comm import run_ranks
        >>> run_ranks(2, lambda comm: [part.size for part in nodes_of(comm)])
        [[2, 1], [2, 1]]
    """
    groups = node_ranks(comm.hosts)
    columns = [[rank for rank in column if rank is not None] for column in itertools.zip_longest(*groups)]
    return Nodes(comm.subgroup(groups), comm.subgroup(columns))


def node_ranks(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, ascending; nodes stand in the order of their lowest ranks.

    Args:
        hosts: of each rank a number, equal for ranks of one node.

    Example:
        >>> node_ranks([7, 3, 7, 3, 7])
        [[0, 2, 4], [1, 3]]
    """
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


def node_sizes(hosts: Sequence[int]) -> list[int]:
    """Return the number of ranks of each node, in the order of ``node_ranks``."""
    return [len(group) for group in node_ranks(hosts)]


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Share buckets out among the ranks of a node: of every few neighbours one each, the largest to who has least.

    Args:
        sizes: elements of each bucket.
        ranks: of a node.

    Returns:
        The numbers of each rank's buckets, ascending.

    Example:
        >>> share_out([10, 30, 25, 5], ranks=2)
        [[1, 3], [0, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for first in range(0, len(sizes), ranks):
        neighbours = sorted(range(first, min(first + ranks, len(sizes))), key=lambda k: (-sizes[k], k))
        for number, rank in zip(neighbours, sorted(range(ranks), key=totals.__getitem__), strict=False):
            shares[rank].append(number)
            totals[rank] += sizes[number]
    return shares


def rounds(shares: Shares) -> list[tuple[int | None, ...]]:
    """Return the buckets that travel at the same time, one of each rank at most; those of a round are neighbours.

    Example:
        >>> rounds([[1, 3, 4], [0, 2]])
        [(1, 0), (3, 2), (4, None)]
    """
    return list(itertools.zip_longest(*shares))


def sum_inside(arrays: Sequence[np.ndarray], inside: Communicator) -> None:
    """Replace this rank's array of a round by its sum over the node, added in rank order.  Collective of the node.

    Args:
        arrays: of each rank of the node the array of its bucket, ``(n,)``; empty for a rank without one.  Those of
            other ranks stay as they are.
        inside: the ranks of the node.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import run_ranks
        >>> def main(comm):
        ...     arrays = [np.array([comm.rank + 1.0]), np.array([10.0])]
        ...     sum_inside(arrays, comm)
        ...     return [x.item() for x in arrays]
        >>> run_ranks(2, main)
        [[3.0, 10.0], [2.0, 20.0]]
    """
    # As bytes, so that those of a round may have several dtypes.
    parts, mine = [x.view(np.uint8) for x in arrays], arrays[inside.rank]
    with inside.on_comm_stream():
        received = inside.all_to_all(parts, ragged=[mine.nbytes] * inside.size)
        device.copy(mine, sum_in_rank_order([part.view(mine.dtype) for part in received]))


def share_inside(arrays: Sequence[np.ndarray], inside: Communicator) -> None:
    """Give each rank's array of a round to all ranks of the node.  Collective of it.

    Args:
        arrays: as of ``sum_inside``; those of other ranks are overwritten.
        inside: the ranks of the node.

    Example:
        >>> import numpy as np
        >>> from distopt.comm import run_ranks
        >>> def main(comm):
        ...     arrays = [np.array([comm.rank]), np.array([10 * comm.rank])]
        ...     share_inside(arrays, comm)
        ...     return [x.item() for x in arrays]
        >>> run_ranks(2, main)
        [[0, 10], [0, 10]]
    """
    parts = [x.view(np.uint8) for x in arrays]
    with inside.on_comm_stream():
        gathered = inside.all_gather(parts[inside.rank], ragged=[part.size for part in parts])
        for rank, (part, there) in enumerate(zip(parts, gathered, strict=True)):
            if rank != inside.rank:
                device.copy(part, there)


def of_round(arrays: Mapping[int, np.ndarray], numbers: Sequence[int | None]) -> list[np.ndarray]:
    """Return of each rank of a node the array of its bucket in a round; an empty one for a rank without a bucket."""
    return [next(iter(arrays.values()))[:0] if number is None else arrays[number] for number in numbers]


def move_states(buckets: Sequence[Bucket], shares: Shares, inside: Communicator) -> bool:
    """Move what ranks have not sent of buckets to the ranks these belong to, and add it up.  Collective of the node.

    There is something to move where the last step was exchanged in another way, or where the plan has changed.

    Args:
        buckets: of the plan.
        shares: which rank gets which.
        inside: the ranks of the node.

    Returns:
        Whether anything was moved: of a shard that nobody of the node owns now, a rank may have debts then.
    """
    mine = set(shares[inside.rank])
    moving = {name for number, bucket in enumerate(buckets) if number not in mine for name in pending(bucket.state)}
    names = {name for text in inside.control.gather(json.dumps(sorted(moving))) for name in json.loads(text)}
    for name in sorted(names):
        arrays = {k: state_array(bucket.state, name, bucket.gradient) for k, bucket in enumerate(buckets)}
        for numbers in rounds(shares[: inside.size]):
            sum_inside(of_round(arrays, numbers), inside)
        inside.wait()
        for number, bucket in enumerate(buckets):
            if number not in mine:
                del bucket.state[name]
    return bool(names)
