"""The memberships of a job's communicators: who asks for the next epoch, and who is told of it."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distopt.resilience.job import AWAITED
from distopt.resilience.membership import Membership

WORLD = "world"  # the communicator that all ranks which were started are in


class Memberships:
    """A ``Membership`` for each communicator of a job, and what its processes tell each other."""

    # The first epoch of a communicator waits for all processes that live when it is asked for first; that of `WORLD`
    # waits for all that were started.

    def __init__(
        self,
        members: Iterable[int],
        send: Callable[[int, Mapping[str, Any]], object],
        folder: Path,
    ):
        self._send = send  # is given a number, and a message for that process
        self._living = set(members)
        self._awaited = folder / AWAITED
        self._of = {WORLD: Membership(self._living)}
        self._lock = threading.Lock()

    def add(self, member: int) -> None:
        """Add one more process, which is admitted when all members of ``WORLD`` say so."""
        with self._lock:
            self._living.add(member)

    def hear(self, member: int, message: Mapping[str, Any] | None) -> None:
        """Act on what a process says; None when it has ended."""
        if message is None:
            self.lose(member)
            return
        with self._lock:
            if member not in self._living:  # what it has sent may come after the news of its end
                return
            match message:
                case {"put": _, "to": to}:
                    for other in self._living.intersection(to):
                        self._send(other, message)
                case {"of": name, **asked}:
                    self._ask(member, name, **asked)

    def lose(self, member: int) -> None:
        """A member has ended: the others continue without it."""
        with self._lock:
            if member in self._living:
                self._living.remove(member)
                for other in self._living:
                    self._send(other, {"lost": member})
                for name, membership in self._of.items():
                    membership.lose(member)
                    self._begin(name)

    def awaited(self) -> set[int]:
        """The members that have not asked for an epoch that others wait for."""
        with self._lock:
            return set().union(*(membership.awaited() for membership in self._of.values()))

    def _ask(self, member: int, name: str, text: str, lets_in: bool, first: Sequence[int]) -> None:
        members = self._living & set(first) if first else self._living
        self._of.setdefault(name, Membership(members)).ask(member, text, lets_in)
        self._begin(name)

    def _begin(self, name: str) -> None:
        """Tell the members of a communicator of its next epoch, if it begins."""
        epoch = self._of[name].begin()
        if name == WORLD and bool(self._of[name].newcomers()) != self._awaited.exists():
            self._awaited.unlink() if self._awaited.exists() else self._awaited.touch(mode=0o600)
        if epoch:
            for member in epoch.members:
                self._send(member, {"of": name, **epoch._asdict()})
