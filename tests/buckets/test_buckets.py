"""Plans worked out by hand: which tensors SINGA's rule puts into one bucket."""

import numpy as np
import pytest

from distopt.buckets import plan
from distopt.volume.models import resnet50


def members(sizes, threshold, dtypes=None):
    names = [f"{n}{k}" for k, n in enumerate(sizes)]
    found = plan(names, sizes, dtypes or ["float32"] * len(sizes), threshold)
    return [b.sizes for b in found.buckets]


@pytest.mark.parametrize(
    ("sizes", "threshold", "expected"),
    [
        ([10, 10, 10], 10, [(10, 10), (10,)]),  # exactly the threshold queues; a queue closes only above it
        ([11, 10, 1], 10, [(11,), (10, 1)]),
        ([4, 50, 4, 4], 10, [(50,), (4, 4, 4)]),  # a large one does not close the queue
        ([4, 4, 2, 1, 9], 10, [(4, 4, 2, 1), (9,)]),
        ([3, 0, 2], 0, [(3,), (0,), (2,)]),  # threshold 0: every tensor its own bucket, an empty one too
        ([0, 0], 5, [(0, 0)]),
        ([], 5, []),
    ],
)
def test_a_bucket_is_closed_by_singas_rule(sizes, threshold, expected):
    assert members(sizes, threshold) == expected


def test_a_bucket_has_parameters_of_one_dtype():
    assert members([4, 5, 4, 5, 4], 8, ["f4", "f8", "f4", "f8", "f4"]) == [(5, 5), (4, 4, 4)]


def test_members_start_at_multiples_of_64_bytes():
    (bucket,) = plan(["a", "b", "c"], [1, 16, 17], ["float32"] * 3, 100).buckets
    assert (bucket.offsets, bucket.size, bucket.nbytes) == ((0, 16, 32), 49, 196)
    (bucket,) = plan(["a", "b"], [9, 1], ["float64"] * 2, 100).buckets
    assert (bucket.offsets, bucket.size) == ((0, 16), 17)


def test_resnet50_has_eleven_buckets_with_little_padding():
    """161 tensors in 11 buckets; what alignment adds is less than 0.01 %."""
    params = resnet50()[::-1]
    sizes = [int(np.prod(shape)) for _, shape in params]
    found = plan([name for name, _ in params], sizes, ["float32"] * len(params), 2097152)
    assert (len(params), sum(sizes)) == (161, 25_557_032)
    assert len(found.buckets) == 11
    assert 0 <= sum(b.nbytes for b in found.buckets) - 4 * sum(sizes) < 4e-4 * sum(sizes)
    assert str(found).splitlines()[0] == "161 tensors, 25,557,032 elements, 11 buckets (threshold 2,097,152)"


def test_the_plan_prints_the_payload_of_a_compressor():
    found = plan(["a", "b"], [1000, 1], ["float32"] * 2, 100).with_payload([100, None])
    lines = str(found).splitlines()
    assert found.payload == (100, None)
    assert "0.100 kB    4.000 kB  a" in lines[2]
    assert "varies    0.004 kB  b" in lines[3]
