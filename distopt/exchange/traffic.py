"""Which messages the exchange of a bucket is, for those who count them and send none; tests hold it to those who do."""

from collections.abc import Sequence
from typing import NamedTuple

from distopt import cost
from distopt.comm.meter import Meter
from distopt.compress import Compressor
from distopt.ledger import Look


class Message(NamedTuple):
    """A collective: the sum of ``elements`` of ``itemsize`` bytes, or what is gathered, of ``sizes`` bytes, by rank."""

    verb: str
    elements: int = 0
    itemsize: int = 0
    sizes: Sequence[int] = ()
    whole: bool = False  # is it of the members that a compressor leaves whole?

    def write(self, meter: Meter, look: Look) -> None:
        """Let a ledger have it; what the payload consists of, if it is gathered."""
        match self.verb:
            case "all_reduce":
                meter.all_reduce(self.elements, self.itemsize)
            case "all_gather":
                meter.all_gather(self.sizes, look)
            case "lengths":
                meter.lengths()


def dense_is_less(gathered: int, summed: int, nbytes: int, size: int) -> bool:
    """Is an all-reduce of a bucket of ``nbytes`` fewer wire bytes than payloads of ``gathered`` bytes, of all ranks
    together, and ``summed`` bytes that are summed beside them?
    """
    apart = cost.all_gather(gathered, size) + cost.all_reduce(summed, size)
    return apart > cost.all_reduce(nbytes, size)


def traffic(
    compressor: Compressor, elements: int, itemsize: int, payloads: Sequence[int], whole: int | None, break_even: bool
) -> list[Message]:
    """The messages of a bucket of so many elements, of which ``whole`` are in members that are summed as they are.

    ``payloads`` are the bytes of every rank's payload, but for those members; ``whole`` is None if there are none.
    """
    dense = Message("all_reduce", elements, itemsize)
    if compressor.summable:
        return [dense._replace(itemsize=payloads[0] // max(1, elements))]
    found = [Message("lengths")] if compressor.ragged and break_even else []
    if whole == elements:
        return [dense]
    if break_even and dense_is_less(sum(payloads), (whole or 0) * itemsize, elements * itemsize, len(payloads)):
        return [*found, dense]
    if whole is not None:
        found.append(Message("all_reduce", whole, itemsize, whole=True))
    return [*found, Message("all_gather", sizes=payloads)]
