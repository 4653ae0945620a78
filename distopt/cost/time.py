"""Seconds by formula: what a collective takes on a link, by the alpha-beta-gamma model.

A message of n bytes takes ``alpha + n beta`` (Hockney, "The communication challenge for MPP", 1994), and ``n gamma``
if it is added up where it arrives; a rank sends and receives at the same time, and all ranks do so at once.  The
algorithms and their costs are those of Chan et al., "Collective communication: theory, practice, and experience"
(2007), and Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).

``nbytes`` is, as for a communicator's verbs, what one rank hands over, but for all-gathers: there it is the bytes of
all ranks together.  ``size`` is the number of ranks P, any from 1 on; one rank alone takes no time.
"""

import math
from collections.abc import Callable

from distopt.cost.links import Link, checked
from distopt.names import one_of
from distopt.numbers import number, whole

Formula = Callable[[float, int, Link], float]


def _message(link: Link, nbytes: float, times: float = 1.0) -> float:
    """So many messages, one after the other."""
    return times * (link.latency + nbytes / link.bandwidth)


def _rounds(size: int) -> int:
    """ceil(log2 P): of an algorithm that doubles the ranks that know something."""
    return (size - 1).bit_length()


def ring_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """A ring's reduce-scatter, and its all-gather (Chan et al.): 2 (P - 1) messages of n / P bytes."""
    return ring_reduce_scatter(nbytes, size, link) + ring_all_gather(nbytes, size, link)


def tree_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """A binomial tree to a root and back (Chan et al.): 2 ceil(log2 P) messages of n bytes."""
    return _rounds(size) * (2 * _message(link, nbytes) + nbytes * link.reduction)


def recursive_doubling_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """Pairs at distance 1, 2, 4, ... add all they have (Thakur et al.): log2 P messages of n bytes.

    If P is no power of two, the ranks above one hand theirs over first, and are told at the end.
    """
    core = 1 << (size.bit_length() - 1)
    one = _message(link, nbytes) + nbytes * link.reduction
    return _rounds(core) * one + (0.0 if size == core else one + _message(link, nbytes))


def halving_doubling_all_reduce(nbytes: float, size: int, link: Link) -> float:
    """Rabenseifner's: halving, then doubling (Thakur et al.): a ring's bytes in 2 ceil(log2 P) messages."""
    return halving_reduce_scatter(nbytes, size, link) + doubling_all_gather(nbytes, size, link)


def ring_reduce_scatter(nbytes: float, size: int, link: Link) -> float:
    """A bucket goes round and grows (Chan et al.): P - 1 messages of n / P bytes, each added up."""
    return (size - 1) * (_message(link, nbytes / size) + nbytes / size * link.reduction)


def halving_reduce_scatter(nbytes: float, size: int, link: Link) -> float:
    """Pairs at distance P / 2, P / 4, ... exchange halves (Thakur et al.): ceil(log2 P) messages, a ring's bytes.

    If P is no power of two, along a circulant graph (Traeff, "Optimal, non-pipelined reduce-scatter and allreduce
    algorithms", 2024), as Bruck's all-gather backwards.
    """
    most = nbytes * (size - 1) / size
    return _rounds(size) * link.latency + most / link.bandwidth + most * link.reduction


def ring_all_gather(nbytes: float, size: int, link: Link) -> float:
    """Every part goes round (Chan et al.): P - 1 messages of n / P bytes, n being those of all ranks."""
    return _message(link, nbytes / size, size - 1)


def doubling_all_gather(nbytes: float, size: int, link: Link) -> float:
    """Recursive doubling, or Bruck's algorithm if P is no power of two (Thakur et al.): ceil(log2 P) messages."""
    return _rounds(size) * link.latency + nbytes * (size - 1) / size / link.bandwidth


def pairwise_all_to_all(nbytes: float, size: int, link: Link) -> float:
    """Each rank with each other one (Thakur et al.): P - 1 messages of n / P bytes, n being all of a rank's parts."""
    return _message(link, nbytes / size, size - 1)


def tree_broadcast(nbytes: float, size: int, link: Link) -> float:
    """A binomial tree (Chan et al.): ceil(log2 P) messages of n bytes."""
    return _message(link, nbytes, _rounds(size))


def scatter_broadcast(nbytes: float, size: int, link: Link) -> float:
    """The root scatters by a tree, a ring gathers (Thakur et al.): ceil(log2 P) + P - 1 messages, a ring's bytes."""
    return doubling_all_gather(nbytes, size, link) + ring_all_gather(nbytes, size, link)


def chain_broadcast(nbytes: float, size: int, link: Link) -> float:
    """A pipeline of ranks (Chan et al.; NCCL has it): P - 2 + s messages of n / s bytes, for the best whole s."""
    if size == 1:
        return 0.0
    ideal = math.sqrt((size - 2) * nbytes / link.bandwidth / link.latency) if link.latency else nbytes
    pieces = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    return min(_message(link, nbytes / s, size - 2 + s) for s in pieces)


def hierarchical_all_reduce(nbytes: float, ranks: int, nodes: int, inside: Link, between: Link) -> float:
    """Reduce-scatter inside a node, all-reduce of slices between nodes, all-gather inside (Cho et al., 2019).

    Of ``ranks`` on each of ``nodes``, all exchange their slice with the other nodes' at the same time: where they have
    but one card, ``between`` is ``link.shared(ranks)``.
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
    """Those by which a verb of a communicator can be done; ValueError for another verb."""
    return ALGORITHMS[one_of("verb", verb, ALGORITHMS)]


def seconds(verb: str, nbytes: float, size: int, link: Link) -> float:
    """What a communicator's verb takes by the algorithm that is best for so many bytes, as MPI and NCCL choose.

    Raises ValueError for another verb, for ``nbytes`` below 0, for fewer than 1 rank, and for a link that cannot be.
    """
    nbytes, size, link = number("nbytes", nbytes), whole("size", size, 1), checked(link)
    return min(algorithm(nbytes, size, link) for algorithm in algorithms(verb))
