"""Names that a user gives, and the closest that there are."""

import difflib
from collections.abc import Iterable


def nearest(given: object, known: Iterable[str], most: int = 1, least: float = 0.6) -> str:
    """'; did you mean ...?' with up to ``most`` names, in whatever case; empty if none is as close as ``least``."""
    names = {name.lower(): name for name in known}
    near = [names[name] for name in difflib.get_close_matches(str(given).lower(), names, most, least)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def one_of(what: str, given: str, known: Iterable[str]) -> str:
    """``given`` itself; ValueError, with all names and the closest, if it is none of those that are known."""
    names = list(known)
    if given not in names:
        raise ValueError(f"{what} must be one of {', '.join(names)}, got {given!r}{nearest(given, names)}")
    return given


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """The words for a name that there is not: those there are, and the closest."""
    names = sorted(known)
    return f"there is no {what} {given!r}: there are {', '.join(names) or 'none'}{nearest(given, names)}"
