"""Payloads that cannot be added on the wire: all of them to all ranks, and the sum is formed there, in rank order."""

import numpy as np

from distopt.comm import Communicator
from distopt.comm.message import UNTAGGED, MessageTag
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import State
from distopt.exchange.payload import check_payload
from distopt.exchange.traffic import dense_is_smaller


def gather(
    x: np.ndarray,
    compressor: Compressor,
    comm: Communicator,
    state: State,
    context: ExchangeContext,
    tag: MessageTag = UNTAGGED,
) -> None:
    """Replace x by the sum over ranks of what each rank's compressor sends of it.  Collective.

    Args:
        x: the gradients of a bucket, ``(n,)``.
        compressor: what is sent of them.
        comm: the ranks.
        state: arrays of x's size that the compressor keeps.
        context: the call of the compressor.
        tag: of the messages, to which the make-up of the payload is added.

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
    with comm.on_comm_stream():
        payload = context.repeat("compress", lambda: compressor.compress(x, state, context), (x, *state.values()))
        check_payload(payload, compressor, context)
        payloads = gather_payloads(payload, x, compressor, comm, context, tag)
        context.repeat("decompress", lambda: compressor.decompress_all(payloads, x, context), (x, *payloads))


def gather_or_reduce(
    x: np.ndarray,
    compressor: Compressor,
    comm: Communicator,
    state: State,
    context: ExchangeContext,
    tag: MessageTag = UNTAGGED,
) -> None:
    """Do as ``gather``, but all-reduce a dense array of the selected entries where that is fewer bytes.  Collective.

    Where lengths differ, all ranks learn all of them first (8 bytes a rank), so that they decide alike; what is sent
    does not depend on it.

    Args:
        x: the gradients of a bucket, ``(n,)``, float32 or float64.
        compressor: what is sent of them.
        comm: the ranks.
        state: arrays of x's size that the compressor keeps.
        context: the call of the compressor.
        tag: of the messages, to which the make-up of the payload is added.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks
        >>> from distopt.compress import ExchangeContext, TopK
        >>> def main(comm):
        ...     x = np.arange(4, dtype=np.float32)
        ...     gather_or_reduce(x, TopK(1.0), comm, {}, ExchangeContext(rank=comm.rank, size=comm.size))
        ...     return x.tolist()
        >>> run_ranks(2, main)
        [[0.0, 2.0, 4.0, 6.0], [0.0, 2.0, 4.0, 6.0]]
    """
    with comm.on_comm_stream():
        payload = context.repeat("compress", lambda: compressor.compress(x, state, context), (x, *state.values()))
        check_payload(payload, compressor, context)
        dense = dense_is_smaller(bytes_of_all(payload, compressor, comm, context), 0, x.nbytes, comm.size)
        if dense:
            payloads = [payload]
        else:
            payloads = gather_payloads(payload, x, compressor, comm, context, tag)
        context.repeat("decompress", lambda: compressor.decompress_all(payloads, x, context), (x, *payloads))
        if dense:
            comm.all_reduce(x)


def bytes_of_all(payload: np.ndarray, compressor: Compressor, comm: Communicator, context: ExchangeContext) -> int:
    """Return the bytes of all ranks' payloads together, the same on every rank.  Collective if lengths differ."""
    ragged = compressor.ragged and context.capacity is None
    return sum(comm.lengths(payload.nbytes)) if ragged else payload.nbytes * comm.size


def gather_payloads(
    payload: np.ndarray,
    x: np.ndarray,
    compressor: Compressor,
    comm: Communicator,
    context: ExchangeContext,
    tag: MessageTag,
) -> list[np.ndarray]:
    """Return every rank's payload, in rank order.  Collective.

    Args:
        payload: of this rank, flat; it travels as bytes, whatever its dtype is.
        x: the flat array that it was made of, ``(n,)``.
        compressor: what has made it.
        comm: the ranks.
        context: the call of the compressor.
        tag: of the messages, to which the make-up of the payload is added.
    """
    dtype, data = payload.dtype, payload.reshape(-1).view(np.uint8)
    with comm.tagged(tag._replace(breakdown=lambda _: compressor.breakdown(payload, x, context))):
        if compressor.ragged and context.capacity is None:
            gathered = comm.all_gather(data, ragged=True)
        else:
            gathered = comm.all_gather(data, into=context.scratch("payloads", data.size * comm.size))
    return gathered if dtype == np.uint8 else [part.view(dtype) for part in gathered]
