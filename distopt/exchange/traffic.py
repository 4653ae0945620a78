"""The messages of an exchange, for ledgers that are written without sending any; tests hold them to what is sent."""

from collections.abc import Sequence
from typing import NamedTuple

from distopt.comm import byte_counts
from distopt.comm.meter import Meter
from distopt.compress import Compressor
from distopt.kernels.breakdown import LazyBreakdown


class Message(NamedTuple):
    """A collective.

    Args:
        verb: 'all_reduce', 'all_gather', 'all_to_all' or 'lengths'.
        elements: that are summed.
        itemsize: bytes of each of them.
        sizes: bytes that are gathered, by rank, or that every rank sends to each.
        uncompressed: is it the sum of the members that a compressor leaves as they are?
    """

    verb: str
    elements: int = 0
    itemsize: int = 0
    sizes: Sequence[int] = ()
    uncompressed: bool = False

    def write(self, meter: Meter, breakdown: LazyBreakdown) -> None:
        """Write it into a ledger, with the make-up of the payload if it is not summed."""
        match self.verb:
            case "all_reduce":
                meter.all_reduce(self.elements, self.itemsize)
            case "all_gather":
                meter.all_gather(self.sizes, breakdown)
            case "all_to_all":
                meter.all_to_all(self.sizes, [self.sizes[meter.rank]] * meter.size, breakdown)
            case "lengths":
                meter.lengths()


def dense_is_smaller(gathered: int, summed: int, nbytes: int, size: int) -> bool:
    """Compare an all-reduce of a dense bucket with what a compressor sends of it.

    Args:
        gathered: bytes of the payloads of all ranks together.
        summed: bytes of the members that are summed as they are.
        nbytes: of the dense bucket.
        size: ranks.

    Returns:
        Whether the all-reduce is fewer bytes on the wire.
    """
    compressed = byte_counts.all_gather(gathered, size) + byte_counts.all_reduce(summed, size)
    return compressed > byte_counts.all_reduce(nbytes, size)


def summed(nbytes: int, elements: int, itemsize: int) -> Message:
    """Return the all-reduce of payloads that are summed.

    They have all elements in fewer bytes each, or fewer elements of the bucket's dtype.

    Args:
        nbytes: of a payload.
        elements: of the bucket.
        itemsize: bytes of each.
    """
    if elements and nbytes % elements == 0:
        return Message("all_reduce", elements, nbytes // elements)
    return Message("all_reduce", nbytes // itemsize, itemsize)


def traffic(
    compressor: Compressor,
    elements: int,
    itemsize: int,
    payloads: Sequence[int],
    uncompressed: int | None,
    break_even: bool,
) -> list[Message]:
    """List the messages by which a bucket is exchanged.

    Args:
        compressor: what is sent of it.
        elements: of the bucket.
        itemsize: bytes of each.
        payloads: bytes of every rank's payload, but for members that are summed as they are.
        uncompressed: elements of those members; None if there are none.
        break_even: send no more bytes than dense.
    """
    dense = Message("all_reduce", elements, itemsize)
    if compressor.summable:
        return [summed(payloads[0], elements, itemsize)]
    messages = [Message("lengths")] if compressor.ragged and break_even else []
    if uncompressed == elements:
        return [dense]
    if break_even and dense_is_smaller(
        sum(payloads), (uncompressed or 0) * itemsize, elements * itemsize, len(payloads)
    ):
        return [*messages, dense]
    if uncompressed is not None:
        messages.append(Message("all_reduce", uncompressed, itemsize, uncompressed=True))
    return [*messages, Message("all_gather", sizes=payloads)]
