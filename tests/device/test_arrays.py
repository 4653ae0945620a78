"""Addresses of arrays, and arrays that are not as expected."""

import numpy as np
import pytest

from distopt import device

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.mark.usefixtures("doubles")
def test_only_the_expected_array_of_a_gpu_has_a_matching_address():
    cupy = device.array_module()
    x = device.gpu_zeros(24, F4).reshape(4, 6)
    assert device.matching_address(x, F4, 0) == x.data.ptr
    assert device.matching_address(x[1], F4, 0) == x.data.ptr + 24
    for other in (x.T, x[:, ::2], cupy.empty(3, F8), np.zeros(3, F4), [1.0], None):
        assert device.matching_address(other, F4, 0) is None
    assert device.matching_address(x, F4, 1) is None, "it is on another GPU"


@pytest.mark.usefixtures("doubles")
def test_addresses_of_many_arrays_are_none_if_one_of_them_is_not_as_expected():
    arrays = [device.gpu_zeros(n, F4) for n in (3, 0, 5)]
    dtypes, shapes = [F4] * 3, [(3,), (0,), (5,)]
    assert device.matching_addresses(arrays, dtypes, shapes, 0) == [x.data.ptr for x in arrays]
    assert device.matching_addresses(arrays, dtypes, shapes, 1) is None
    for k, other in enumerate((device.gpu_zeros(4, F4), np.zeros(0, F4), device.gpu_zeros(5, F8))):
        assert device.matching_addresses([*arrays[:k], other, *arrays[k + 1 :]], dtypes, shapes, 0) is None
    with pytest.raises(ValueError, match="argument"):
        device.matching_addresses(arrays[:2], dtypes, shapes, 0)


@pytest.mark.usefixtures("doubles")
def test_a_mirror_uploads_only_what_has_changed():
    numbers = np.arange(4, dtype=F8)
    mirror = device.DeviceMirror(numbers)
    first = mirror.address(0)
    copies = []
    count = device.messages.copies.copy
    device.messages.copies.copy = lambda *arguments: (copies.append(1), count(*arguments))
    try:
        assert mirror.address(0) == first
        assert copies == []
        numbers[2] = -0.0  # another bit pattern than 2, and than 0
        assert mirror.address(0) == first
        numbers[2] = 0.0
        assert mirror.address(0) == first
        assert copies == [1, 1]
    finally:
        device.messages.copies.copy = count
