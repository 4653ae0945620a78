"""The seconds of a collective by formula, on a link of the alpha-beta-gamma model.

A message of n bytes takes ``alpha + n beta`` (Hockney, "The communication challenge for MPP", 1994), and ``n gamma``
more if it is added up where it arrives; a rank sends and receives at the same time, and all ranks do so at once.  The
algorithms and their costs are those of Chan et al., "Collective communication: theory, practice, and experience"
(2007), and Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

``nbytes`` is what one rank hands over to the collective; for an all-gather it is the bytes of all ranks together.
``size`` is the number of ranks P, at least 1; one rank alone takes no time.
"""

import math
from collections.abc import Callable

from distopt.checks import check_float, check_int, check_one_of
from distopt.lab.cost.links import Link, checked

Formula = Callable[[float, int, Link], float]


def _message(link: Link, nbytes: float, times: float = 1.0) -> float:
    """Return the seconds of ``times`` messages, one after the other."""
    return times * (link.latency + nbytes / link.bandwidth)


def _rounds(size: int) -> int:
    """Return ceil(log2 P), the rounds of an algorithm that doubles the informed ranks in each."""
    return (size - 1).bit_length()


def ring_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a ring's reduce-scatter and all-gather (Chan et al.): 2 (P - 1) messages of n / P bytes.

    Example:
        >>> from distopt import cost
        >>> f"{cost.ring_all_reduce(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.1581 s'
    """
    return ring_reduce_scatter(nbytes, size, link) + ring_all_gather(nbytes, size, link)


def tree_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a binomial tree to a root and back (Chan et al.): 2 ceil(log2 P) messages of n bytes.

    Example:
        >>> from distopt import cost
        >>> f"{cost.tree_all_reduce(1e3, 8, cost.LINKS['10GbE']) * 1e6:.1f} us"
        '185.4 us'
    """
    return _rounds(size) * (2 * _message(link, nbytes) + nbytes * link.reduction)


def recursive_doubling_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of recursive doubling (Thakur et al.): log2 P messages of n bytes.

    Pairs of ranks at distance 1, 2, 4, ... exchange and add their sums.  If P is no power of two, the ranks beyond the
    largest one hand their data over first, and receive the sum at the end.

    Example:
        >>> from distopt import cost
        >>> f"{cost.recursive_doubling_all_reduce(1e3, 8, cost.LINKS['10GbE']) * 1e6:.1f} us"
        '92.9 us'
    """
    core = 1 << (size.bit_length() - 1)
    one = _message(link, nbytes) + nbytes * link.reduction
    return _rounds(core) * one + (0.0 if size == core else one + _message(link, nbytes))


def halving_doubling_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of Rabenseifner's algorithm (Thakur et al.): a ring's bytes in 2 ceil(log2 P) messages.

    It is a reduce-scatter by recursive halving and an all-gather by recursive doubling.

    Example:
        >>> from distopt import cost
        >>> f"{cost.halving_doubling_all_reduce(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.1579 s'
    """
    return halving_reduce_scatter(nbytes, size, link) + doubling_all_gather(nbytes, size, link)


