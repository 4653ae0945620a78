"""Payloads that can be added on the wire: one all-reduce, or a second one before it, by which ranks compress alike."""

import numpy as np

from distopt.comm import Communicator
from distopt.comm.message import UNTAGGED, MessageTag
from distopt.compress import Compressor, ExchangeContext, Half
from distopt.compress.state import State
from distopt.exchange.payload import check_payload
from distopt.exchange.program import Agree, Exchange, Sum, run

TravellingBucket = tuple[np.ndarray, State, ExchangeContext, MessageTag]


def payload_of(x: np.ndarray, compressor: Compressor, state: State, context: ExchangeContext) -> np.ndarray:
    """Return what is sent of x; the sum overwrites what is left behind in it, so that a ``Half`` need not write it."""
    if type(compressor) is not Half:
        payload = compressor.compress(x, state, context)
    else:
        payload = context.scratch("payload", 2 * x.size).view(compressor.stored)
        compressor.write(x, payload, context)
    check_payload(payload, compressor, context)
    return payload


def reduce_program(x: np.ndarray, compressor: Compressor, state: State, context: ExchangeContext) -> Exchange:
    """What one rank does in ``reduce``."""
    sketch = compressor.sketch(x, state, context)
    if sketch is not None:
        context = context._replace(sketch=(yield Agree(sketch)))
    payload = payload_of(x, compressor, state, context)
    yield Sum(payload, last=True)
    compressor.decompress(payload, x, context)


def reduce(
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
        compressor: what is sent of them; ``summable``.
        comm: the ranks.
        state: arrays of x's size that the compressor keeps.
        context: the call of the compressor.
        tag: of the messages; unused, since the caller has tagged the only one.

    Example:
        >>> import numpy as np
        >>> from distopt import run_ranks
        >>> from distopt.compress import ExchangeContext, Half
        >>> def main(comm):
        ...     x = np.array([1, 2], np.float32) * (comm.rank + 1)
        ...     reduce(x, Half(), comm, {}, ExchangeContext(rank=comm.rank, size=comm.size))
        ...     return x.tolist()
        >>> run_ranks(2, main)
        [[3.0, 6.0], [3.0, 6.0]]
    """
    run(reduce_program(x, compressor, state, context), comm)
