"""What ranks tell each other of their gradients, in the vote on a step."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from distopt.comm.control import by_rank


class Report(NamedTuple):
    """What a rank tells of its gradients."""

    # By parameter.
    nonfinite: Mapping[str, str] = {}
    # The parameters without a gradient, as bits of a number.
    missing: int = 0

    def encoded(self) -> str:
        """Return it as a text."""
        return f"{self.missing:x} {json.dumps(self.nonfinite)}"


def decode(texts: Sequence[str]) -> list[Report]:
    """Return the reports of all ranks."""
    split = (text.partition(" ") for text in texts)
    return [Report(json.loads(found), int(bits, 16)) if bits else Report() for bits, _, found in split]


def describe(nonfinite: Sequence[Mapping[str, str]], but: Collection[str] = ()) -> str:
    """Return what is not finite on which rank, in one line; '' if all is.  Parameters in ``but`` do not count."""
    return by_rank([", ".join(f"{n} ({text})" for n, text in found.items() if n not in but) for found in nonfinite])
