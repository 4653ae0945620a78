"""The agreement of all ranks on what they are about to do."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distopt.comm import Communicator
from distopt.comm.control import by_rank, fingerprint
from distopt.comm.ranks import Ranks


class AllJoinedError(Exception):
    """No rank has batches left, which all ranks raise."""

    # As ``comm.control.agreed`` marks what all ranks raise: no rank prints a traceback.
    agreed = False, 0.0


class Agreement:
    """Votes of all ranks before data moves."""

    # What a rank is about to do is declared in lines of text.  A vote compares their fingerprints, and tells which line
    # differs if they do; it also carries an error or a report of each rank.

    def __init__(self, comm: Communicator, kind: str):
        self._comm, self._kind = comm, kind
        comm.control.optimizers += 1
        # Among those that were made on this communicator, from 1.
        self.number = comm.control.optimizers
        # This rank has no batches left, and takes part in the others' steps.
        self.joined = False
        # How many ranks had not joined, and which had, as of the last vote.
        self.live = comm.ranks.size
        self.all_joined: frozenset[int] = frozenset()
        # The declaration that holds, the optimizer last; [] if there is none.
        self.lines: list[str] = []
        self._fingerprint = 0
        self._numbers: list[str] = []
        self._numbers_fingerprint = 0

    def declare(self, lines: list[str], known_fingerprint: int | None = None) -> None:
        """Declare what this rank is about to do, in lines that must be the same on all ranks."""
        self.lines, self._fingerprint = lines, fingerprint(lines) if known_fingerprint is None else known_fingerprint

    def declare_numbers(self, numbers: list[str]) -> None:
        """Declare what else must be the same on all ranks, and may change from step to step."""
        if numbers != self._numbers:
            self._numbers, self._numbers_fingerprint = numbers, fingerprint(numbers)

    def forget(self) -> None:
        """Drop the declaration, in which something may be put right."""
        self.lines = []

    def vote(
        self,
        name: str,
        number: int,
        error: Exception | None = None,
        report: str = "",
        part: str = "",
        doubts: bool = False,
    ) -> list[str]:
        """Vote on a call; return one report per rank, [] if none has any.  Collective."""
        # Raises, on every rank, the error of the lowest rank that has one, or ValueError with the first line that
        # differs. part: what of the call the vote is about, if it has several.
        control, crc = self._comm.control, self._comm.collectives_fingerprint
        ballot = self._fingerprint ^ number ^ self.number << 40 ^ self._numbers_fingerprint ^ crc

        def describe() -> list[str]:
            optimizer = f"{self._kind} {self.number} of those made on this communicator"
            enqueued = (
                f"enqueued collectives of the fingerprint {crc:08x} (a loss that uses the communicator must do "
                "so between the same gradients on every rank; this run cannot go on)"
            )
            # The whole rule last: one of its numbers says more.
            *lines, rule = self.lines or [""]
            return [optimizer, *lines, name + part, *self._numbers, rule, enqueued]

        reports = control.vote(name, ballot, describe, error, report, part, self.joined, doubts)
        self.live, self.all_joined = self._comm.ranks.size - len(control.joined), control.joined
        return reports

    def vote_on_lines(
        self, name: str, lines: list[str], error: Exception | None = None, report: str = "", part: str = ""
    ) -> list[str]:
        """Vote on lines alone, beside the declaration.  Collective; returns and raises as ``vote``."""

        def vote() -> list[str]:
            return self._comm.control.vote(name, fingerprint(lines), lambda: lines, error, report, part, self.joined)

        reports, control = self._comm.transaction(vote), self._comm.control
        self.live, self.all_joined = self._comm.ranks.size - len(control.joined), control.joined
        return reports

    def run_on_all(self, line: str, do: Callable[..., Any], *arguments: Any) -> list[str]:
        """Call ``do`` on every rank; return the texts that it returned, '' for anything else.  Collective."""
        # What it raises on the lowest rank where it does, all ranks raise.
        report, error = "", None
        try:
            returned = do(*arguments)
            report = returned if isinstance(returned, str) else ""
        except Exception as e:
            error = e
        control = self._comm.control
        reports = control.vote(line, fingerprint([line]), lambda: [line], error, report)
        return reports or [""] * self._comm.size


class GradientReport(NamedTuple):
    """What a rank tells of its gradients, in the vote on a step."""

    # By parameter.
    nonfinite: Mapping[str, str] = {}
    # The parameters without a gradient, as bits of a number.
    missing: int = 0

    @classmethod
    def decoded(cls, text: str) -> "GradientReport":
        """Return what ``encoded`` has made a text of; '' is an empty one."""
        bits, _, found = text.partition(" ")
        return cls(json.loads(found), int(bits, 16)) if bits else cls()

    def encoded(self) -> str:
        """Return it as a text."""
        return f"{self.missing:x} {json.dumps(self.nonfinite)}"


def encode(reports: Iterable[GradientReport]) -> str:
    """Return the reports of the ranks that live here as one text, '' if they are empty."""
    texts = [report.encoded() if report != EMPTY else "" for report in reports]
    return "\n".join(texts) if any(texts) else ""


def decode(texts: Sequence[str], ranks: Ranks) -> list[GradientReport]:
    """Return the reports of all ranks, of the texts of all processes."""
    if not ranks.by_process:
        return list(map(GradientReport.decoded, texts))
    each = [
        text.split("\n") if text else [""] * len(there) for text, there in zip(texts, ranks.by_process, strict=True)
    ]
    return list(map(GradientReport.decoded, ranks.in_order(each)))


EMPTY = GradientReport()


def describe(nonfinite: Sequence[Mapping[str, str]], but: Collection[str] = ()) -> str:
    """Return what is not finite on which rank, in one line; '' if all is.  Parameters in ``but`` do not count."""
    return by_rank([", ".join(f"{n} ({text})" for n, text in found.items() if n not in but) for found in nonfinite])
