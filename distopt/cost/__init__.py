"""Bytes and seconds by formula: what a collective sends, and how long that takes on a link."""

from distopt.cost.links import LINKS, Link, link
from distopt.cost.time import (
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
from distopt.cost.wire import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

__all__ = [
    "ALGORITHMS",
    "LINKS",
    "Link",
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
    "tree_all_reduce",
    "tree_broadcast",
]
