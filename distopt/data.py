"""Which samples each rank takes in each step, whatever the number of processes."""

import numpy as np

from distopt.checks import check_int
from distopt.comm import world
from distopt.comm.communicator import slices
from distopt.engine.rank_losses import present_call

__all__ = ["GlobalBatches"]


class GlobalBatches:
    """Global batches of a data set in random order, cut into one part for each rank.

    An epoch has every sample once.  Its order is a permutation that depends on the seed and the epoch alone, so a job
    that goes on from step k, on any number of processes, takes the samples that it would have taken.  Its batches, and
    the parts of a batch, are as even as can be: none differs from another one by more than one sample.

    Args:
        samples: how many samples there are.
        batch: samples of a global batch, of all ranks together, at most.
        seed: of the permutations.
        ranks: the number of parts of a batch; None for the ranks of ``distopt.world()``, logical ones if it has these.

    Attributes:
        steps: the global batches of an epoch.
        ranks: the number of parts of a batch, which may change from step to step.

    Raises:
        TypeError: an argument is no integer.
        ValueError: one is below 1, or the seed below 0; or a batch would leave a rank without a sample.

    Example:
        >>> data = GlobalBatches(10, batch=5, ranks=2)
        >>> [data.ids(rank, 0).tolist() for rank in range(2)]
        [[0, 2], [9, 1, 8]]
        >>> sorted(id for step in range(data.steps) for rank in range(2) for id in data.ids(rank, step).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, samples: int, batch: int, seed: int = 0, *, ranks: int | None = None):
        ranks = world().ranks.size if ranks is None else ranks
        self.samples, self.batch = check_int("samples", samples, least=1), check_int("batch", batch, least=1)
        self.seed, self.ranks = check_int("seed", seed, least=0), check_int("ranks", ranks, least=1)
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2^64, got {seed}")
        self.steps = -(-self.samples // self.batch)
        if (least := self.samples // self.steps) < self.ranks:
            raise ValueError(
                f"batch must leave a sample for each of {self.ranks} ranks, got {batch}, with which some of "
                f"{self.steps} batches of {samples} samples have {least}"
            )
        self._batches = slices(self.samples, self.steps)  # of the order of an epoch
        self._order: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)

    def ids(self, rank: int, step: int | None = None) -> np.ndarray:
        """Return the numbers of a rank's samples, ``(its part of the batch,)`` of int64.

        Args:
            rank: the rank.
            step: the number of the global batch, over all epochs, as ``opt.step_counter`` has it; None for the step
                whose loss asks, with logical ranks.

        Raises:
            ValueError: there is no such rank or step; or ``step`` is None outside of the loss of a logical rank.
        """
        batch = self._batch(step)
        if check_int("rank", rank, least=0) >= self.ranks:
            raise ValueError(f"rank must be below {self.ranks}, got {rank}")
        # A copy, as torch warns of arrays that it cannot write to.
        return batch[slices(len(batch), self.ranks)[rank]].copy()

    def weight(self, rank: int, step: int | None = None) -> float:
        """Return by what a rank's mean loss is multiplied, so that the mean over ranks is that over samples.

        Args:
            rank: the rank.
            step: as of ``ids``.
        """
        return len(self.ids(rank, step)) * self.ranks / len(self._batch(step))

    def of_epoch(self, rank: int, step: int = 0) -> list[list[int]]:
        """Return a rank's samples of each step from one on to the end of its epoch: a torch ``batch_sampler``.

        Args:
            rank: the rank.
            step: the first of these steps.

        Example:
            >>> GlobalBatches(6, batch=4, ranks=1, seed=3).of_epoch(0)
            [[1, 5, 2], [4, 3, 0]]
        """
        return [self.ids(rank, k).tolist() for k in range(step, (step // self.steps + 1) * self.steps)]

    def _batch(self, step: int | None) -> np.ndarray:
        if step is None and (step := present_call.get(None)) is None:
            raise ValueError("step must be given but in the loss of a logical rank, got None")
        epoch, number = divmod(check_int("step", step, least=0), self.steps)
        if self._order[0] != epoch:
            # Raw numbers of a generator are the same with every numpy, unlike its permutations.
            keys = np.random.Philox(key=self.seed, counter=[0, 0, 0, epoch]).random_raw(self.samples)
            self._order = epoch, np.argsort(keys, kind="stable")
        return self._order[1][self._batches[number]]

    def __repr__(self) -> str:
        return f"GlobalBatches({self.samples}, batch={self.batch}, seed={self.seed}, ranks={self.ranks})"
