"""Plans worked out by hand: which tensors SINGA's rule puts into one bucket."""

import gc
import weakref

import numpy as np
import pytest

from distopt.buckets import BucketSet, plan, unsharded
from distopt.lab.models import resnet50


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


# ----------------------------------------------------------------------------------------------- larger buckets


def bucket_set(sizes, dtypes=None, threshold=0):
    dtypes = dtypes or ["f4"] * len(sizes)
    values = {f"p{k}": np.zeros(n, dtype) for k, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))}
    return BucketSet(plan(list(values), sizes, dtypes, threshold), values, np.zeros)


@pytest.mark.parametrize(
    ("sizes", "dtypes", "nbytes", "expected"),
    [
        ([16] * 4, None, 128, [2, 2]),  # 64 bytes each
        ([16] * 4, None, 127, [1, 1, 1, 1]),
        ([16] * 4, None, 1 << 30, [4]),
        ([16, 160, 16, 16], None, 128, [1, 1, 2]),  # a larger one stays alone
        ([0, 0, 3], None, 64, [3]),
        ([], None, 64, []),
        ([8, 8, 8, 8], ["f4", "f4", "f8", "f4"], 1 << 30, [2, 1, 1]),  # of one dtype
        ([8, 8, 8], ["f2", "f4", "f4"], 1 << 30, [1, 2]),  # added up in float32, but stored apart
    ],
)
def test_neighbours_of_one_dtype_merge_up_to_a_size(sizes, dtypes, nbytes, expected):
    buckets = bucket_set(sizes, dtypes)
    assert [len(b.spec.names) for b in buckets.merged(nbytes)] == expected


def test_a_merged_bucket_is_the_memory_of_its_parts():
    sizes = [5, 700_000, 3, 16]  # the second one begins at a huge page
    buckets = bucket_set(sizes)
    (merged,) = buckets.merged(1 << 30)
    for k, bucket in enumerate(buckets):
        bucket.gradient[...] = k + 1
    views = merged.views(merged.gradient)
    assert [(v.size, set(v.tolist())) for v in views.values()] == [(n, {k + 1}) for k, n in enumerate(sizes)]
    assert np.count_nonzero(merged.gradient) == sum(sizes), "what lies between them is zero"
    merged.bad[:] = [1, 2, 3, 4]
    assert [b.bad.tolist() for b in buckets] == [[1], [2], [3], [4]]


def test_sums_are_grouped_where_they_lie_in_their_buckets():
    buckets = bucket_set([4, 5, 6])
    sums = [unsharded(b.gradient) for b in buckets]
    assert buckets.grouped(sums) == (buckets, sums), "a host updates one bucket after the other"
    buckets.group(1 << 30)
    groups, together = buckets.grouped(sums)
    assert groups is buckets.groups
    assert [total[0].flat is group.gradient for group, total in zip(groups, together, strict=True)] == [True]
    elsewhere = [*sums[:2], unsharded(np.zeros(6, np.float32))]
    assert buckets.grouped(elsewhere) == (buckets, elsewhere)
    assert {b.group for b in buckets} == set(groups)


@pytest.mark.parametrize("grouped", [False, True])
def test_buckets_free_their_memory_when_nobody_has_them_any_more(grouped):
    """At once: on a GPU another plan's buckets may need it before the next collection."""
    gc.disable()
    try:
        buckets = bucket_set([4, 5, 6])
        if grouped:
            buckets.group(1 << 30)
        memory = weakref.ref(buckets[0].gradient.base)
        del buckets
        assert memory() is None
    finally:
        gc.enable()
