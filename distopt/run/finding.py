"""One line of the report of ``distopt doctor``."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One line of the report."""

    status: str  # 'ok', 'warn' or 'fail'
    text: str
    fix: str = ""


def missing(what: str, state: str) -> Finding:
    cause, _, fix = state.partition(": ")
    return Finding("warn", f"{what}: {cause}", fix)
