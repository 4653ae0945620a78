"""Formats of packed values (packed.cu)."""

from typing import Any, NamedTuple


class Format(NamedTuple):
    """How values are stored: their codes in words, then what groups of neighbours share.

    Args:
        number: what packed.cu calls it.
        word: bytes of a word.
        codes: values in a word.
        group: values that share something.
        shared: bytes of what they share.

    Example:
        >>> VALUES["float16"].value_bytes(64), VALUES["bfloat16"].value_bytes(64), VALUES["2bit"].value_bytes(64)
        (129, 128, 20)
    """

    number: int
    word: int
    codes: int = 1
    group: int = 64
    shared: int = 0

    def code_bytes(self, places: Any) -> Any:
        """Return the bytes of the codes of so many values, of an int or of an array of them."""
        return -(-places // self.codes) * self.word

    def value_bytes(self, places: Any) -> Any:
        """Return the bytes of so many values, with what their groups share."""
        return -(-places // self.codes) * self.word + -(-places // self.group) * self.shared


VALUES = {
    "float16": Format(1, 2, shared=1),
    "bfloat16": Format(2, 2),
    "int8": Format(3, 1, shared=1),
    "2bit": Format(4, 4, codes=16, group=256, shared=4),
}
