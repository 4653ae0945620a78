"""The cost of collectives by formula: the bytes that they move, and the seconds that they take on a link.

Example:
    >>> from distopt import cost
    >>> f"{cost.seconds('all_reduce', 100e6, 8, cost.link('10GbE')):.4f} s"
    '0.1579 s'
"""

from distopt.comm.byte_counts import (
    DIRECT,
    RING,
    Algorithm,
    Moved,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    shares,
)
from distopt.lab.cost.links import LINKS, Link, link
from distopt.lab.cost.time import (
    ALGORITHMS,
    algorithms,
    chain_broadcast,
    doubling_all_gather,
    halving_doubling_all_reduce,
    halving_reduce_scatter,
    hierarchical_all_reduce,
    pairwise_all_to_all,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter_broadcast,
    seconds,
    tree_all_reduce,
    tree_broadcast,
)

__all__ = [
    "ALGORITHMS",
    "DIRECT",
    "LINKS",
    "RING",
    "Algorithm",
    "Link",
    "Moved",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "chain_broadcast",
    "doubling_all_gather",
    "halving_doubling_all_reduce",
    "halving_reduce_scatter",
    "hierarchical_all_reduce",
    "link",
    "pairwise_all_to_all",
    "recursive_doubling_all_reduce",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "scatter_broadcast",
    "seconds",
    "shares",
    "tree_all_reduce",
    "tree_broadcast",
]
