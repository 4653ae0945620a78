"""Reports of stale gradients: what the ranks tell each other, and the error for the user."""

import json
from collections.abc import Mapping, Sequence

# parameters named in an error
NAMED = 5


def stale_by_name(reports: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks on which each gradient is stale, from the reports of all ranks."""
    ranks_by_name: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for name in json.loads(report) if report else ():
            ranks_by_name.setdefault(name, []).append(rank)
    return ranks_by_name


def stale_message(stale: Mapping[str, Sequence[int]]) -> str:
    """Return the text of the error for stale gradients."""
    who = [f"{name} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" for name, ranks in stale.items()]
    more = f" and {len(who) - NAMED} more" * (len(who) > NAMED)
    return (
        f"stale since the last step: the gradients of {', '.join(who[:NAMED])}{more}; assign param.grad, or call "
        "param.touch() after writing to it; ignore_stale_grad=True goes on without them"
    )
