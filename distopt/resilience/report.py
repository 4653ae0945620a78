"""Answers of ranks about what they do, and reports for people made of them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distopt.resilience.operation_log import Operation, OperationRecorder
from distopt.resilience.script_line import script_line

NO_ANSWER = "no answer (stopped, dead, or holding the interpreter lock)"

Answer = dict[str, Any]


def answer(recorder: OperationRecorder) -> Answer:
    """Return this rank's present state."""
    # Returns `waits`, a list of (log, number, text, seconds) of the operations that last; `last`, a list with the
    # (text, seconds since its end) of the last that has ended, if there is one; and `at`, the script's line.
    now, ended = time.monotonic(), [o for o in recorder.operations() if o.ended]
    waits = [(*o.key, str(o), now - o.began) for o in recorder.open()]
    return {"waits": waits, "last": [(str(o), now - o.ended) for o in ended[-1:]], "at": script_line()}


def line(reply: Answer | None, operation: Operation) -> str:
    """A rank's state in words, for a rank that waits for an operation's end; ``reply`` is None for no answer."""
    if reply is None:
        return NO_ANSWER
    at = f"; at {reply['at']}" if reply["at"] else ""
    for name, number, text, seconds in reply["waits"]:
        if (name, number) == operation.key:
            same = text == str(operation)
            return f"waits for the same{at}" if same else f"waits since {seconds:.1f} s for {text} in its place{at}"
    for _, _, text, seconds in reply["waits"]:
        return f"waits since {seconds:.1f} s for {text}{at}"
    if not reply["last"]:
        return f"no operation so far{at}"
    text, seconds = reply["last"][0]
    return f"in no operation; {text} ended {seconds:.1f} s ago{at}"


def report(
    rank: int, operation: Operation, seconds: float, ranks: Sequence[int], replies: Mapping[int, Answer], end: str
) -> str:
    """A report on a rank that has waited for an operation for so many seconds, with the answers of all others."""
    # end: the report's last line.
    script = replies.get(rank, {}).get("at")
    lines = [f"distopt: rank {rank} waits since {seconds:.1f} s for {operation}{f'; at {script}' if script else ''}"]
    ranks_by_line: dict[str, list[int]] = {}
    for other in ranks:
        if other != rank:
            ranks_by_line.setdefault(line(replies.get(other), operation), []).append(other)
    lines += [f"  {names(group)}: {state}" for state, group in ranks_by_line.items()]
    return "\n".join([*lines, end, ""])


def names(ranks: Iterable[int]) -> str:
    """Ranks in words, such as 'rank 3', 'ranks 0, 2' or 'ranks 0 to 63, 65'."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    single = len(rows) == len(rows[0]) == 1
    texts = [f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return f"rank{'' if single else 's'} {', '.join(texts)}"


def waiting(ranks: Iterable[int]) -> str:
    """Ranks with a verb, as 'rank 3 waits' or 'ranks 0, 2 wait'."""
    subject = names(ranks)
    return f"{subject} {'waits' if subject.startswith('rank ') else 'wait'}"
