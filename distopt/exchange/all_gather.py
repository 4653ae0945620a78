"""Payloads that cannot be added on the wire: all of them to all ranks, and the sum is formed there, in rank order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from distopt.comm import Communicator, byte_counts
from distopt.comm.communicator import Phases, split
from distopt.comm.logical import gather_of_ranks
from distopt.comm.message import UNTAGGED, MessageTag, of_several
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import layout_of
from distopt.compress.state import State
from distopt.exchange.payload import check_payload
from distopt.exchange.program import Exchange, Lengths, Sum, run
from distopt.exchange.uncompressed import UncompressedMembers

# writes the sum over ranks of what payloads stand for to an array; the arrays that it reads
SumOfPayloads = tuple[Callable[[np.ndarray], None], Sequence[np.ndarray]]


class Gather(NamedTuple):
    """Asks for the sum of what all ranks' payloads stand for; it is answered by a ``SumOfPayloads``.

    Args:
        payload: of this rank.
        x: the flat array that it was made of, ``(n,)``.
        compressor: what has made it.
        context: the call of the compressor.
        tag: of the message, to which the make-up of the payload is added.
    """

    payload: np.ndarray
    x: np.ndarray
    compressor: Compressor
    context: ExchangeContext
    tag: MessageTag

    def over(self, comm: Communicator) -> SumOfPayloads:
        with comm.tagged(self._own_tag):
            if self.ragged:
                return self._sum_of(comm.all_gather(self._data, ragged=True))
            return self._sum_of(comm.all_gather(self._data, into=self._room(comm)))

    def phases(self, comm: Communicator, turn: int) -> Phases:
        data = self._data
        received = split(self._room(comm), [data.size] * comm.size)
        return self._sum_of((yield from comm.exchange_in_phases("all_gather", [data] * comm.size, received, turn)))

    @staticmethod
    def of_ranks(asked: Sequence["Gather"], comm: Communicator) -> list[SumOfPayloads]:
        last = asked[-1]
        lengths = None if last.ragged else [last.payload.nbytes] * last.context.size
        with comm.tagged(of_several([request._own_tag for request in asked])):
            return [last._sum_of(gather_of_ranks(comm, [request._data for request in asked], lengths))]

    @property
    def ragged(self) -> bool:
        """Whether ranks have payloads of other lengths."""
        return self.compressor.traits.ragged and self.context.capacity is None

    @property
    def _data(self) -> np.ndarray:
        """The payload as it travels: as bytes, whatever its dtype is."""
        data: np.ndarray = self.payload.reshape(-1).view(np.uint8)
        return data

    @property
    def _own_tag(self) -> MessageTag:
        payload, x, compressor, context, tag = self
        return tag._replace(breakdown=lambda _: compressor.breakdown(payload, x, context))

    def _room(self, comm: Communicator) -> np.ndarray:
        """Return memory for the payloads of all ranks, where they are of the same length."""
        return self.context.scratch("payloads", self.payload.nbytes * comm.size)

    def _sum_of(self, payloads: Sequence[np.ndarray]) -> SumOfPayloads:
        if self.payload.dtype != np.uint8:
            payloads = [part.view(self.payload.dtype) for part in payloads]
        return partial(self.compressor.decompress_all, payloads, context=self.context), payloads


def sum_payloads(
    asked: Gather, summed: Sum | None, decompress: Callable[[SumOfPayloads], None], break_even: bool
) -> Exchange:
    """Write the sum over ranks of what they send of a bucket to it.

    It computes only in ``decompress``, and of arrays knows nothing but their lengths, so that a forecast needs no data.

    Args:
        asked: the payload, and the bucket after it was compressed.
        summed: the members that are summed as they are; None if there are none.
        decompress: writes the sum of payloads, and the members beside them, to the bucket.
        break_even: all-reduce a dense array of what is sent where that is fewer bytes.
    """
    payload, x, compressor, context, _ = asked
    if summed is not None and summed.x is x:
        yield Sum(x, last=True)
        return
    if break_even:
        # all ranks learn all lengths, so that they decide alike; what is sent does not depend on it
        gathered = sum((yield Lengths(payload.nbytes))) if asked.ragged else payload.nbytes * context.size
        sent = byte_counts.all_gather(gathered, context.size)
        if summed is not None:
            sent += byte_counts.all_reduce(summed.x.nbytes, context.size)
        if sent > byte_counts.all_reduce(x.nbytes, context.size):
            decompress((partial(compressor.decompress_all, [payload], context=context), [payload]))
            yield Sum(x, last=True)
            return
    if summed is not None:
        yield summed
    decompress((yield asked))


def gather_program(
    x: np.ndarray,
    compressor: Compressor,
    state: State,
    context: ExchangeContext,
    tag: MessageTag,
    break_even: bool = False,
) -> Exchange:
    """What one rank does in ``gather``."""
    mask = compressor.uncompressed(layout_of(x, context), context)

    def compress() -> tuple[np.ndarray, UncompressedMembers | None]:
        payload = compressor.compress(x, state, context)
        return payload, None if mask is None else UncompressedMembers(x, mask, context)

    def decompress(total: SumOfPayloads) -> None:
        write, arrays = total

        def work() -> None:
            write(x)
            if members is not None:
                members.put_back()

        context.repeat("decompress", work, (x, *arrays))

    payload, members = context.repeat("compress", compress, (x, *state.values()))
    check_payload(payload, compressor, context)
    summed = Sum(members.flat, tag._replace(members=members.members)) if members and not members.none else None
    yield from sum_payloads(Gather(payload, x, compressor, context, tag), summed, decompress, break_even)


def gather(
    x: np.ndarray,
    compressor: Compressor,
    comm: Communicator,
    state: State,
    context: ExchangeContext,
    tag: MessageTag = UNTAGGED,
    break_even: bool = False,
) -> None:
    """Replace x by the sum over ranks of what each rank's compressor sends of it.  Collective.

    Members that the compressor leaves as they are are summed as they are.

    Args:
        x: the gradients of a bucket, ``(n,)``, float32 or float64.
        compressor: what is sent of them.
        comm: the ranks.
        state: arrays of x's size that the compressor keeps.
        context: the call of the compressor.
        tag: of the messages, to which the make-up of the payload is added.
        break_even: all-reduce a dense array of what is sent where that is fewer bytes.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks
        >>> from distopt.compress import ExchangeContext, TopK
        >>> def main(comm):
        ...     x = np.roll(np.array([4, 3, 0, 0], np.float32), comm.rank)
        ...     gather(x, TopK(0.25), comm, {}, ExchangeContext(rank=comm.rank, size=comm.size))
        ...     return x.tolist()
        >>> run_ranks(2, main)
        [[4.0, 4.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]]
    """
    run(gather_program(x, compressor, state, context, tag, break_even), comm)
