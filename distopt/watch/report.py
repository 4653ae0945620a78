"""What ranks say of themselves, and what is made of it for people."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distopt.watch.place import place
from distopt.watch.recorder import Operation, Recorder

NO_ANSWER = "no answer (stopped, dead, or holding the interpreter lock)"

Answer = dict[str, Any]


def answer(recorder: Recorder) -> Answer:
    """What this rank is doing now."""
    now, ended = time.monotonic(), [o for o in recorder.operations() if o.ended]
    waits = [(*o.key, str(o), now - o.began) for o in recorder.open()]
    return {"waits": waits, "last": [(str(o), now - o.ended) for o in ended[-1:]], "at": place()}


def line(found: Answer | None, asked: Operation) -> str:
    """What a rank does while another one waits for the end of ``asked``."""
    if found is None:
        return NO_ANSWER
    at = f"; at {found['at']}" if found["at"] else ""
    for name, number, text, seconds in found["waits"]:
        if (name, number) == asked.key:
            same = text == str(asked)
            return f"waits for the same{at}" if same else f"waits since {seconds:.1f} s for {text} in its place{at}"
    for _, _, text, seconds in found["waits"]:
        return f"waits since {seconds:.1f} s for {text}{at}"
    if not found["last"]:
        return f"no operation so far{at}"
    text, seconds = found["last"][0]
    return f"in no operation; {text} ended {seconds:.1f} s ago{at}"


def report(
    rank: int, asked: Operation, seconds: float, ranks: Sequence[int], found: Mapping[int, Answer], end: str
) -> str:
    """Who waits for what, and where all others are; ``end`` is the last line."""
    own = found.get(rank, {}).get("at")
    lines = [f"distopt: rank {rank} waits since {seconds:.1f} s for {asked}{f'; at {own}' if own else ''}"]
    said: dict[str, list[int]] = {}
    for other in ranks:
        if other != rank:
            said.setdefault(line(found.get(other), asked), []).append(other)
    lines += [f"  {names(who)}: {what}" for what, who in said.items()]
    return "\n".join([*lines, end, ""])


def names(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 0, 2', 'ranks 0 to 63, 65'."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    one = len(rows) == len(rows[0]) == 1
    texts = [f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return f"rank{'' if one else 's'} {', '.join(texts)}"


def waiting(ranks: Iterable[int]) -> str:
    """'rank 3 waits', 'ranks 0, 2 wait'."""
    found = names(ranks)
    return f"{found} {'waits' if found.startswith('rank ') else 'wait'}"
