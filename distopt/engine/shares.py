"""Averages of a share of all parameters, whose entries a seed and the step choose: no rank sends an index."""

from typing import Any, NamedTuple

import numpy as np

from distopt import device, kernels
from distopt.checks import check_float, check_int
from distopt.comm.message import MessageTag
from distopt.compress.blocks import random_key
from distopt.engine.engine import Engine
from distopt.exchange.shared_memory import sum_shard
from distopt.kernels.layout import FORMATS, BucketLayout, compute_dtype

# A share of one entry in a thousand million.
LEAST = 1e-9
NUMBERS = 1 << 63


class Share(NamedTuple):
    """Which entries a step averages: of every block of neighbours in a tensor one (Beton et al., 2025)."""

    # Entries of a block.
    every: int
    # Chooses where a block begins, which moves to the next entry at every step, and anew after ``every`` of them.
    seed: int

    @classmethod
    def checked(cls, share: Any, seed: Any) -> "Share":
        """Check what a user gave."""
        number = check_int("seed", seed, 0)
        if number >= NUMBERS:
            raise ValueError(f"seed must be below 2^63, got {seed}")
        return cls(round(1 / check_float("share", share, LEAST, 1.0)), number)

    def entries(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many numbers are sent of tensors of these sizes: one for each block; the last may be shorter."""
        return -(-sizes // self.every)

    def at_step(self, step: int) -> tuple[int, int, int]:
        """Return the arguments by which kernels find the entries of a step: ``every``, the turn and the key."""
        cycle, turn = divmod(step, self.every)
        return self.every, turn, random_key(self.seed, cycle)


class Sample:
    """The entries of all parameters of one dtype that a step averages, in one flat array."""

    def __init__(
        self, rows: np.ndarray, names: list[str], sizes: np.ndarray, formats: np.ndarray, dtype: np.dtype, share: Share
    ):
        # rows: which parameters they are, by their index in the order of the first step; names, sizes and formats
        # (`Member.format`) are theirs.
        counts = share.entries(sizes)
        offsets = (np.cumsum(counts) - counts).tolist()
        self.rows, self.sizes = rows, device.DeviceMirror(sizes)
        # Shapes and offsets are those of the entries that are sent.
        self.layout = BucketLayout(names, [(int(n),) for n in counts], offsets, dtype)
        self.layout.records["format"] = formats
        # The entries that this rank sends, and then their sum over ranks.
        self.flat = np.empty(0, dtype)
        # Every rank's ``flat``, if memory is shared.
        self.peers: list[np.ndarray] | None = None
        # Counts of ``kernels.add_parts``, which nobody reads.
        self.nonfinite = np.zeros(0, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat array, up to a multiple of 64."""
        return -(-self.layout.extent * self.layout.dtype.itemsize // 64) * 64

    def place(self, start: int, memory: np.ndarray, peers: list[np.ndarray] | None) -> None:
        """Put the flat array into this memory, from this byte on."""

        def part(whole: np.ndarray) -> np.ndarray:
            dtype = self.layout.dtype
            return whole[start : start + self.layout.extent * dtype.itemsize].view(dtype)

        self.flat, self.peers = part(memory), None if peers is None else [part(whole) for whole in peers]
        self.nonfinite = np.zeros((len(peers or ()) + 1) * len(self.layout.names), np.int64)

    def point_to(self, values: np.ndarray, masters: np.ndarray) -> None:
        """Point the table to parameters and masters at these addresses, in the order of the first step; 0 for none."""
        records = self.layout.records
        records["data"], records["wide"] = values[self.rows], masters[self.rows]
        records["master"] = records["wide"] != 0


class ShareAverage:
    """Average what a ``Share`` chooses of all parameters, in one message for each dtype."""

    # Where 16-bit parameters have masters, it is these that are averaged, and the parameters follow.

    def __init__(self, engine: Engine):
        self._engine = engine
        # The ranks' epoch, ``every``, and the parameters.
        self._made_for: tuple[int, int, list[str]] = 0, 0, []
        self._samples: list[Sample] = []
        self._memory: np.ndarray | None = None
        self._peers: list[np.ndarray] | None = None

    def average(self, share: Share) -> None:
        """Replace the chosen entries by their mean over the ranks that have not joined.  Collective."""
        engine = self._engine
        chosen = share.at_step(engine.progress.partial)
        for sample in engine.transaction(lambda: self._sums(share, chosen)):
            scale = 1.0 / engine.agreement.live
            kernels.put_share(sample.layout, sample.flat, sample.sizes, *chosen, scale, engine.store.skip_flag)

    def _sums(self, share: Share, chosen: tuple[int, int, int]) -> list[Sample]:
        """Take the chosen entries of all parameters, and add them over ranks.  Collective."""
        engine = self._engine
        engine.renew_plan()
        samples, masters = self._samples_of(share), self._master_addresses()
        for sample in samples:
            sample.point_to(engine.store.collector.values.addresses, masters)
            kernels.take_share(sample.layout, sample.flat, sample.sizes, *chosen)
            if engine.agreement.joined:
                device.clear(sample.flat)
        self._add_over_ranks(samples)
        return samples

    def _add_over_ranks(self, samples: list[Sample]) -> None:
        """Replace what every rank has taken by the sums, added in rank order in shared memory.  Collective."""
        comm, step = self._engine.comm, self._engine.progress.updates
        if self._peers is not None:
            # All ranks have read what they take.
            comm.barrier()
        for sample in samples:
            with comm.tagged(MessageTag("parameters", step, members=sample.layout)):
                if sample.peers is None:
                    comm.all_reduce(sample.flat)
                else:
                    sum_shard(sample.layout, sample.peers, sample.peers, sample.nonfinite, comm)
        if self._peers is not None:
            # All ranks have added up their parts.
            comm.barrier()
        comm.wait()

    def _samples_of(self, share: Share) -> list[Sample]:
        """Return the samples of a share; new ones for another share, or for other parameters.  Collective."""
        values, epoch = self._engine.store.values, self._engine.comm.epoch
        if (epoch, share.every, list(values)) == self._made_for:
            return self._samples
        if epoch != self._made_for[0]:
            self._memory = None
        names, stored = list(values), [value.dtype for value in values.values()]
        sizes = np.array([value.size for value in values.values()], np.int64)
        formats = np.array([FORMATS.get(dtype, 0) for dtype in stored])
        wide = [compute_dtype(dtype) for dtype in stored]
        self._samples = []
        for dtype in dict.fromkeys(wide):
            rows = np.flatnonzero([other == dtype for other in wide])
            sample = Sample(rows, [names[k] for k in rows], sizes[rows], formats[rows], dtype, share)
            if sample.layout.extent:
                self._samples.append(sample)
        self._place(self._samples)
        self._made_for = epoch, share.every, names
        return self._samples

    def _place(self, samples: list[Sample]) -> None:
        """Find room for all samples in memory of the communicator.  Collective."""
        comm, starts = self._engine.comm, np.cumsum([0, *(sample.nbytes for sample in samples)]).tolist()
        if self._memory is None or self._memory.size < starts[-1]:
            self._memory = comm.alloc(max(1, starts[-1]), np.uint8)
            comm.register(self._memory)
            self._peers = comm.peers(self._memory) if comm.size > 1 else None
        for sample, start in zip(samples, starts, strict=False):
            sample.place(start, self._memory, self._peers)

    def _master_addresses(self) -> np.ndarray:
        """Return where the masters of the parameters are, (n,), uintp, in the order of the first step; 0 for none."""
        groups = self._engine.store.buckets.groups
        addresses = np.zeros(len(self._engine.store.collector.order), np.uintp)
        for group, places in zip(groups, groups.places, strict=True):
            masters = self._engine.optimizer.masters(group)
            if masters is not None:
                offsets = group.parameters.records["offset"] * masters.itemsize
                addresses[places] = device.address(masters) + offsets
        return addresses
