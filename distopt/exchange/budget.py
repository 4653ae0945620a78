"""The density of which a step sends so many bytes."""

import math
from collections.abc import Callable, Sequence

from distopt.compress import Compressor
from distopt.compress.base import at_density
from distopt.exchange.step_traffic import node_messages, step_messages
from distopt.kernels.layout import BucketLayout

SPARSEST = 1e-9  # the lowest density tried: one entry of each part, in any plan that fits into memory
CLOSE = 1e-6  # relative accuracy of a density


def within(
    budget: float,
    compressor: Compressor,
    plan: Sequence[BucketLayout],
    ranks: int,
    break_even: bool = True,
    exchange: str = "auto",
    sizes: Sequence[int] = (),
) -> Compressor:
    """Return a compressor at the largest density of which a rank sends at most so many bytes in a step.

    That is the mean over ranks of the bytes on the wire, headers and members that are summed as they are included, with
    entries that are spread evenly over what they are chosen from; if they are not, the code of indices is shorter.

    Args:
        budget: bytes.
        compressor: has a ``budget``.
        plan: the layout of each bucket.
        ranks: their number.
        break_even: as of the step.
        exchange: as of the step.
        sizes: the ranks of each node, for an exchange by nodes; what is sent inside of one is left out.

    Raises:
        ValueError: not even one entry of each part fits.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import TopK
        >>> plan = [BucketLayout(["w"], [(1000, 1000)], [0], np.float32)]
        >>> within(8000, TopK(bytes=8000), plan, ranks=2).density
        0.001
    """

    def sent(density: float) -> float:
        fixed = at_density(compressor, density)
        if exchange == "nodes":
            by_nodes = node_messages(plan, fixed, sizes, break_even)
            assert by_nodes is not None
            between = [message.sent(len(sizes)) for column in by_nodes.between for message in column]
            return math.fsum(between) * len(sizes) / ranks
        messages = step_messages(plan, fixed, ranks, break_even, exchange)
        assert messages is not None
        return math.fsum(message.sent(ranks) for message in messages)

    density = 1.0
    while density >= SPARSEST and sent(density) > budget:  # a gather of little may be more than two phases of more
        density /= 2
    if density < SPARSEST:
        least = math.ceil(sent(SPARSEST))
        raise ValueError(f"bytes must be at least {least:,} a step, for one entry of each part, got {budget:,.12g}")
    return at_density(compressor, _last(lambda d: sent(d) <= budget, density, min(1.0, 2 * density)))


def _last(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Bisect for the largest density that fits, to six digits; ``low`` does."""
    if fits(high):
        return high
    while high > low * (1 + CLOSE):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    rounded = float(f"{low:.5g}")
    return rounded if fits(rounded) else low
