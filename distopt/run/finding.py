"""One line of the report of ``distopt doctor``."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        status: 'ok', 'warn' or 'fail'.
        text: the observation.
        fix: the remedy, '' for none.
    """

    status: str
    text: str
    fix: str = ""


def missing(what: str, state: str) -> Finding:
    """Return a warning from a state 'cause: remedy'."""
    cause, _, fix = state.partition(": ")
    return Finding("warn", f"{what}: {cause}", fix)
