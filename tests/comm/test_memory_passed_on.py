"""Memory of a process that has ended, which others give to those that come later."""

import gc

import numpy as np
import pytest

from distopt.comm.shared_memory import allocate, handle_of, open_handle, open_to_pass_on


def test_memory_outlives_who_has_made_it_for_those_that_pass_it_on():
    first = allocate(1000, np.float32)
    if first is None:
        pytest.skip("this kernel has no memory to share")
    first[:] = np.arange(1000)
    second, looks = open_to_pass_on(handle_of(first), np.float32), open_handle(handle_of(first), np.float32)
    assert handle_of(looks) == ""
    gone = handle_of(first)
    del first
    gc.collect()
    assert open_handle(gone, np.float32) is None
    third = open_to_pass_on(handle_of(second), np.float32)
    third[0] = 7
    np.testing.assert_array_equal(third, second)
    np.testing.assert_array_equal(third, looks)
    assert looks[999] == 999


def test_what_nobody_offers_cannot_be_opened():
    assert handle_of(np.zeros(3)) == ""
    assert open_handle("", np.float32) is None
    assert open_to_pass_on("", np.float32) is None
