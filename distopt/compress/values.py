"""Formats of packed values (packed.cu)."""

GROUP = 64  # entries that share a scale
VALUES = {"float16": (1, 2), "bfloat16": (2, 2), "int8": (3, 1)}  # the number of a format, and its bytes
SCALED = ("float16", "int8")  # those of which neighbours share scales


def value_bytes(places: int, value: str) -> int:
    """Return the bytes of so many values, and of their scales.

    Example:
        >>> value_bytes(64, "float16"), value_bytes(64, "bfloat16")
        (129, 128)
    """
    return VALUES[value][1] * places + -(-places // GROUP) * (value in SCALED)
