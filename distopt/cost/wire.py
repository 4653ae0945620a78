"""Bytes by formula: what one rank sends for a collective, per rank and averaged over ranks.

The formulas are those of the bandwidth-optimal algorithms (Chan et al., "Collective communication: theory, practice,
and experience", 2007, sections 4 and 5); ``nbytes`` is what every rank hands to the collective.
"""


def all_reduce(nbytes: int, size: int) -> int:
    """Ring: a reduce-scatter and an all-gather, 2 (P - 1) / P of the data each rank holds."""
    return 2 * (size - 1) * nbytes // size


def reduce_scatter(nbytes: int, size: int) -> int:
    """Ring or pairwise: (P - 1) / P of the data each rank holds."""
    return (size - 1) * nbytes // size


def all_gather(total: int, size: int) -> int:
    """Ring: every rank's part, ``total`` bytes together, passes over every link but one."""
    return (size - 1) * total // size


def all_to_all(total: int, own: int) -> int:
    """Pairwise: all parts but the one that stays here."""
    return total - own


def broadcast(nbytes: int, size: int) -> int:
    """Pipelined: every rank but the last passes the data on once."""
    return (size - 1) * nbytes // size
