"""The check of a payload, before it is sent: what is too long or too short ends a run in the middle of a message."""

import numpy as np

from distopt.compress import Compressor, ExchangeContext


def check_payload(payload: np.ndarray, compressor: Compressor, context: ExchangeContext) -> None:
    """Raise TypeError for a payload that is no array, and ValueError for one that is not as long as the plan says.

    Args:
        payload: what ``compress`` has returned.
        compressor: what has made it.
        context: the call in which it was made.

    Example:
        >>> import numpy as np
        >>> from distopt.compress import BucketContext, Half
        >>> context = ExchangeContext(bucket=BucketContext(number=3, payload_bytes=8))
        >>> check_payload(np.zeros(5, np.float16), Half(), context)
        Traceback (most recent call last):
        ValueError: Half('float16', predivide=True).compress returned 10 bytes for bucket 3, payload_bytes says 8
    """
    nbytes, expected = getattr(payload, "nbytes", None), context.bucket.payload_bytes
    if nbytes is None:
        raise TypeError(f"{compressor!r}.compress must return an array, got {payload!r:.60}")
    if expected is not None and nbytes != expected:
        number = context.bucket.number
        raise ValueError(
            f"{compressor!r}.compress returned {nbytes} bytes for bucket {number}, payload_bytes says {expected}"
        )
