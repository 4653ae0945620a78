"""What ranks tell each other of their gradients, in the vote on a step."""

from collections.abc import Sequence

from distopt.comm.control import by_rank


def encode(nonfinite: str, missing: int) -> str:
    """Return a rank's report; '' if there is nothing to tell.

    Args:
        nonfinite: what is not finite; '' if all is.
        missing: the parameters without a gradient, as bits of a number.
    """
    return f"{missing:x} {nonfinite}" if missing or nonfinite else ""


def decode(reports: Sequence[str]) -> tuple[str, list[int]]:
    """Return what is not finite on which rank, in one line, and the parameters without a gradient of each rank.

    Example:
        >>> decode(["2 ", "", "3 w"])
        ('rank 2: w', [2, 0, 3])
    """
    missing, _, nonfinite = zip(*(report.partition(" ") for report in reports), strict=True)
    return by_rank(list(nonfinite)), [int(bits or "0", 16) for bits in missing]
