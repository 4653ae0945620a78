"""A plan that is cut into shards: every element belongs to one rank, and ranks have about as many."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distopt.exchange.sharding import Sharding, cut
from distopt.kernels.layout import BucketLayout


def layout(number, sizes):
    offsets = np.cumsum([0, *(-(-n // 16) * 16 for n in sizes)])[:-1]
    return BucketLayout([f"{number}.{k}" for k in range(len(sizes))], [(n,) for n in sizes], offsets.tolist(), "f4")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 63, 64, 65, 1000, 5000]), max_size=5), min_size=1, max_size=4),
    st.integers(1, 70),
    st.sampled_from([64, 256]),
)
def test_every_element_has_one_owner_and_shards_are_of_one_size(buckets, ranks, block):
    layouts = [layout(number, sizes) for number, sizes in enumerate(buckets)]
    shards = Sharding(layouts, ranks, block)
    for number, members in enumerate(layouts):
        owners = np.zeros(members.extent, int)
        for piece in shards.of_bucket[number]:
            owners[piece.start : piece.stop] += 1
            assert piece.layout.extent <= piece.size
            starts = members.records["offset"][:, None] + np.arange(0, 5001, block)
            assert piece.start in starts or piece.start in members.records["offset"]
        for offset, size in zip(members.records["offset"], members.records["size"], strict=True):
            assert (owners[offset : offset + size] == 1).all()
        assert (owners <= 1).all()
        order = [piece.owner for piece in shards.of_bucket[number]]
        assert order == sorted(order)
    assert sum(shards.sizes) == sum(map(sum, buckets)) == shards.members.extent
    assert max(shards.sizes) <= sum(shards.sizes) / ranks + block + 1
    names = [name for members in layouts for name in members.names]
    assert list(shards.members.names) == names


def test_pieces_count_their_members_from_their_start():
    shards = Sharding([layout(0, [100, 300])], 2, 64)
    first, second = shards.of_bucket[0]
    assert (first.start, first.stop, second.start, second.stop) == (0, 240, 240, 412)
    assert first.layout.records["offset"].tolist() == [0, 112]
    assert second.layout.records["size"].tolist() == [172]
    assert second.layout.names == ("0.1",)


def test_the_same_plan_is_cut_once():
    layouts = (layout(0, [100, 300]),)
    assert cut(layouts, 2, 64) is cut(layouts, 2, 64)
    assert cut(layouts, 3, 64) is not cut(layouts, 2, 64)
