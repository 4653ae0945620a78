"""What docstrings of distopt have that Griffe, which reads them for the API pages, does not know."""

import re
from typing import Any

import griffe


class Example(griffe.Extension):
    """Read the section ``Example:`` as Griffe's ``Examples:``, so that it becomes a block of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in a docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
