"""Flight records as a trace that Perfetto and chrome://tracing show."""

from collections.abc import Iterator, Mapping
from typing import Any


def trace(records: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the trace events of flight records, by rank: a process for each rank, a row for each thread and log."""
    return {"traceEvents": [event for rank, record in records.items() for event in _events(rank, record)]}


def _events(rank: int, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rows = dict[str, int]()  # a number for each thread and log
    wall = record["wall"] - record["now"]  # where this rank's clock shows 0

    def event(row: str, name: str, began: float, ended: float, **args: Any) -> dict[str, Any]:
        place = {"pid": rank, "tid": rows.setdefault(row, len(rows))}
        return {
            "name": name,
            "ph": "X",
            **place,
            "ts": 1e6 * (wall + began),
            "dur": 1e6 * (ended - began),
            "args": args,
        }

    for r in record.get("ranges", []):
        yield event(r["thread"], r["phase"], r["began"], r["ended"], bucket=r["bucket"], bytes=r["bytes"])
    next_in = dict[str, float]()
    for o in reversed(record["operations"]):
        # One of several that are under way has no end of its own; nor has one that lasts.
        ended = o["ended"] or next_in.get(o["log"], record["now"])
        next_in[o["log"]] = o["began"]
        yield event(f"waits, {o['log']}", o["text"], o["began"], ended, bytes=o["bytes"])
    for row, number in rows.items():
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": row}}
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
