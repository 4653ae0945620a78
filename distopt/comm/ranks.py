"""The ranks of a training, and the processes that they live in."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Ranks(NamedTuple):
    """The ranks whose gradients make a mean; usually each process is one, of its own number.

    Args:
        size: how many there are.
        here: those that live in this process, ascending.
        by_process: those of each process; empty where each is the rank of its own number.
        logical: a user has said how many there are, whatever the number of processes.
    """

    size: int
    here: tuple[int, ...]
    by_process: tuple[tuple[int, ...], ...] = ()
    logical: bool = False

    def in_order(self, of_processes: Iterable[Sequence[T]]) -> list[T]:
        """Return, by rank, what each process has for each of its ranks.

        Example:
            >>> Ranks(3, (0, 2), ((0, 2), (1,))).in_order([["a", "c"], ["b"]])
            ['a', 'b', 'c']
        """
        by_process = self.by_process or [[rank] for rank in range(self.size)]
        found = {
            rank: of_rank
            for ranks, values in zip(by_process, of_processes, strict=True)
            for rank, of_rank in zip(ranks, values, strict=True)
        }
        return [found[rank] for rank in range(self.size)]

    def process_of(self, rank: int) -> int:
        """Return the number of the process in which a rank lives."""
        return next((process for process, there in enumerate(self.by_process) if rank in there), rank)


def in_each(ranks: int, processes: int) -> str:
    """Say how many ranks live in each process."""
    share, more = divmod(ranks, processes)
    return f"{share + 1} or {share}" if more else str(share)


def housed(ranks: int, processes: int) -> str:
    """Say where ranks live.

    Example:
        >>> housed(12, 5)
        '12 logical ranks, 3 or 2 in each of 5 processes'
    """
    where = f"in each of {processes} processes" if processes > 1 else "in one process"
    return f"{ranks} logical ranks, {in_each(ranks, processes)} {where}"


def placed(size: int, kept: Sequence[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Place ranks in processes, as many in each, give or take one, so that as few as can be move.

    Args:
        size: the number of ranks.
        kept: of each process the ranks that live there already.

    Returns:
        The ranks of each process, ascending.

    Example:
        >>> placed(5, [[], []])
        ((0, 1, 2), (3, 4))
        >>> placed(6, [[0, 1], [4, 5]])  # a process that had 2 and 3 was lost
        ((0, 1, 2), (3, 4, 5))
        >>> placed(6, [[0, 1, 2], [3, 4, 5], []])  # a process has come
        ((0, 1), (3, 4), (2, 5))
    """
    share, more = divmod(size, len(kept))
    ranks = [sorted(of_process) for of_process in kept]
    # Those that have most already keep one more.
    by_load = sorted(range(len(kept)), key=lambda process: -len(ranks[process]))
    room = {process: share + (place < more) for place, process in enumerate(by_load)}
    of_processes = [of_process[: room[process]] for process, of_process in enumerate(ranks)]
    homeless = iter(sorted(set(range(size)).difference(*of_processes)))
    for process, of_process in enumerate(of_processes):
        of_process += [next(homeless) for _ in range(room[process] - len(of_process))]
    return tuple(tuple(sorted(of_process)) for of_process in of_processes)
