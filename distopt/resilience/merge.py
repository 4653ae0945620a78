"""Flight records of several ranks, compared: the first operation in which they differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distopt.resilience.report import names

Record = dict[str, Any]
Entries = dict[int, dict[str, Any]]  # operations by number
STALE = 60.0  # seconds after which a rank's record is an earlier job's


class Difference(NamedTuple):
    """A place where ranks differ."""

    # the time at which the operation began, in seconds, by the wall clock of the rank that was first
    when: float
    text: str


def tell(records: Sequence[Record]) -> list[str]:
    """Return a report's lines: stale records of an earlier job, where ranks differ, and where each of them is."""
    fresh = of_one_job(records)
    stale = [r["rank"] for r in records if r["rank"] not in fresh]
    lines = [f"left out, since of an earlier job: {names(stale)}"] if stale else []
    differences = sorted(difference for log in _logs(fresh) for difference in _part(log, fresh))
    lines += [f.text for f in differences] or ["the ranks do not part: all have completed what any has begun"]
    absent = sorted({m for r in fresh.values() for members in r["logs"].values() for m in members} - set(fresh))
    if absent:
        lines.append(f"no record of {names(absent)}: stopped, ended too early, or holding the interpreter lock")
    return lines + [f"  rank {rank}: {_state(record)}" for rank, record in fresh.items()]


def of_one_job(records: Sequence[Record]) -> dict[int, Record]:
    """Return the records by rank, without those of an earlier job."""
    newest = max(r["wall"] for r in records)
    return {r["rank"]: r for r in sorted(records, key=lambda r: r["rank"]) if r["wall"] >= newest - STALE}


def _logs(records: Mapping[int, Record]) -> list[str]:
    """The names of the logs that must be the same on several ranks."""
    return list({log: None for r in records.values() for log, members in r["logs"].items() if len(members) > 1})


def _part(log: str, records: Mapping[int, Record]) -> Iterator[Difference]:
    """Yield the first operation in which the ranks differ in one log, if they do."""
    ranks = {rank: _entries(r, log) for rank, r in records.items() if any(rank in m for m in _members(r, log))}
    numbers = sorted({n for entries in ranks.values() for n in entries})
    for number in numbers:
        entries_by_rank = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
        texts: dict[str, list[int]] = {}
        for rank, entry in entries_by_rank.items():
            texts.setdefault(entry["text"], []).append(rank)
        if len(texts) > 1:
            parts = "; ".join(f"{names(group)} in {text}" for text, group in texts.items())
            yield Difference(_when(entries_by_rank, records), f"the ranks differ: {parts}")
            return
    yield from _first_missed(ranks, numbers, records)


def _first_missed(
    ranks: Mapping[int, Entries], numbers: Sequence[int], records: Mapping[int, Record]
) -> Iterator[Difference]:
    """Yield the first operation that some ranks have begun and others not, or that not all ranks have ended."""
    done = min((_last(entries, lambda e: e["ended"] > 0) for entries in ranks.values()), default=0)
    number = next((n for n in numbers if n > done), None)
    if number is None:
        return
    entries_by_rank = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
    came = [r for r in ranks if _last(ranks[r], lambda e: True) >= number]
    missing = [r for r in ranks if r not in came]
    text = next(iter(entries_by_rank.values()))["text"]
    if missing:
        sentence = f"{names(came)} began {text}; {names(missing)} did not: {_places(missing, records)}"
    else:
        sentence = f"{names(came)} began {text}, which not all ended"
    previous = next((e[done]["text"] for e in ranks.values() if done in e), "")
    yield Difference(
        _when(entries_by_rank, records), sentence + f" (the last that all completed: {previous})" * bool(previous)
    )


def _places(ranks: Sequence[int], records: Mapping[int, Record]) -> str:
    """The scripts' lines at which ranks are, as a text."""
    ranks_by_line: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_by_line.setdefault(records[rank]["at"] or "an unknown line", []).append(rank)
    return "; ".join(
        f"{names(group)} at {line}" if len(ranks) > 1 else f"at {line}" for line, group in ranks_by_line.items()
    )


def _members(record: Record, log: str) -> list[list[int]]:
    return [record["logs"][log]] if log in record["logs"] else []


def _entries(record: Record, log: str) -> Entries:
    return {e["number"]: e for e in record["operations"] if e["log"] == log}


def _last(entries: Entries, which: Callable[[dict[str, Any]], bool]) -> int:
    return max((n for n, e in entries.items() if which(e)), default=0)


def _when(entries_by_rank: Mapping[int, dict[str, Any]], records: Mapping[int, Record]) -> float:
    """The earliest begin of some operations by the ranks' wall clocks, in seconds."""
    return min(float(records[r]["wall"] - records[r]["now"] + e["began"]) for r, e in entries_by_rank.items())


def _state(record: Record) -> str:
    waits = [e for e in record["operations"] if not e["ended"]]
    at = f"; at {record['at']}" if record["at"] else ""
    if waits:
        return "; ".join(f"waited {record['now'] - e['began']:.1f} s for {e['text']}" for e in waits) + at
    ended = max(record["operations"], key=lambda e: e["ended"], default=None)
    return (
        f"in no operation; {ended['text']} ended {record['now'] - ended['ended']:.1f} s before"
        if ended
        else "no operation"
    ) + at
