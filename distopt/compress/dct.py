"""Send the largest frequencies of a tensor, instead of its largest entries."""

import functools
import itertools
from dataclasses import replace

import numpy as np

from distopt import device, kernels
from distopt.checks import check_int
from distopt.compress.base import Compressor
from distopt.compress.context import ExchangeContext, layout_of
from distopt.compress.entry_shards import EntryShards
from distopt.compress.shards import ShardCodec
from distopt.compress.state import State
from distopt.compress.wrapper import CompressorWrapper
from distopt.kernels.layout import BucketLayout

SIDE = 64  # of the matrices of dct.cu
FREQUENCIES = "frequencies of "  # how states of coefficients begin


class DCT(CompressorWrapper):
    """Compress the coefficients of the cosine transform of a tensor's tiles, and transform the sum back.

    Peng et al., "DeMo: decoupled momentum optimization", 2024, is ``DCT(ErrorFeedback(Packed(Chunks(32, 4096)),
    decay=0.999))`` with ``Signum(lr)``: the residual is the momentum, and what is sent are its largest frequencies.

    A tensor ``O x I x k x k`` is a matrix ``O x (I k k)``.  Each side is cut into as few parts of at most ``tile`` as
    there can be, as equal as possible; a tensor of one dimension is cut into stretches.  A tile's DCT-II is
    ``B_rows X B_columns^T`` with orthonormal B, so nothing but rounding is lost, norms stay what they are, and sums
    over ranks may be formed of coefficients.  Those of a tile stand together, row by row: with tiles of 64 x 64 a chunk
    of 4,096 is a tile.  Sums within a tile are formed in one order on every side, in the gradient's dtype.

    Residuals are coefficients.  They are states of their own, 'frequencies of residual' and 'frequencies of owed', so
    that another compressor in between does not add them to gradients; they wait until a DCT of the same ``tile`` takes
    them up again.  A NaN or infinity makes its whole tile so.

    Args:
        compressor: what is sent of the coefficients; without a momentum of its own.
        tile: the longest side of a tile, at most 64.

    Raises:
        TypeError: ``compressor`` is none, or ``tile`` is no integer.
        ValueError: for a ``tile`` below 1 or above 64, a compressor with a momentum or hooks of its own, and one that
            leaves members as they are.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import ExchangeContext, TopK
        >>> x, total, context = np.full(64, 2, np.float32), np.zeros(64, np.float32), ExchangeContext()
        >>> dct = DCT(TopK(1 / 64))  # one frequency of 64: here the mean has it all
        >>> dct.decompress(dct.compress(x, {}, context), total, context)
        >>> dct.finish(total, {}, context)
        >>> bool(np.allclose(total, 2))
        True
    """

    def __init__(self, compressor: Compressor, tile: int = SIDE):
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor must derive from distopt.compress.Compressor, got {compressor!r:.60}")
        if compressor.traits.corrects_momentum:
            raise ValueError(f"compressor must be one without a momentum, which the residual is, got {compressor!r}")
        if compressor.traits.has_hooks:
            raise ValueError(f"compressor must be one without hooks, as ErrorFeedback(Chunks()), got {compressor!r}")
        super().__init__(compressor)
        self.tile = check_int("tile", tile, least=1)
        if self.tile > SIDE:
            raise ValueError(f"tile must be at most {SIDE}, got {tile}")
        self.traits = replace(self.traits, has_hooks=True, recordable=False, of_sums=False, state_prefix=FREQUENCIES)

    def around(self, compressor: Compressor) -> "DCT":
        return DCT(compressor, self.tile)

    def compress(self, x: np.ndarray, state: State, context: ExchangeContext) -> np.ndarray:
        """Return the payload of the coefficients of x, which stays as it is."""
        return self.compressor.compress(self.coefficients(x, context), state, context)

    def finish(self, total: np.ndarray, state: State, context: ExchangeContext) -> None:
        """Transform the sum back."""
        room = context.scratch("coefficients", total.nbytes).view(total.dtype)
        device.copy(room, total)
        self._transform(room, total, context, inverse=True)

    def coefficients(self, x: np.ndarray, context: ExchangeContext) -> np.ndarray:
        """Return the coefficients of a bucket, ``(n,)``, in memory of the bucket; gaps between members are zero."""
        room = context.scratch("coefficients", x.nbytes).view(x.dtype)
        if layout_of(x, context).records["size"].sum() < x.size:
            device.clear(room)
        self._transform(x, room, context, inverse=False)
        return room

    def sharded(self) -> ShardCodec | None:
        codec = self.compressor.sharded()
        return codec.after(self.coefficients) if isinstance(codec, EntryShards) else None

    def _transform(self, x: np.ndarray, to: np.ndarray, context: ExchangeContext, inverse: bool) -> None:
        layout, name = layout_of(x, context), f"{self.tile} of {x.dtype}"
        tiles = context.constant(f"tiles of {self.tile}", lambda: tiles_of(layout, self.tile))
        forward = context.constant(f"basis up to {name}", lambda: bases(self.tile, x.dtype.name).reshape(-1))
        back = context.constant(
            f"transposed basis up to {name}",
            lambda: np.ascontiguousarray(bases(self.tile, x.dtype.name).swapaxes(1, 2)).reshape(-1),
        )
        sides = (back, forward) if inverse else (forward, back)
        kernels.transform_tiles(x, to, tiles, *sides, tiles.host.size // 5, inverse)

    def __repr__(self) -> str:
        return f"DCT({self.compressor!r}{f', tile={self.tile}' * (self.tile != SIDE)})"


@functools.cache
def bases(tile: int, dtype: str) -> np.ndarray:
    """Return the matrices of all sides up to ``tile``, ``(tile + 1, 64, 64)``: a function in each row, zeros beyond.

    Function u of side s is ``sqrt((2 - [u = 0]) / s) cos(pi (2 i + 1) u / (2 s))``.
    """
    found = np.zeros((tile + 1, SIDE, SIDE))
    for side in range(1, tile + 1):
        u, i = np.arange(side)[:, None], np.arange(side)
        found[side, :side, :side] = np.sqrt(np.where(u, 2, 1) / side) * np.cos(np.pi * (2 * i + 1) * u / (2 * side))
    return found.astype(dtype)


def parts_of(side: int, tile: int) -> list[tuple[int, int]]:
    """Return where the parts of a side begin, and how long they are: as few as possible, and as equal."""
    count = -(-side // tile)
    edges = [side * k // count for k in range(count + 1)] if count else [0]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


def tiles_of(layout: BucketLayout, tile: int) -> np.ndarray:
    """Return ``struct TensorTile`` of dct.cu for all tiles of a bucket, flat: ``(5 tiles,)`` of int64."""
    found = [np.zeros((0, 5), np.int64)]
    for shape, offset in zip(layout.shapes, layout.records["offset"].tolist(), strict=True):
        size = int(np.prod(shape))
        if size:
            rows = shape[0] if len(shape) > 1 else 1
            found.append(_tiles_of_matrix(rows, size // rows, tile) + np.array([offset, 0, 0, 0, offset]))
    return np.concatenate(found).reshape(-1)


@functools.lru_cache(256)
def _tiles_of_matrix(rows: int, columns: int, tile: int) -> np.ndarray:
    """Return the tiles of a matrix that stands at the begin of its bucket, ``(tiles, 5)``."""
    down, across = (np.array(parts_of(side, tile), np.int64) for side in (rows, columns))
    r, height = (np.repeat(down[:, k], len(across)) for k in (0, 1))
    c, width = (np.tile(across[:, k], len(down)) for k in (0, 1))
    sizes = height * width
    return np.stack([r * columns + c, np.full_like(r, columns), height, width, np.cumsum(sizes) - sizes], 1)