def ring_reduce_scatter(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a ring (Chan et al.): P - 1 messages of n / P bytes, each added up where it arrives.

    Example:
        >>> from distopt import cost
        >>> f"{cost.ring_reduce_scatter(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0834 s'
    """
    return (size - 1) * (_message(link, nbytes / size) + nbytes / size * link.reduction)


def halving_reduce_scatter(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of recursive halving (Thakur et al.): a ring's bytes in ceil(log2 P) messages.

    Pairs of ranks at distance P / 2, P / 4, ... exchange halves.  If P is no power of two, messages go along a
    circulant graph (Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024), as in Bruck's
    all-gather backwards.

    Example:
        >>> from distopt import cost
        >>> f"{cost.halving_reduce_scatter(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0833 s'
    """
    most = nbytes * (size - 1) / size
    return _rounds(size) * link.latency + most / link.bandwidth + most * link.reduction


def ring_all_gather(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a ring (Chan et al.): P - 1 messages of n / P bytes, n being the bytes of all ranks.

    Example:
        >>> from distopt import cost
        >>> f"{cost.ring_all_gather(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0747 s'
    """
    return _message(link, nbytes / size, size - 1)


def doubling_all_gather(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of recursive doubling (Thakur et al.): ceil(log2 P) messages, a ring's bytes.

    If P is no power of two, it is Bruck's algorithm.

    Example:
        >>> from distopt import cost
        >>> f"{cost.doubling_all_gather(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0746 s'
    """
    return _rounds(size) * link.latency + nbytes * (size - 1) / size / link.bandwidth


def pairwise_all_to_all(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a pairwise exchange (Thakur et al.): P - 1 messages of n / P bytes.

    Each rank exchanges a part with each other one; n is the bytes of all parts of one rank.

    Example:
        >>> from distopt import cost
        >>> f"{cost.pairwise_all_to_all(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0747 s'
    """
    return _message(link, nbytes / size, size - 1)


def tree_broadcast(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a binomial tree (Chan et al.): ceil(log2 P) messages of n bytes.

    Example:
        >>> from distopt import cost
        >>> f"{cost.tree_broadcast(1e3, 8, cost.LINKS['10GbE']) * 1e6:.1f} us"
        '92.6 us'
    """
    return _message(link, nbytes, _rounds(size))


def scatter_broadcast(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a tree's scatter and a ring's all-gather (Thakur et al.): ceil(log2 P) + P - 1 messages.

    Example:
        >>> from distopt import cost
        >>> f"{cost.scatter_broadcast(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.1492 s'
    """
    return doubling_all_gather(nbytes, size, link) + ring_all_gather(nbytes, size, link)


def chain_broadcast(nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a pipeline of ranks (Chan et al.; NCCL has it): P - 2 + s messages of n / s bytes.

    The number s of segments is the whole number that takes the least time.

    Example:
        >>> from distopt import cost
        >>> f"{cost.chain_broadcast(100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0931 s'
    """
    if size == 1:
        return 0.0
    ideal = math.sqrt((size - 2) * nbytes / link.bandwidth / link.latency) if link.latency else nbytes
    pieces = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    return min(_message(link, nbytes / s, size - 2 + s) for s in pieces)


def hierarchical_all_reduce(nbytes: float, ranks: int, nodes: int, inside: Link, between: Link) -> float:
    """Return the seconds of an all-reduce within and between nodes (Cho et al., 2019).

    It is a reduce-scatter inside each node, an all-reduce of slices between nodes, and an all-gather inside.

    Args:
        nbytes: the bytes of one rank.
        ranks: the number of ranks of a node; all of them exchange their slices with other nodes at the same time.
        nodes: the number of nodes.
        inside: the link between the ranks of a node.
        between: the link of a rank to other nodes; where the ranks of a node share one card, ``link.shared(ranks)``.

    Example:
        >>> from distopt import cost
        >>> between = cost.LINKS["100GbE"].shared(8)
        >>> f"{cost.hierarchical_all_reduce(100e6, 8, 4, cost.LINKS['NVLink'], between):.4f} s"
        '0.0143 s'
    """
    return (
        seconds("reduce_scatter", nbytes, ranks, inside)
        + seconds("all_reduce", nbytes / ranks, nodes, between)
        + seconds("all_gather", nbytes, ranks, inside)
    )


ALGORITHMS: dict[str, tuple[Formula, ...]] = {
    "all_reduce": (
        ring_all_reduce,
        halving_doubling_all_reduce,
        recursive_doubling_all_reduce,
        tree_all_reduce,
    ),
    "all_gather": (ring_all_gather, doubling_all_gather),
    "all_to_all": (pairwise_all_to_all,),
    "reduce_scatter": (ring_reduce_scatter, halving_reduce_scatter),
    "broadcast": (tree_broadcast, scatter_broadcast, chain_broadcast),
}


def algorithms(verb: str) -> tuple[Formula, ...]:
    """Return the formulas of the algorithms for a communicator's verb; ValueError for another verb.

    Example:
        >>> from distopt import cost
        >>> [formula.__name__ for formula in cost.algorithms("all_gather")]
        ['ring_all_gather', 'doubling_all_gather']
    """
    return ALGORITHMS[check_one_of("verb", verb, ALGORITHMS)]


def seconds(verb: str, nbytes: float, size: int, link: Link) -> float:
    """Return the seconds of a communicator's verb by the fastest algorithm for so many bytes, as MPI and NCCL choose.

    Args:
        verb: a key of ``ALGORITHMS``.
        nbytes: the bytes of one rank; of all ranks together for an all-gather.
        size: the number of ranks.
        link: each rank's link.

    Raises:
        ValueError: for another verb, ``nbytes`` below 0, fewer than 1 rank, or a link whose figures are out of range.

    Example:
        >>> from distopt import cost
        >>> f"{cost.seconds('broadcast', 100e6, 8, cost.LINKS['10GbE']):.4f} s"
        '0.0931 s'
    """
    nbytes, size, link = check_float("nbytes", nbytes), check_int("size", size, 1), checked(link)
    return min(algorithm(nbytes, size, link) for algorithm in algorithms(verb))
