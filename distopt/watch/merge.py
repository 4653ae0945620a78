"""Flight records of several ranks, read as one story: where they part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distopt.watch.report import names

Record = dict[str, Any]
Entries = dict[int, dict[str, Any]]  # by number
STALE = 60.0  # seconds after which a rank's record is an earlier job's


class Finding(NamedTuple):
    """A sentence, and when what it is about began, by the clock of the rank that was first."""

    when: float
    text: str


def tell(records: Sequence[Record]) -> list[str]:
    """Lines: an early record that does not belong to the others, where ranks part, and where each of them is."""
    newest = max(r["wall"] for r in records)
    stale = [r["rank"] for r in records if r["wall"] < newest - STALE]
    fresh = {r["rank"]: r for r in sorted(records, key=lambda r: r["rank"]) if r["rank"] not in stale}
    lines = [f"left out, since of an earlier job: {names(stale)}"] if stale else []
    found = sorted(finding for log in _logs(fresh) for finding in _part(log, fresh))
    lines += [f.text for f in found] or ["the ranks do not part: all have completed what any has begun"]
    absent = sorted({m for r in fresh.values() for members in r["logs"].values() for m in members} - set(fresh))
    if absent:
        lines.append(f"no record of {names(absent)}: stopped, dead, or holding the interpreter lock")
    return lines + [f"  rank {rank}: {_state(record)}" for rank, record in fresh.items()]


def _logs(records: Mapping[int, Record]) -> list[str]:
    """Those that several ranks have to have alike."""
    return list({log: None for r in records.values() for log, members in r["logs"].items() if len(members) > 1})


def _part(log: str, records: Mapping[int, Record]) -> Iterator[Finding]:
    """Where the ranks part in one log, if they do."""
    ranks = {rank: _entries(r, log) for rank, r in records.items() if any(rank in m for m in _members(r, log))}
    numbers = sorted({n for entries in ranks.values() for n in entries})
    for number in numbers:
        here = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
        texts: dict[str, list[int]] = {}
        for rank, entry in here.items():
            texts.setdefault(entry["text"], []).append(rank)
        if len(texts) > 1:
            parts = "; ".join(f"{names(who)} in {text}" for text, who in texts.items())
            yield Finding(_when(here, records), f"the ranks differ: {parts}")
            return
    yield from _first_missed(ranks, numbers, records)


def _first_missed(
    ranks: Mapping[int, Entries], numbers: Sequence[int], records: Mapping[int, Record]
) -> Iterator[Finding]:
    """The first operation that one rank has begun and another one has not, or that nobody has ended."""
    done = min((_last(entries, lambda e: e["ended"] > 0) for entries in ranks.values()), default=0)
    number = next((n for n in numbers if n > done), None)
    if number is None:
        return
    here = {rank: entries[number] for rank, entries in ranks.items() if number in entries}
    came = [r for r in ranks if _last(ranks[r], lambda e: True) >= number]
    missing = [r for r in ranks if r not in came]
    text = next(iter(here.values()))["text"]
    if missing:
        sentence = f"{names(came)} began {text}; {names(missing)} did not: {_places(missing, records)}"
    else:
        sentence = f"{names(came)} began {text}, which not all ended"
    before = next((e[done]["text"] for e in ranks.values() if done in e), "")
    yield Finding(_when(here, records), sentence + f" (the last that all completed: {before})" * bool(before))


def _places(ranks: Sequence[int], records: Mapping[int, Record]) -> str:
    """Where scripts are."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(records[rank]["at"] or "an unknown line", []).append(rank)
    return "; ".join(f"{names(who)} at {place}" if len(ranks) > 1 else f"at {place}" for place, who in found.items())


def _members(record: Record, log: str) -> list[list[int]]:
    return [record["logs"][log]] if log in record["logs"] else []


def _entries(record: Record, log: str) -> Entries:
    return {e["number"]: e for e in record["operations"] if e["log"] == log}


def _last(entries: Entries, which: Callable[[dict[str, Any]], bool]) -> int:
    return max((n for n, e in entries.items() if which(e)), default=0)


def _when(here: Mapping[int, dict[str, Any]], records: Mapping[int, Record]) -> float:
    """By the ranks' wall clocks."""
    return min(float(records[r]["wall"] - records[r]["now"] + e["began"]) for r, e in here.items())


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
