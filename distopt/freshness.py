"""Which gradients are new, and on which ranks: what the ranks tell each other, and what is said to the user."""

import json
from collections.abc import Mapping, Sequence

NAMED = 5  # parameters in a text


def told(stale: Sequence[str]) -> str:
    """What a rank reports of its gradients that are stale, by name; '' if none is."""
    return json.dumps(stale) if stale else ""


def by_name(reports: Sequence[str]) -> dict[str, list[int]]:
    """The ranks on which each gradient is stale, from all ranks' reports."""
    found: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for name in json.loads(report) if report else ():
            found.setdefault(name, []).append(rank)
    return found


def complaint(stale: Mapping[str, Sequence[int]]) -> str:
    """The text of an error."""
    who = [f"{name} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" for name, ranks in stale.items()]
    more = f" and {len(who) - NAMED} more" * (len(who) > NAMED)
    return (
        f"stale since the last step: the gradients of {', '.join(who[:NAMED])}{more}; assign param.grad, or call "
        "param.touch() after writing to it; ignore_stale_grad=True goes on without them"
    )
