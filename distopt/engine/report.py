"""What ranks tell each other of their gradients, in the vote on a step."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distopt.comm.control import by_rank


class Report(NamedTuple):
    """What a rank tells of its gradients.

    Args:
        nonfinite: what is not finite, by parameter.
        missing: the parameters without a gradient, as bits of a number.
    """

    nonfinite: Mapping[str, str] = {}
    missing: int = 0

    def encoded(self) -> str:
        """Return it as a text."""
        return f"{self.missing:x} {json.dumps(self.nonfinite)}"


def decode(texts: Sequence[str]) -> list[Report]:
    """Return the reports of all ranks.

    Example:
        >>> decode(["2 {}", "", Report({"w": "1 of 4 entries"}, 3).encoded()])[2]
        Report(nonfinite={'w': '1 of 4 entries'}, missing=3)
    """
    split = (text.partition(" ") for text in texts)
    return [Report(json.loads(found), int(bits, 16)) if bits else Report() for bits, _, found in split]


def describe(nonfinite: Sequence[Mapping[str, str]], but: Collection[str] = ()) -> str:
    """Return what is not finite on which rank, in one line; '' if all is.

    Args:
        nonfinite: of each rank, as of ``Report``.
        but: parameters that do not count.

    Example:
        >>> describe([{}, {"v": "3 of 4 entries", "w": "1 of 2 entries"}], but=["v"])
        'rank 1: w (1 of 2 entries)'
    """
    return by_rank([", ".join(f"{n} ({text})" for n, text in found.items() if n not in but) for found in nonfinite])
