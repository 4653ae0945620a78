"""A bucket of which some members are summed as they are, while payloads of the others are gathered."""

import math

import numpy as np

from distopt import kernels
from distopt.comm import Communicator
from distopt.comm.message import UNTAGGED, MessageTag
from distopt.compress import Compressor, ExchangeContext
from distopt.compress.context import State, layout_of
from distopt.device import DeviceMirror
from distopt.exchange.all_gather import bytes_of_all, gather, gather_or_reduce, gather_payloads
from distopt.exchange.payload import check_payload
from distopt.exchange.traffic import dense_is_smaller


class UncompressedMembers:
    """The members of x that a compressor leaves as they are, copied to one flat array, unless that is all of x.

    Args:
        x: the gradients of a bucket, ``(n,)``, after they were compressed.
        mask: what the compressor's ``uncompressed`` has returned.
        context: the call of the compressor.

    Attributes:
        all, none: are these all members, or none?
        flat: their values, one behind the other; x itself if these are all.
        members: their places in ``flat``.
    """

    def __init__(self, x: np.ndarray, mask: DeviceMirror, context: ExchangeContext):
        layout, chosen = layout_of(x, context), mask.host != 0
        self.all, self.none = bool(chosen.all()), not chosen.any()
        self.flat, self.members = x, layout
        if not self.all:
            self.members = layout.select(chosen).compacted(x)
            self.flat = context.scratch("whole", self.members.extent * x.itemsize).view(x.dtype)
            nonfinite = context.scratch("whole and not finite", 8 * chosen.size).view(np.int64)
            kernels.pack(self.members, self.flat, 1.0, nonfinite, math.inf)

    def put_back(self) -> None:
        """Write their values to x."""
        kernels.unpack(self.members, self.flat, 1.0)


def mixed(
    x: np.ndarray,
    compressor: Compressor,
    comm: Communicator,
    state: State,
    context: ExchangeContext,
    tag: MessageTag = UNTAGGED,
) -> None:
    """Replace x by the sum over ranks of what each rank's compressor sends, and of members that it leaves as they are.

    Collective.  It is ``gather`` for a compressor that leaves no member as it is.

    Args:
        x: the gradients of a bucket, ``(n,)``, float32 or float64.
        compressor: what is sent of them.
        comm: the ranks.
        state: arrays of x's size that the compressor keeps.
        context: the call of the compressor.
        tag: of the messages, to which the make-up of the payload is added.
    """
    mask = compressor.uncompressed(layout_of(x, context), context)
    if mask is None:
        gather(x, compressor, comm, state, context, tag)
        return
    with comm.on_comm_stream():
        payload, uncompressed = _compress(x, mask, compressor, state, context)
        _sum(x, payload, uncompressed, compressor, comm, context, tag)


def mixed_or_reduce(
    x: np.ndarray,
    compressor: Compressor,
    comm: Communicator,
    state: State,
    context: ExchangeContext,
    tag: MessageTag = UNTAGGED,
) -> None:
    """Do as ``mixed``, but all-reduce one dense array of what is sent where that is fewer bytes.  Collective.

    Args:
        x: the gradients of a bucket, ``(n,)``, float32 or float64.
        compressor: what is sent of them.
        comm: the ranks.
        state: arrays of x's size that the compressor keeps.
        context: the call of the compressor.
        tag: of the messages, to which the make-up of the payload is added.
    """
    mask = compressor.uncompressed(layout_of(x, context), context)
    if mask is None:
        gather_or_reduce(x, compressor, comm, state, context, tag)
        return
    with comm.on_comm_stream():
        payload, uncompressed = _compress(x, mask, compressor, state, context)
        summed = 0 if uncompressed.none else uncompressed.flat.nbytes
        gathered = 0 if uncompressed.all else bytes_of_all(payload, compressor, comm, context)
        if dense_is_smaller(gathered, summed, x.nbytes, comm.size):
            _decompress([payload], uncompressed, x, compressor, context)
            comm.all_reduce(x)
        else:
            _sum(x, payload, uncompressed, compressor, comm, context, tag)


def _compress(
    x: np.ndarray, mask: DeviceMirror, compressor: Compressor, state: State, context: ExchangeContext
) -> tuple[np.ndarray, UncompressedMembers]:
    """Return the payload of x, and the members that stay in it."""

    def work() -> tuple[np.ndarray, UncompressedMembers]:
        return compressor.compress(x, state, context), UncompressedMembers(x, mask, context)

    payload, uncompressed = context.repeat("compress", work, (x, *state.values()))
    check_payload(payload, compressor, context)
    return payload, uncompressed


def _decompress(
    payloads: list[np.ndarray],
    uncompressed: UncompressedMembers,
    x: np.ndarray,
    compressor: Compressor,
    context: ExchangeContext,
) -> None:
    """Write the sum of payloads, and the members beside them, to x."""

    def work() -> None:
        compressor.decompress_all(payloads, x, context)
        uncompressed.put_back()

    context.repeat("decompress", work, (x, *payloads))


def _sum(
    x: np.ndarray,
    payload: np.ndarray,
    uncompressed: UncompressedMembers,
    compressor: Compressor,
    comm: Communicator,
    context: ExchangeContext,
    tag: MessageTag,
) -> None:
    if uncompressed.all:
        comm.all_reduce(x)
        return
    if not uncompressed.none:
        with comm.tagged(tag._replace(members=uncompressed.members)):
            comm.all_reduce(uncompressed.flat)
    payloads = gather_payloads(payload, x, compressor, comm, context, tag)
    _decompress(payloads, uncompressed, x, compressor, context)
