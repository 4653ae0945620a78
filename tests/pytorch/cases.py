"""Cases that all ranks of a group run, one after the other: each is a function, which raises if it fails."""

import traceback

import numpy as np
import pytest


class Cases:
    """Functions by name, with the numbers of ranks that run them."""

    def __init__(self):
        self._cases = {}

    def case(self, function, sizes=(1, 2, 3)):
        self._cases[function.__name__] = function, sizes
        return function

    def case_of_two(self, function):
        """A case in which ranks differ."""
        return self.case(function, (2, 3))

    def case_with_four(self, function):
        """A case of groups of ranks."""
        return self.case(function, (1, 2, 4))

    def of(self, size):
        return [name for name, (_, sizes) in self._cases.items() if size in sizes]

    def run(self, comm):
        """{case: what it raised, as text}."""
        found = {}
        for name in self.of(comm.size):
            function, _ = self._cases[name]
            try:
                function()
                found[name] = ""
            except (Exception, pytest.fail.Exception):
                found[name] = traceback.format_exc()
            assert comm.control.gather(name) == [name] * comm.size
        return {name: np.array(text) for name, text in found.items()}
