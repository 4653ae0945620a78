"""What one rank writes into its ledger for every verb."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from distopt.cost import Algorithm, Moved, shares
from distopt.ledger import Anatomy, Entry, Ledger, Purpose, share_out


class Meter:
    """Rank ``rank`` of ``size``, of which each sits on one of ``hosts``; ``algorithm`` is how collectives are done."""

    def __init__(self, rank: int, size: int, hosts: Sequence[int], algorithm: Algorithm, ledger: Ledger):
        self.rank, self.size, self._algorithm, self.ledger = rank, size, algorithm, ledger
        self._hosts, self._spans = hosts, len(set(hosts)) > 1
        self._now = Purpose()

    @contextlib.contextmanager
    def on_behalf_of(self, purpose: Purpose) -> Iterator[None]:
        """What is written in this context is part of something."""
        before, self._now = self._now, purpose
        try:
            yield
        finally:
            self._now = before

    def look(self, payload: np.ndarray) -> Anatomy:
        """What a payload that is gathered consists of."""
        return self._now.anatomy(payload) if self._now.anatomy else Anatomy(payload.nbytes)

    def all_reduce(self, n: int, itemsize: int) -> None:
        """n elements; on the wire their slices, which are added up and sent to all."""
        self._sum("all_reduce", n, itemsize, self._algorithm.all_reduce(shares(n, itemsize, self.size), self.rank))

    def reduce_scatter(self, n: int, itemsize: int) -> None:
        """n elements; on the wire all slices but this rank's."""
        moved = self._algorithm.reduce_scatter(shares(n, itemsize, self.size), self.rank)
        self._sum("reduce_scatter", n, itemsize, moved)

    def broadcast(self, n: int, itemsize: int, root: int) -> None:
        """n elements, which all ranks but the last one pass on."""
        self._sum("broadcast", n, itemsize, self._algorithm.broadcast(n * itemsize, self.size, root, self.rank))

    def all_gather(self, sizes: Sequence[int], anatomy: Anatomy) -> None:
        """A payload of every rank, of these sizes in bytes; what this rank's consists of."""
        moved = self._algorithm.all_gather(sizes, self.rank)
        self._write("all_gather", sizes[self.rank], moved, anatomy, self._parts(anatomy, None, 1))

    def all_to_all(self, sizes: Sequence[int], got: Sequence[int]) -> None:
        """Parts of these sizes in bytes; on the wire those for others."""
        total = sum(sizes)
        self._write("all_to_all", total, self._algorithm.all_to_all(sizes, got, self.rank), Anatomy(total))

    def lengths(self) -> None:
        """8 bytes, which are no values, to every other rank."""
        self._write("lengths", 8, self._algorithm.all_gather([8] * self.size, self.rank), Anatomy(0))

    def _sum(self, verb: str, n: int, itemsize: int, moved: Moved) -> None:
        anatomy = Anatomy(n * itemsize)
        self._write(verb, n * itemsize, moved, anatomy, self._parts(anatomy, n, itemsize))

    def _parts(self, anatomy: Anatomy, n: int | None, itemsize: int) -> list[int]:
        """The bytes of each member: of a flat array of n elements its own, of entries in proportion to their number."""
        members = self._now.members
        if members is None:
            return []
        sizes = members.rows["size"].astype(np.int64)
        if n == members.extent:
            return (sizes * itemsize).tolist()  # type: ignore[no-any-return]
        counts = sizes if anatomy.counts is None else anatomy.counts
        return share_out(anatomy.values + anatomy.indices, counts)

    def _write(self, verb: str, payload: int, moved: Moved, anatomy: Anatomy, parts: Sequence[int] = ()) -> None:
        now = self._now
        sent_between, received_between = moved.between(self._hosts, self.rank) if self._spans else (0, 0)
        self.ledger.add(
            Entry(
                step=now.step,
                phase=now.phase,
                bucket=now.bucket,
                verb=verb,
                payload=payload,
                values=anatomy.values,
                indices=anatomy.indices,
                ideal=8 * payload if anatomy.ideal is None else anatomy.ideal,
                sent=sum(moved.sent),
                received=sum(moved.received),
                sent_between=sent_between,
                received_between=received_between,
                names=now.members.names if now.members and parts else (),
                parts=parts,
            )
        )
