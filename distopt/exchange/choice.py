"""Which exchange a step takes: a pure function of the plan, the compressor and the number of ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from distopt.compress import Compressor, ExchangeContext
from distopt.compress.base import compressed_members, payload_nbytes
from distopt.compress.shards import Piece, ShardCodec
from distopt.exchange.sharding import Starts, cut_for
from distopt.kernels.layout import BucketLayout

EXCHANGES = ("auto", "gather", "two_phase", "nodes", "measure")
GATHER_BELOW = 1 << 16  # bytes of a step's payloads from all other ranks; messages are cheaper than what they save
VARIES = 100  # where the length of a payload depends on the data, one of so many bytes is taken to be sent


class TwoPhase(NamedTuple):
    """An exchange in two phases.

    Args:
        codec: the compressor, as it takes part.
        buckets: the numbers of the buckets that take part; the others are exchanged one by one.
        members: of each of them the members that take part; the others are summed as they are.
    """

    codec: ShardCodec
    buckets: tuple[int, ...]
    members: tuple[BucketLayout, ...]

    def describe(self, plan: Sequence[BucketLayout], ranks: int, starts: Starts = (), by_bucket: bool = False) -> str:
        """Return a line on what it does.

        Args:
            plan: the layout of each bucket.
            ranks: their number.
            starts: where shards begin; () for shards of as many elements.
            by_bucket: each bucket has shards of its own.

        Example:
            >>> import numpy as np
            >>> from distopt.compress import TopK
            >>> plan = [BucketLayout(["w"], [(1000, 1000)], [0], np.float32)]
            >>> two_phases("auto", TopK(0.01), plan, 8).describe(plan, 8)
            'two-phase, 8 shards of 124,992 to 125,056 elements'
        """
        together = [[members] for members in self.members] if by_bucket else [self.members]
        sizes = [n for members in together for n in cut_for(self.codec, members, ranks, starts).sizes]
        alone = len(plan) - len(self.buckets)
        others = f"; {alone} of {len(plan)} buckets one by one" if alone else ""
        shards = f"{ranks} shards{' of each bucket' * by_bucket} of {min(sizes):,} to {max(sizes):,} elements"
        return f"two-phase, {shards}{self.codec.traits.note}{others}"


def two_phases(
    exchange: str, compressor: Compressor, plan: Sequence[BucketLayout], ranks: int, break_even: bool = True
) -> TwoPhase | None:
    """Choose between a gather of payloads and an exchange in two phases.

    A gather sends a payload to each other rank, and sums are exact.  Two phases send two payloads in all, and half of
    that with two ranks; so two ranks gather, and so do more of them where their payloads of a whole step are below
    ``GATHER_BELOW``.  No measurement takes part, so all ranks choose alike.

    Args:
        exchange: 'auto' for that, or what is wanted.
        compressor: what is sent.
        plan: the layout of each bucket.
        ranks: their number.
        break_even: a bucket whose payloads are no fewer bytes than dense takes no part.

    Returns:
        The exchange; None for a gather, or for payloads that are added on the wire.

    Raises:
        ValueError: two phases are wanted of a compressor whose payloads can only be gathered.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import TopK
        >>> plan = [BucketLayout(["w"], [(1000, 1000)], [0], np.float32)]
        >>> [two_phases("auto", TopK(0.01), plan, ranks) is not None for ranks in (2, 3)]
        [False, True]
    """
    codec = None if compressor.traits.summable or exchange in ("gather", "nodes") else compressor.sharded()
    if exchange == "two_phase" and codec is None and not compressor.traits.summable:
        raise ValueError(f"exchange must be 'auto' or 'gather' for {compressor!r}, got 'two_phase'")
    if codec is None or ranks == 1:
        return None
    if exchange == "auto" and (ranks == 2 or (ranks - 1) * gathered_bytes(compressor, plan) < GATHER_BELOW):
        return None
    members = [compressed_members(compressor, layout, ExchangeContext(size=ranks)) for layout in plan]
    smaller = {k: of_bucket for k, of_bucket in enumerate(members) if not break_even or _is_smaller(codec, of_bucket)}
    return TwoPhase(codec, tuple(smaller), tuple(smaller.values())) if smaller else None


def reason(exchange: str, compressor: Compressor, plan: Sequence[BucketLayout], ranks: int) -> str:
    """Return why 'auto' has chosen 'gather', 'two_phase' or 'nodes'.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import TopK
        >>> plan = [BucketLayout(["w"], [(1000, 1000)], [0], np.float32)]
        >>> reason("gather", TopK(0.01), plan, ranks=2)
        'two ranks send each other one payload'
    """
    if exchange == "nodes":
        return "what leaves a node does not grow with its ranks"
    if exchange == "two_phase":
        return f"less than the payloads of {ranks - 1} other ranks"
    if ranks <= 2:
        return "two ranks send each other one payload" if ranks == 2 else "there is one rank"
    if compressor.sharded() is None:
        return "its payloads can only be gathered"
    if (ranks - 1) * gathered_bytes(compressor, plan) < GATHER_BELOW:
        return f"payloads of all other ranks are below {GATHER_BELOW >> 10} KiB"
    return "two phases would send no less than dense sums"


def _is_smaller(codec: ShardCodec, members: BucketLayout) -> bool:
    """Tell if what is exchanged of a bucket's members in two phases is fewer bytes than their dense sum."""
    expected = codec.expected_bytes(members, [Piece(0, 0, 0, members.extent, members)], summed=False)
    return expected is None or expected[0].total <= int(members.records["size"].sum()) * members.dtype.itemsize


def gathered_bytes(compressor: Compressor, plan: Sequence[BucketLayout]) -> int:
    """Return the bytes of a rank's payloads in a gather, without members that are summed as they are.

    Args:
        compressor: what is sent.
        plan: the layout of each bucket.
    """
    total = 0
    for layout in plan:
        itemsize = layout.dtype.itemsize
        payload = payload_nbytes(compressor, layout.extent, itemsize, layout)
        total += layout.extent * itemsize // VARIES if payload is None else payload
    return total
