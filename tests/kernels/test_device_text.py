"""Law 8 without a GPU: what the texts say for a device, run by the CPU thread for thread, gives the host's bits.

The device's loops (16-byte accesses, chunks found by bisection, grid strides, atomics, look-back) run four times: the
texts as the host's compiler reads them, and the PTX that NVRTC makes of them, which is what a GPU's driver is handed,
for GPUs up to the H100 (in four orders) and in other words for newer ones, and that of clang.
Blocks, warps and lanes run in shuffled order.  What this cannot show is what the driver makes of the PTX, how a GPU
orders memory, and its timing.

Numbers of laws and bugs are explained in docs/concepts/laws.md.
"""

import ctypes
import functools
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kernels import REALS, SIZES, folded, members, shares

import laws
import ptx
from distopt import device as device_memory
from distopt import kernels, run_ranks
from distopt.compress import ARCTopK, BucketContext, ExchangeContext, dct, sections, select
from distopt.compress.base import sketched
from distopt.compress.elias_fano import packing
from distopt.compress.values import VALUES
from distopt.kernels.layout import CHUNK, BucketLayout, KernelStruct
from distopt.optim import Signum
from simt.build import build, sanitized
from simt.device import on

pytestmark = pytest.mark.device
SANITIZE = "DISTOPT_SANITIZED_KERNELS"  # in the environment of the run under the sanitizers
PLANTED = "DISTOPT_PLANTED"  # in the environment of ptx/plant.py: the folder of libraries with a fault
GRIDS = [(3, 64, 1), (1, 256, 0), (7, 128, 2), (2, 256, 3)]  # blocks, threads, seed
if SANITIZE in os.environ:
    del GRIDS[1:]
YES = np.ones(1, np.int64)

ORDERS = [(3, 64, seed) for seed in range(4, 23)]  # twenty with one of GRIDS
COMPILERS = {  # how each makes a library, its marks, and its launches in `full` alone
    "text": (build, (), GRIDS[1:] + ORDERS),
    "ptx": (ptx.build, ptx.MARKS, ORDERS),
    "newer": (functools.partial(ptx.build, compile_text=ptx.by_nvrtc_for_newer), ptx.MARKS, GRIDS[1:] + ORDERS),
    "clang": (functools.partial(ptx.build, compile_text=ptx.by_clang), ptx.CLANG_MARKS, GRIDS[1:] + ORDERS),
}
LAUNCHES = [
    pytest.param((name, grid), marks=[*marks, *[pytest.mark.full] * (grid in seldom)])
    for name, (_, marks, seldom) in COMPILERS.items()
    for grid in GRIDS + ORDERS
]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """All kernels by their texts, compiled as for a device, or by NVRTC's PTX, also for newer GPUs, or clang's."""

    @functools.cache
    def libraries(name):
        if given := os.environ.get(PLANTED):
            begin = {"text": "device", "ptx": "ptx"}[name]
            return {real: ctypes.CDLL(f"{given}/{begin}-{real}.so") for real in ("float", "double")}
        folder, made, sanitize = tmp_path_factory.mktemp("simt"), COMPILERS[name][0], SANITIZE in os.environ
        return {real: ctypes.CDLL(str(made(folder, real, sanitize=sanitize))) for real in ("float", "double")}

    return libraries


@pytest.fixture(scope="session", params=[pytest.param(name, marks=of[1]) for name, of in COMPILERS.items()])
def libraries(request, compiled):
    return compiled(request.param)


@pytest.fixture(scope="session", params=LAUNCHES, ids=lambda at: "{}, {} blocks of {}, order {}".format(at[0], *at[1]))
def device(request, compiled):
    """A context in which all kernels are the device's texts."""
    name, grid = request.param
    return functools.partial(on, compiled(name), *grid)


def same(host, there):
    """Equal to the bit, NaN for NaN."""
    for a, b in zip(host, there, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def shifted(x, by):
    """A copy of x that starts ``by`` elements behind an aligned address."""
    return np.concatenate([np.zeros(by, x.dtype), x])[by:]


def every_mode_and_optimizer(dtype):
    """The digests of two ranks."""

    def main(comm):
        digests = [laws.digest(laws.train(comm, mode=mode, dtype=dtype)[0]) for mode in laws.MODES]
        return digests + [laws.digest(laws.train(comm, make=make, dtype=dtype)[0]) for make in laws.OPTIMIZERS.values()]

    return run_ranks(2, main)


of_the_host = functools.cache(every_mode_and_optimizer)  # for all that runs in the place of its kernels


@pytest.mark.parametrize("dtype", REALS)
def test_every_mode_and_optimizer_gives_the_same_bits(device, dtype):
    host = of_the_host(dtype)
    with device():
        assert every_mode_and_optimizer(dtype) == host


@pytest.mark.parametrize("dtype", REALS)
def test_signs_counts_and_what_overwrites_are_those_of_the_host(device, dtype):
    def main(comm):
        return laws.digest(laws.train(comm, make=lambda: Signum(0.1, momentum=0.0), dtype=dtype)[0])

    def numbers():
        total, (table, _) = np.zeros(1, np.int64), members([5, 17, 0, CHUNK + 1], dtype)
        flat = np.zeros(table.extent, dtype)
        kernels.sum_counts(np.arange(2 * CHUNK + 3), total)
        kernels.overwrite(table, flat, np.inf, YES)
        return total, flat

    host = run_ranks(2, main), numbers()
    with device():
        assert run_ranks(2, main) == host[0]
        same(host[1], numbers())


@pytest.mark.parametrize("by", [0, 1, 3])
@pytest.mark.parametrize("dtype", REALS)
def test_exact_sums_are_those_of_the_host(device, dtype, by):
    """Of chunks of every length, with zeros, small numbers, and one that is not finite."""

    def sums():
        rng, most, total = np.random.default_rng(1), np.zeros(3, np.float32), np.zeros(2 * CHUNK + 301)
        arrays = [
            shifted((rng.standard_normal(total.size) * 2.0 ** rng.integers(-40, 40)).astype(dtype), by) for _ in "abc"
        ]
        arrays[1][:9] = 0, -0.0, 1e-42, 1e-30, 1e30, -1e30, 1, 2, 3
        arrays[2][CHUNK + 7] = np.nan
        for x in arrays:
            kernels.largest_magnitudes(x, most)
        for x in arrays:
            kernels.add_on_grid(x, total, most, 2)
        bucket = BucketLayout("abcd", [(7,), (0,), (CHUNK + 9,), (CHUNK - 60,)], [0, 16, 16, CHUNK + 32], dtype)
        shares, bad = [np.zeros_like(arrays[0]) for _ in "ab"], np.zeros(16, np.int64)
        for share in range(3):
            kernels.add_parts_on_grid(bucket.shard(share, 3), arrays, shares, most, bad)
        kernels.round_sums(total, arrays[0])
        return most, total, arrays[0], *shares, bad

    host = sums()
    with device():
        same(host, sums())


def written(struct, **values):
    """The numbers of an update."""
    hyper = KernelStruct(struct)
    hyper.write(**values)
    return hyper


def tables(dtype, by):
    """What the kernels of a bucket make of tensors of every size, ``by`` elements beside where they are aligned."""
    table, arrays = members([0, *SIZES, 0, 0, 3, 0], dtype, seed=4)
    arrays = [shifted(a, by) for a in arrays]
    table.point_to(arrays)
    arrays[5][3] = np.nan
    flat, bad = np.zeros(table.extent, dtype), np.zeros(len(arrays), np.int64)
    kernels.pack(table, flat, 0.3, bad, 1.0)
    states = [np.abs(flat) for _ in range(4)]
    common = {"scale": 1.0, "limit": 2.0, "lr": 0.1, "decay": 0.01}
    moments = {
        "beta1": 0.9,
        "one_minus_beta1": 0.1,
        "bias1": 0.1,
        "beta2": 0.99,
        "one_minus_beta2": 0.01,
        "bias2": 0.01,
        "epsilon": 1e-8,
    }
    kernels.sgd(table, flat, written("Update", **common))
    kernels.sgd_momentum(table, flat, states[0], written("Momentum", **common, momentum=0.9, gain=1.0))
    kernels.adam(table, flat, *states[1:3], written("Adam", **common | moments))
    kernels.unpack(table, flat, 2.0)
    kernels.lerp(table, states[0], 0.3)
    ranks = [np.ones_like(flat), flat, states[3]]
    wrong = np.zeros(4 * len(arrays), np.int64)
    for share in range(3):
        kernels.add_parts(table.shard(share, 3), ranks, [ranks[0], ranks[2]], wrong)
    partial, sums = np.zeros(table.span[1] + len(arrays)), np.zeros(len(arrays))
    for share in range(3):
        kernels.partial_squares(table.shard(share, 3), flat, partial)
    kernels.fold_partials(table, partial, sums, 1)
    return flat, *ranks, bad, wrong, *states, partial, sums, *arrays


@pytest.mark.parametrize("by", [0, 1, 3])
@pytest.mark.parametrize("dtype", REALS)
def test_device_table_kernels_have_the_hosts_bits_at_every_size_and_alignment(device, dtype, by):
    """Empty tensors between others, exact multiples of a chunk, and one element more or less."""
    host = tables(dtype, by)
    with device():
        on_device = tables(dtype, by)
    same(host, on_device)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize(
    ("dtype", "stored"), [*((d, d) for d in REALS), ("float32", "float16"), ("float64", "float16")]
)
def test_device_shares_have_the_hosts_bits(device, dtype, stored, every, master):
    arguments = [0, *SIZES, 0, 3 * CHUNK], np.dtype(dtype).type, stored, every, every // 2, master
    host = shares(*arguments)
    with device():
        on_device = shares(*arguments)
    same(host, on_device)


@pytest.mark.parametrize("kinds", [1, 3])
def test_device_folds_have_the_hosts_bits(device, kinds):
    """Members of many more chunks than a block has threads."""
    host = folded([1, 0, 3, 255, 256, 257, 1000], kinds)
    with device():
        on_device = folded([1, 0, 3, 255, 256, 257, 1000], kinds)
    same(host, on_device)


def narrow_tables(dtype, stored, by):
    """What kernels make of a bucket of 16-bit parameters, worked on in ``dtype``, whose masters know more bits."""
    table, arrays = members([0, *SIZES, 0, 0, 3, 0], dtype, seed=6)
    arrays = [shifted(a.astype(stored), by) for a in arrays]
    narrow = BucketLayout(table.names, table.shapes, table.records["offset"], stored)
    narrow.dtype = np.dtype(dtype)  # any of the two
    narrow.point_to(arrays)
    flat, bad = np.zeros(table.extent, dtype), np.zeros(len(arrays), np.int64)
    kernels.pack(narrow, flat, 0.3, bad, 1.0)
    wide, states = flat / dtype(0.3), [np.abs(flat) for _ in range(11)]
    wide[::3] *= dtype(1 + 1e-6)  # the same bits when rounded, mostly
    common = {"scale": 1.0, "limit": 2.0, "lr": 0.1, "decay": 0.01}
    moments = {
        "beta1": 0.9,
        "one_minus_beta1": 0.1,
        "bias1": 0.1,
        "beta2": 0.99,
        "one_minus_beta2": 0.01,
        "bias2": 0.01,
        "epsilon": 1e-8,
    }
    bounds = {"lower": 0.5, "upper": 30.0}
    adamw = {"beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.99, "one_minus_beta2": 0.01, "gain": 0.7, "epsilon": 1e-6}
    lars = written("Lars", **common, momentum=0.9, eta=0.02, epsilon=1e-8)
    lamb, lans = (written(name, **common | moments | bounds) for name in ("Lamb", "Lans"))
    lbsgd = written("Lbsgd", **common, rescale=0.5, momentum=0.9, batches=2)
    muon = written("Muon", **common, momentum=0.9, one_minus_momentum=0.1)
    rows, chunks = len(arrays), max(table.chunks, len(arrays))
    partial, sums, squares = np.zeros(3 * chunks), np.zeros(3 * rows), np.zeros(rows)
    for master in (True, False):
        narrow.update_in(wide, master)
        kernels.sgd(narrow, flat, written("Update", **common))
        wide[1::5] += dtype(1)  # somebody has changed these parameters
        kernels.sgd_momentum(narrow, flat, states[0], written("Momentum", **common, momentum=0.9, gain=1.0))
        kernels.adamw(narrow, flat, *states[1:3], written("AdamW", **common | adamw))
        kernels.adam(narrow, flat, *states[7:9], written("Adam", **common | moments))
        kernels.adagrad(narrow, flat, states[9], written("AdaGrad", **common, epsilon=1e-8))
        kernels.rmsprop(narrow, flat, states[9], written("RmsProp", **common, rho=0.9, one_minus_rho=0.1, epsilon=1e-8))
        kernels.sign_descent(narrow, flat, written("Update", **common))
        kernels.signum(narrow, flat, states[10], written("Signum", **common, momentum=0.9))
        kernels.sgd_nesterov(narrow, flat, states[10], written("Momentum", **common, momentum=0.9, gain=1.0))
        kernels.widen(narrow, wide)
        kernels.lars_squares(narrow, flat, partial)
        kernels.fold_partials(narrow, partial, sums, 2)
        kernels.lars(narrow, flat, states[0], sums, lars)
        kernels.lamb_moments(narrow, flat, *states[1:3], partial, lamb)
        kernels.fold_partials(narrow, partial, sums, 2)
        kernels.lamb(narrow, *states[1:3], sums, lamb)
        kernels.partial_squares(narrow, flat, partial)
        kernels.fold_partials(narrow, partial, squares, 1)
        kernels.lans_moments(narrow, flat, *states[3:5], squares, partial, lans)
        kernels.fold_partials(narrow, partial, sums, 3)
        kernels.lans(narrow, flat, *states[3:5], squares, sums, lans)
        kernels.lbsgd_gather(narrow, flat, states[5], lbsgd)
        kernels.lbsgd_squares(narrow, flat, states[5], partial, lbsgd)
        kernels.fold_partials(narrow, partial, sums, 2)
        kernels.lbsgd_lars(narrow, flat, states[5], states[0], sums, lbsgd)
        kernels.lbsgd(narrow, flat, states[5], states[0], lbsgd)
        for nesterov in (False, True):
            kernels.muon_average(narrow, flat, states[0], states[6], nesterov, partial, muon)
        kernels.muon(narrow, states[6], 1.5, muon)
    packed = np.zeros_like(flat)
    kernels.pack(narrow, packed, 0.3, bad, 1.0)
    kernels.unpack(narrow, packed, 2.0, 1 - YES)
    kernels.unpack(narrow, packed, 3.0, YES)
    kernels.lerp(narrow, states[0], 0.3)
    return flat, wide, bad, *states, partial, sums, squares, packed, *arrays


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", REALS)
def test_device_kernels_for_16_bit_parameters_have_the_hosts_bits(device, dtype, stored, by):
    host = narrow_tables(np.dtype(dtype).type, stored, by)
    with device():
        on_device = narrow_tables(np.dtype(dtype).type, stored, by)
    same(host, on_device)
    assert all(np.isfinite(a.astype(np.float64)).all() for a in host)


def velocities(dtype, stored, by):
    """What Deep Gradient Compression makes of a bucket beside what it selects."""
    table, arrays = members([0, *SIZES, 0, 0, 3, 0], dtype, seed=8)
    params = BucketLayout(table.names, table.shapes, table.records["offset"], stored)
    params.dtype = np.dtype(dtype)
    params.point_to([shifted(a.astype(stored), by) for a in arrays])
    params.records["decay"] = np.arange(len(arrays)) % 3
    rng = np.random.default_rng(9)
    x, *states, growth = (shifted(a.astype(dtype), by) for a in rng.standard_normal((6, table.extent)))
    numbers, squares = np.zeros(max(table.chunks, len(arrays))), np.zeros(len(arrays))
    index = np.append(np.arange(0, x.size, 3, np.int32), np.int32(-1))
    for nesterov in (False, True):
        kernels.partial_squares(table, x, numbers)
        kernels.fold_partials(table, numbers, squares, 1)
        kernels.clip_norms(table, x, squares, 30.0)
        kernels.add_decay(params, x, 0.1)
        kernels.decay_momentum(params, states[0], growth, 0.9, nesterov, 0.1)
        kernels.decay_momentum(params, states[1], states[1], 0.9, False, 0.1)
        kernels.correct_momentum(table, x, states[2], 0.9, nesterov)
        kernels.encode_whole(table, x, states[3])
        kernels.mask(states[2], index)
        kernels.add_scaled(x, growth, 3.0)
    kept = [a.copy() for a in (x, *states, growth)]
    kernels.decay_momentum(params, states[0], growth, 0.9, True, 0.1, YES)
    kernels.correct_momentum(table, x, states[2], 0.9, False, YES)
    kernels.encode_whole(table, x, states[3], YES)
    same(kept, (x, *states, growth))
    return kept


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("stored", [None, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", REALS)
def test_device_velocity_kernels_have_the_hosts_bits(device, dtype, stored, by):
    host = velocities(np.dtype(dtype).type, stored or dtype, by)
    with device():
        on_device = velocities(np.dtype(dtype).type, stored or dtype, by)
    same(host, on_device)
    assert all(np.isfinite(a).all() for a in host)


def flats(n, dtype, by):
    """What the kernels of flat arrays make of n numbers."""
    x, y = (shifted(a.astype(dtype), by) for a in np.random.default_rng(n).standard_normal((2, n)))
    x[: n // 7 : 3] = np.nan
    y[: n // 9] = -np.inf
    bad, results = np.zeros(1, np.int64), [x, y]
    kernels.accumulate(x, y)
    kernels.scale(x, 1 / 3)
    kernels.clip(x, 0.2)
    kernels.count_nonfinite(y, bad)
    for wire, kind in ((np.float16, "half"), (ml_dtypes.bfloat16, "bfloat16")):
        h, back = (np.zeros(n, t) for t in (wire, dtype))
        getattr(kernels, f"to_{kind}")(y, h)
        getattr(kernels, f"from_{kind}")(h, back)
        getattr(kernels, f"add_{kind}")(h, x)
        kept, sent = shifted(x, by), np.zeros(n, wire)
        getattr(kernels, f"encode_{kind}")(kept, sent, x[:0], 0.25, 1e4)
        both, summed = shifted(x, by), np.zeros(n, wire)
        getattr(kernels, f"encode_{kind}")(both, summed, y, 0.25, 1e4)
        decoded = back.copy()
        getattr(kernels, f"decode_{kind}")(sent, decoded, 0.25)
        refused = x.copy(), np.ones(n, wire)
        getattr(kernels, f"encode_{kind}")(*refused, y, 0.25, 1e4, YES)
        same([refused[0], refused[1]], [x, np.zeros(n, wire)])
        copied, total, sums = np.zeros(n, wire), np.zeros(n, wire), np.zeros(n, dtype)
        getattr(kernels, f"copy_{kind}")(y, copied, 0.25, 1e4)
        getattr(kernels, f"sum_{kind}")(total, [h, sent, copied])
        table = BucketLayout(["y"], [(n,)], [0], dtype)
        getattr(kernels, f"add_{kind}_parts")(table, [h, sent, copied], sums, 0.25)
        results += [h, back, kept, sent, both, summed, decoded, copied, total, sums]
    before = y.copy()
    kernels.accumulate(x, y, YES)
    same([before], [y])
    return *results, bad


@pytest.mark.filterwarnings("ignore:invalid")
@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("n", SIZES)
def test_device_flat_kernels_have_the_hosts_bits(device, n, dtype, by):
    host = flats(n, dtype, by)
    with device():
        on_device = flats(n, dtype, by)
    same(host, on_device)


def test_count_nonfinite_counts_each_element_once(libraries):
    """One addition a warp, and none where there is nothing to add."""
    x, bad = np.zeros(3 * CHUNK, np.float32), np.zeros(1, np.int64)
    x[::5] = np.nan
    with on(libraries, 3, 128):
        kernels.count_nonfinite(x, bad)
    assert bad[0] == np.isnan(x).sum()


# Selection.  KernelStruct of few digits, so that there are ties, and what is not finite.
def numbers(n, dtype, seed, digits, odd=True):
    rng = np.random.default_rng(seed)
    x, add = rng.standard_normal((2, n)).round(digits).astype(dtype)
    if odd and n > 20:
        x[rng.integers(0, n, n // 20)] = np.nan
        x[rng.integers(0, n, n // 20)] = np.inf
        add[rng.integers(0, n, n // 20)] = -0.0
    return x, add


def bits_of(value, dtype):
    return int(np.array(value, dtype).view(f"i{np.dtype(dtype).itemsize}"))


def above(x, add, bound, capacity):
    """What ``select_above`` of a device shall do, in numpy: index, entry, x, how many."""
    total = x + add if add.size else x.copy()
    kind = f"i{x.itemsize}"
    indices = np.flatnonzero((total.view(kind) & np.iinfo(kind).max) > bound)
    index, entry = np.full(capacity, -1, np.int32), np.zeros(capacity, x.dtype)
    taken = indices[:capacity]
    index[: taken.size], entry[: taken.size] = taken, total[taken]
    total[taken] = 0
    return index, entry, total, np.array([x.size, indices.size])


SEEDS = st.integers(0, 2**32 - 1)
SOME_GRID = st.sampled_from(GRIDS)
LENGTHS = st.one_of(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1]), st.integers(0, 12 * CHUNK))


@pytest.mark.filterwarnings("ignore:invalid")
@given(
    n=LENGTHS,
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    limit=st.sampled_from([0.0, 0.5, 2.5, 100.0]),
    given_add=st.booleans(),
    by=st.integers(0, 3),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_take_above_takes_entries_above_a_bound_in_index_order(
    libraries, n, share, limit, given_add, by, dtype, grid, seed
):
    """Entries for which there is no room stay in x."""
    x, add = numbers(n, dtype, seed, 1)
    x, add, bound, capacity = shifted(x, by), add if given_add else add[:0], bits_of(limit, dtype), int(share * n)
    expected = above(x, add, bound, capacity)
    index, entry = np.full(capacity, 7, np.int32), np.full(capacity, 7, dtype)
    place, state = np.full(2, -5), np.full(select.above_words(n), -1)
    kept = shifted(x, by)
    with on(libraries, *grid), pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "on_gpu", lambda x: True)
        select.select_above(kept, add, index, entry, place, bound, state)
        same(expected, (index, entry, kept, place))
        select.select_above(kept, add, index, entry, place, bound, state, YES)
    same((np.full(capacity, -1, np.int32), np.zeros(capacity, dtype)), (index, entry))
    same([kept, place], [expected[2], np.array([n, 0])])


@pytest.mark.parametrize("seed", [2, 9, 19, 29])  # 2: races are looked for in global memory
def test_take_above_is_exact_with_more_blocks_than_a_warp_looks_back_over(libraries, seed):
    """Blocks sum the counts of all blocks before them, more of them than a warp reads at once."""
    x, add = numbers(150 * CHUNK, "float32", seed, 1)
    with np.errstate(invalid="ignore"):
        expected = above(x, add, bits_of(2.0, "float32"), x.size // 30)
    index, entry = np.zeros(x.size // 30, np.int32), np.zeros(x.size // 30, np.float32)
    place, state = np.zeros(2, np.int64), np.zeros(select.above_words(x.size), np.int64)
    with on(libraries, 60, 32, seed):
        kernels.blank(index, entry, state)
        kernels.sift_above(x, add, index, entry, place, state, bits_of(2.0, "float32"))
    same(expected, (index, entry, x, place))


def test_select_above_on_the_host():
    x, add = numbers(3000, "float32", 0, 1)
    planes = np.zeros(3000 + CHUNK, np.int32), np.zeros(3000 + CHUNK, np.float32)
    place, bound = np.zeros(2, np.int64), bits_of(1.0, "float32")
    expected = above(x, add, bound, 3000)
    kept = x.copy()
    select.select_above(kept, add, *planes, place, bound)
    same(expected, (planes[0][:3000] - (np.arange(3000) >= place[1]), planes[1][:3000], kept, place))
    place[:] = 0
    select.select_above(kept, add, *planes, place, bound, None, YES)
    assert place.tolist() == [3000, 0]
    assert (planes[0] == -1).all()
    assert not planes[1].any()
    same([kept], [expected[2]])


def largest_on_host(x, add, offsets, sizes, counts, refused=None, members=None):
    members = members or BucketLayout(["x"], [x.shape], [0], x.dtype)
    room = 2 * int(sizes.max(initial=0)) + 2 * CHUNK
    index, entry, *held = (np.full(k, 7, t) for k in (counts.sum(), room) for t in (np.int32, x.dtype))
    kernels.encode_largest(
        x, add, x[:0], 0.0, False, members.edges, offsets, sizes, counts, index, entry, *held, refused
    )
    return index, entry, x


def largest_on_device(x, add, offsets, sizes, counts, refused=None, members=None):
    members = members or BucketLayout(["x"], [x.shape], [0], x.dtype)
    table = select.parts_table(offsets, sizes, counts)
    state = np.full(select.largest_words(table, x.dtype), -1)
    index, entry, *held = (
        np.full(k, 7, t) for k in (counts.sum(), select.candidates(table)) for t in (np.int32, x.dtype)
    )
    select.select_largest(members, x, add, table, index, entry, state, *held, refused)
    return index, entry, x


def the_largest(libraries, grid, x, add, parts, refused=None, members=None):
    """Both sides on copies of x, equal to the bit; returns the launches of the device."""
    host = largest_on_host(x.copy(), add, *parts, refused, members)
    with on(libraries, *grid) as there:
        same(host, largest_on_device(shifted(x, 1), add, *parts, refused, members))
        assert not x.size or (refused is None) == (host[0].size == 0 or host[0][0] >= 0)
    return there.launched


def whole(n, density):
    return np.zeros(1, np.int64), np.array([n]), np.array([int(np.ceil(density * n))])


DENSITIES = st.sampled_from([1e-3, 0.01, 0.1, 0.3, 0.9, 1.0])


@pytest.mark.filterwarnings("ignore:invalid")
@given(
    n=LENGTHS,
    density=DENSITIES,
    digits=st.integers(0, 3),
    given_add=st.booleans(),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_the_largest_entries_of_a_bucket_are_those_of_the_host(
    libraries, n, density, digits, given_add, dtype, grid, seed
):
    x, add = numbers(n, dtype, seed, digits)
    the_largest(libraries, grid, x, add if given_add else add[:0], whole(n, density))


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=20)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3 * CHUNK)), min_size=1, max_size=12),
    density=DENSITIES,
    digits=st.integers(0, 3),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_the_largest_entries_of_every_tensor_are_those_of_the_host(
    libraries, sizes, density, digits, dtype, grid, seed
):
    room = [-(-n // 16) * 16 for n in sizes]
    x, add = numbers(sum(room), dtype, seed, digits)
    counts = np.ceil(density * np.array(sizes)).astype(np.int64)
    parts = np.cumsum(room) - room, np.array(sizes), counts
    the_largest(libraries, grid, x, add, parts)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2 * CHUNK)), min_size=1, max_size=12),
    density=DENSITIES,
    nonzero=st.sampled_from([0, 0.01, 0.3, 1.0]),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_nothing_is_selected_between_tensors(libraries, sizes, density, nonzero, dtype, grid, seed):
    """Even of zeros those of a tensor come first, from the lowest index on."""
    rng, room = np.random.default_rng(seed), [-(-n // 16) * 16 for n in sizes]
    members = BucketLayout([f"t{k}" for k in range(len(sizes))], [(n,) for n in sizes], np.cumsum(room) - room, dtype)
    inside = np.concatenate([np.arange(o, o + n) for o, n in zip(np.cumsum(room) - room, sizes, strict=True)])
    x = np.zeros(members.extent, dtype)
    x[inside] = (rng.standard_normal(inside.size) * (rng.random(inside.size) < nonzero)).astype(dtype)
    k = int(np.ceil(density * inside.size))
    parts = np.zeros(1, np.int64), np.array([x.size]), np.array([k])
    the_largest(libraries, grid, x, x[:0], parts, members=members)
    index, entry, kept = largest_on_host(x.copy(), x[:0], *parts, members=members)
    expected = np.sort(inside[np.argsort(-abs(x[inside]), kind="stable")[:k]])
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(entry, x[expected])
    x[expected] = 0
    np.testing.assert_array_equal(kept, x)


def spikes(rng, n):
    """Almost all zero: the guess is zero, and candidates do not fit."""
    return np.where(rng.random(n) < 1e-4, rng.standard_normal(n), 0)


def hidden(rng, n):
    """All that is large lies where no sample looks, so the guess is too low; then where all samples look."""
    x = rng.standard_normal(n) * 1e-3
    x[: n // 100] = 1 + rng.random(n // 100)
    return x


def sampled(rng, n):
    """A few lines are huge: more of them are sampled than there are."""
    x = rng.standard_normal(n)
    x[: 16 * (n // 16)].reshape(-1, 16)[::50] *= 1e6
    return x


HARD = {
    "zeros": lambda rng, n: np.zeros(n),
    "ties": lambda rng, n: np.full(n, -1.5),
    "two values": lambda rng, n: rng.choice([1.0, -2.0], n),
    "not finite": lambda rng, n: rng.choice([np.nan, np.inf, -np.inf], n),
    "spikes": spikes,
    "hidden": hidden,
    "sampled": sampled,
    "subnormal": lambda rng, n: rng.standard_normal(n) * 1e-40,
}


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.1])
@pytest.mark.parametrize("case", HARD)
def test_the_largest_entries_are_exact_when_the_guess_is_wrong_for_the_data(libraries, case, density, dtype):
    """A wrong guess of the bound costs time, and nothing else."""
    n = 70_001
    x = HARD[case](np.random.default_rng(1), n).astype(dtype)
    launched = the_largest(libraries, (3, 256, 1), x, x[:0], whole(n, density))
    digits = 4 if dtype == "float32" else 8
    assert len(launched) == 5 + digits


@pytest.mark.parametrize("rank", [1, 3, 10**6])
def test_the_largest_entries_are_exact_with_a_guess_too_high_or_too_low(libraries, monkeypatch, rank):
    """Too high: fewer candidates than wanted.  Too low: more than there is room for."""
    made = select.parts_table

    def misled(*parts):
        table = made(*parts)
        table.reshape(-1, select.CELLS)[:, 7] = rank
        return table

    monkeypatch.setattr(select, "parts_table", misled)
    x, add = numbers(50_000, "float32", 3, 3)
    the_largest(libraries, (5, 128, 4), x, add, whole(x.size, 0.01))


def chunks_table(sizes, of, k):
    """Chunks of members that lie at multiples of 64 bytes; all that they send."""
    starts, rows = np.cumsum([0, *(-(-n // 16) * 16 for n in sizes)]), []
    for start, size in zip(starts, sizes, strict=False):
        pieces = [(start + b, min(of, size - b)) for b in range(0, size, of)]
        rows += [(begin, n, -(-n * k // of)) for begin, n in pieces]
    counts = np.array([row[2] for row in rows], np.int64)
    table = np.array(rows, np.int64).reshape(-1, 3)
    return np.column_stack([table, np.cumsum(counts) - counts]).reshape(-1), int(starts[-1]), int(counts.sum())


def chunks_on_host(x, add, table, total, of, refused=None):
    index, entry, *held = (np.full(k, 7, t) for k in (total, of + 16) for t in (np.int32, x.dtype))
    kernels.encode_chunks(x, add, x[:0], 0.0, False, table, index, entry, *held, refused)
    return index, entry, x


def chunks_on_device(x, add, table, total, refused=None):
    index, entry = (np.full(total, 7, t) for t in (np.int32, x.dtype))
    kernels.select_chunks(x, add, table, index, entry, table.size // 4, refused)
    return index, entry, x


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=20)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3 * CHUNK)), min_size=1, max_size=6),
    of=st.sampled_from([64, 1024, CHUNK, 2 * CHUNK]),
    share=st.sampled_from([0.0, 1 / 64, 0.5, 1.0]),
    digits=st.integers(0, 3),
    given_add=st.booleans(),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_the_largest_entries_of_every_chunk_are_those_of_the_host(
    libraries, sizes, of, share, digits, given_add, dtype, grid, seed
):
    table, n, total = chunks_table(sizes, of, max(1, int(share * of)))
    x, add = numbers(n, dtype, seed, digits)
    add = add if given_add else add[:0]
    for refused in (None, YES):
        host = chunks_on_host(x.copy(), add, table, total, of, refused)
        with on(libraries, *grid) as there:
            same(host, chunks_on_device(shifted(x, 1), add, table, total, refused))
        assert [name.rpartition("_")[0] for name in there.launched] == ["select_chunks"]


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("case", HARD)
def test_the_largest_entries_of_chunks_of_hard_cases_are_those_of_the_host(libraries, case, dtype):
    table, n, total = chunks_table([70_001], CHUNK, 64)
    x = np.zeros(n, dtype)
    x[:70_001] = HARD[case](np.random.default_rng(1), 70_001)
    host = chunks_on_host(x.copy(), x[:0], table, total, CHUNK)
    with on(libraries, 3, 256, 1):
        same(host, chunks_on_device(x.copy(), x[:0], table, total))


@settings(max_examples=12)
@given(
    shape=st.sampled_from([(1,), (200,), (64, 64), (70, 130), (3, 5), (129, 2)]),
    side=st.sampled_from([1, 7, 64]),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_frequencies_are_those_of_the_host(libraries, shape, side, dtype, grid, seed):
    x = np.random.default_rng(seed).standard_normal(int(np.prod(shape))).astype(dtype)
    tiles = dct.tiles_of(BucketLayout(["x"], [shape], [0], dtype), side)
    forward = dct.bases(side, dtype).reshape(-1)
    back = np.ascontiguousarray(dct.bases(side, dtype).swapaxes(1, 2)).reshape(-1)
    for sides, inverse in (((forward, back), False), ((back, forward), True)):
        host, on_device = (shifted(np.full(x.size, 7, dtype), 1) for _ in "12")
        kernels.transform_tiles(x, host, tiles, *sides, tiles.size // 5, inverse)
        with on(libraries, *grid):
            kernels.transform_tiles(shifted(x, 1), on_device, tiles, *sides, tiles.size // 5, inverse)
        same([host], [on_device])


@given(
    sizes=st.lists(st.sampled_from([0, 1, 30, 64, 700]), min_size=1, max_size=4),
    of=st.sampled_from([1, 7, 64]),
    density=st.sampled_from([0.01, 0.3, 1.0]),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_rows_that_ranks_choose_are_those_of_the_host(libraries, sizes, of, density, dtype, grid, seed):
    layout = BucketLayout(
        list("abcd"[: len(sizes)]), [(n,) for n in sizes], [704 * k for k in range(len(sizes))], dtype
    )
    x, compressor = np.zeros(layout.extent, dtype), ARCTopK(density, of, seed=seed)
    for row, size in enumerate(sizes):
        layout.view(x, row)[...] = np.random.default_rng([seed, row]).standard_normal(size)

    def step():
        state, out = {}, np.full_like(x, 7)
        context = sketched(compressor, x, state, ExchangeContext(bucket=BucketContext(layout)))
        payload = compressor.compress(x, state, context)
        compressor.decompress(payload, out, context)
        return context.sketch, payload, state["residual"], out

    host = step()
    with on(libraries, *grid):
        same(host, step())


@pytest.mark.parametrize("dtype", REALS)
def test_a_memory_does_not_decay_in_a_refused_step(device, dtype):
    x = np.arange(9000, dtype=dtype)
    for refused, expected in ((YES, x), (np.zeros(1, np.int64), x / 2), (None, x / 2)):
        found = x.copy()
        with device():
            kernels.scale(found, 0.5, refused)
        same([found], [expected])


@pytest.mark.parametrize("dtype", REALS)
def test_a_refused_selection_changes_nothing(device, dtype):
    x, add = numbers(9000, dtype, 1, 1)
    with device():
        on_device = largest_on_device(x.copy(), add, *whole(x.size, 0.1), YES)
    host = largest_on_host(x.copy(), add, *whole(x.size, 0.1), YES)
    same(host, on_device)
    same(host, (np.full(900, -1, np.int32), np.zeros(900, dtype), x))
    no = np.zeros(1, np.int64)
    with device():
        on_device = largest_on_device(x.copy(), add, *whole(x.size, 0.1), no)
    same(largest_on_host(x.copy(), add, *whole(x.size, 0.1)), on_device)


def test_scratch_for_the_selection_stays_below_a_hundredth_of_the_data():
    """25.6 M elements at 0.1 %: candidates of some per mille, and no more words than a hundredth of x."""
    table = select.parts_table(*whole(25_600_000, 0.001))
    assert 2 * 25_600 < select.candidates(table) < 5 * 25_600
    assert select.largest_words(table, np.float32) < 15_000
    assert select.candidates(select.parts_table(*whole(10**6, 0.5))) == 0


def payloads(n, ranks, dtype, seed):
    """Of every rank: ascending indices, with -1 after them, and entries, of which some are 0."""
    rng, results = np.random.default_rng(seed), []
    for _ in range(ranks):
        k = int(rng.integers(0, n + 1)) // int(rng.integers(1, 20))
        index = np.full(k + int(rng.integers(0, 5)), -1, np.int32)
        index[:k] = np.sort(rng.permutation(n)[:k])
        entry = np.where(index < 0, 0, rng.standard_normal(index.size)).astype(dtype)
        entry[::4] = 0
        results.append((index, entry))
    return results


@settings(max_examples=20)
@given(
    n=st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]),
    ranks=st.sampled_from([0, 1, 2, 5, 70]),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    seed=SEEDS,
)
def test_decode_all_adds_the_entries_of_ranks_in_order_as_decode_sparse(libraries, n, ranks, dtype, grid, seed):
    sent = payloads(n, ranks, dtype, seed)
    one_by_one = np.zeros(n, dtype)
    for index, entry in sent:
        kernels.decode_sparse(one_by_one, index, entry)
    lists = [i for i, _ in sent], [e for _, e in sent], np.array([i.size for i, _ in sent], np.int64)
    host, on_device = np.full((2, n + 1), 7, dtype)[:, 1:]
    kernels.decode_all(host, *lists)
    same([one_by_one], [host])
    with on(libraries, *grid):
        kernels.decode_all(on_device, *lists)
        again = np.zeros(n, dtype)
        for index, entry in sent:
            kernels.decode_sparse(again, index, entry)
    same([one_by_one, one_by_one], [on_device, again])
    senders, zeros = np.zeros(n, np.int64), np.arange(ranks) % 3 % 2  # of two ranks in three zeros do not count
    for zero, (index, entry) in zip(zeros, sent, strict=True):
        counts = (index >= 0) & ((entry != 0) | (zero != 0))
        np.add.at(senders, index[counts], 1)
    factor = (2.5 / np.maximum(senders, 1)).astype(dtype)
    kernels.divide_by_senders(host, *lists, zeros, 2.5)
    same([np.where(senders > 0, one_by_one * factor, one_by_one)], [host])
    with on(libraries, *grid):
        kernels.divide_by_senders(on_device, *lists, zeros, 2.5)
    same([host], [on_device])


def codes(sizes, dtype, by, seed, refused=None):
    """What the kernels of codec.cu make of a bucket: payloads of two ranks, what is kept, and the sum."""
    table, _ = members(sizes, dtype)
    rng, results = np.random.default_rng(seed), []
    x, add, y = (shifted(a, by) for a in rng.standard_normal((3, table.extent)).astype(dtype))
    if seed % 2:
        x[: x.size // 9 : 5] = np.nan
        add[: x.size // 5 : 7] = -np.inf
    words = [-(-table.extent // 16), -(-table.extent // 32) + 1, -(-table.extent // 32)]
    two, one, ones = ([shifted(np.zeros(4 * n, np.uint8), 4 * by) for _ in "12"] for n in words)
    for k, start in enumerate((x, y)):  # the second rank has nothing to add
        kept = [shifted(start, by) for _ in range(3)]
        more = [kept[j] if k else add for j in range(3)]
        partial = np.zeros(table.span[1] + len(sizes))
        kernels.encode_two_bits(kept[0], more[0], not k, two[k], 0.5, refused)
        kernels.partial_magnitudes(table, kept[1], more[1], not k, partial, refused)
        mean = one[k][:4].view(np.float32)
        kernels.mean_of_partials(partial[: table.span[1]], mean, int(sum(sizes)), refused)
        kernels.encode_one_bit(table, kept[1], kept[1], False, one[k], 4, 0.0, refused)
        kernels.encode_one_bit(table, kept[2], more[2], not k, ones[k], 0, -0.5, refused)
        results += [*kept, partial]
    sums = [shifted(np.full(table.extent, 3, dtype), by) for _ in range(3)]
    kernels.decode_two_bits(sums[0], two, 0.5)
    kernels.decode_one_bit(table, sums[1], one, 4)
    kernels.decode_one_bit(table, sums[2], ones, 0)
    for a in (*results, *sums):
        a[np.isnan(a)] = np.nan  # of either sign
    return *results, *two, *one, *ones, *sums


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=30)
@given(
    sizes=st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 3 * CHUNK)), min_size=1, max_size=6),
    by=st.integers(0, 3),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    refused=st.sampled_from([None, np.zeros(1, np.int64), YES]),
    seed=SEEDS,
)
def test_one_and_two_bit_codes_have_the_hosts_bits(libraries, sizes, by, dtype, grid, refused, seed):
    host = codes(sizes, dtype, by, seed, refused)
    with on(libraries, *grid):
        on_device = codes(sizes, dtype, by, seed, refused)
    same(host, on_device)
    if refused is YES:
        assert not any(payload.any() for payload in host[8:14])


def blocks(sizes, dtype, by, block, seed, refused=None):
    """What the kernels of blocks.cu make of a bucket: payloads of two ranks, what is kept, and sums of them."""
    table, _ = members(sizes, dtype)
    x, add, y = (shifted(a, by) for a in np.random.default_rng(seed).standard_normal((3, table.extent)).astype(dtype))
    if seed % 2:
        x[: x.size // 9 : 505] = np.nan
        add[: x.size // 5 : 707] = -np.inf
        y[: y.size // 2] *= dtype(1e-42)
    results = []
    for bits in (8, 4):
        each = 4 * (-(-np.array(sizes) * bits // 32) + np.ceil(np.array(sizes) / block / 2).astype(np.int64))
        place = np.cumsum(each) - each
        payloads = [shifted(np.full(each.sum() + 8, 0xA5, np.uint8), 4 * by) for _ in range(3)]
        encode, dither, decode = (getattr(kernels, f"{verb}_int{bits}") for verb in ("encode", "dither", "decode"))
        kept = [shifted(a, by) for a in (x, y, y)]
        encode(table, kept[0], add, True, payloads[0], place, block, refused)
        encode(table, kept[1], kept[1], False, payloads[1], place, block, refused)
        dither(table, kept[2], add, True, payloads[2], place, block, seed * 12345678901, seed, refused)
        sums = [shifted(np.full(table.extent, 3, dtype), by) for _ in range(3)]
        none = np.zeros_like(place)
        decode(table, sums[0], payloads, place, none, 3, block, False)
        decode(table, sums[1], payloads[1:], place, none, 1, block, True)
        decode(table, sums[2], payloads, place, np.arange(len(sizes)) % 3, 1, block, False)
        results += [*kept, *payloads, *sums]
    for a in results:
        if a.dtype == np.dtype(dtype):
            a[np.isnan(a)] = np.nan  # of either sign
    return results


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=30)
@given(
    sizes=st.lists(st.one_of(st.sampled_from(SIZES), st.integers(0, 3 * CHUNK)), min_size=1, max_size=6),
    by=st.integers(0, 3),
    block=st.sampled_from([32, 128, 256, CHUNK]),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    refused=st.sampled_from([None, np.zeros(1, np.int64), YES]),
    seed=SEEDS,
)
def test_blocks_of_integers_have_the_hosts_bits(libraries, sizes, by, block, dtype, grid, refused, seed):
    dtype = np.dtype(dtype).type
    host = blocks(sizes, dtype, by, block, seed, refused)
    with on(libraries, *grid):
        on_device = blocks(sizes, dtype, by, block, seed, refused)
    same(host, on_device)
    if refused is YES:
        assert not any(payload[:-8].any() for payload in (*host[3:6], *host[12:15]))


def packed(x, index, entry, value, damage):
    """A payload, what stays in x, and the planes of it and of one that is noise from the byte ``damage`` on."""
    layout = device_memory.DeviceMirror(packing(x.size, index.size, value))
    payload, x = np.zeros(int(layout.host["bytes"][0]), np.uint8), x.copy()
    kernels.pack_planes(x, index, entry, payload, layout)
    other = payload.copy()
    if damage is not None:
        other[damage:] = np.random.default_rng(x.size).integers(0, 256, other[damage:].size)
    places, values = np.full(2 * index.size, 7, np.int32), np.full(2 * index.size, 7, x.dtype)
    kernels.unpack_planes([payload, other], places, values, layout)
    values[np.isnan(values)] = np.nan  # of either sign
    return payload, x, places, values


def cut_into_sections(x, index, entry, bases, spare, value, damage):
    """Sections with places for ``spare`` entries more or fewer, what stays in x, and the planes of them."""
    sizes = np.diff([*bases, x.size])
    edges = np.full(len(bases) + 1, 7)
    kernels.find_edges(np.array([*bases, x.size]), edges, index)
    places = np.clip(np.diff(edges) + spare, 0, sizes)
    rows, x = sections.table(np.array(bases), sizes, places, value, x.itemsize), x.copy()
    rows["x"], rows["index"], rows["entry"] = x.ctypes.data, index.ctypes.data, entry.ctypes.data
    rows["held"], turns = index.size, len(rows) * max(1, -(-int(places.max()) // CHUNK))
    table = device_memory.DeviceMirror(rows.view(np.int64))
    payload = np.zeros(int(rows["at"][-1] + rows["bytes"][-1]), np.uint8)
    kernels.pack_sections(payload, table, turns, real=x.dtype)
    other = payload.copy()
    if damage is not None:
        other[damage:] = np.random.default_rng(x.size).integers(0, 256, other[damage:].size)
    found = np.full(int(places.sum()), 7, np.int32), np.full(int(places.sum()), 7, x.dtype)
    parts = [other[at:] for at in rows["at"].tolist()]
    if found[0].size:
        if damage is not None:  # noise may add to one element twice, in any order
            rows["x"] = 0
        kernels.unpack_sections(parts, *found, device_memory.DeviceMirror(rows.view(np.int64)), turns)
    found[1][np.isnan(found[1])] = np.nan  # of either sign
    return edges, payload, x, *found


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=30)
@given(
    n=st.one_of(st.sampled_from([40, CHUNK, 9 * CHUNK]), st.integers(1, 9 * CHUNK)),
    density=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    cuts=st.integers(0, 6),
    spare=st.sampled_from([0, 3, -5]),
    missing=st.integers(0, 5),
    value=st.sampled_from(list(sections.FORMATS)),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    damage=st.sampled_from([None, 0, 4]),
    seed=SEEDS,
)
def test_sections_have_the_hosts_bits_even_if_damaged(
    libraries, n, density, cuts, spare, missing, value, dtype, grid, damage, seed
):
    """Planes may end with places without an entry; entries that a section has no place for go back."""
    rng = np.random.default_rng(seed)
    index = np.flatnonzero(rng.random(n) < density).astype(np.int32)
    entry, x = rng.standard_normal(index.size).astype(dtype), rng.standard_normal(n).astype(dtype)
    index, entry = np.append(index, np.full(missing, -1, np.int32)), np.append(entry, np.zeros(missing, dtype))
    x[index[index >= 0]] = 0
    bases = sorted({0, *rng.integers(0, n, cuts).tolist()})
    host = cut_into_sections(x, index, entry, bases, spare, value, damage)
    with on(libraries, *grid):
        on_device = cut_into_sections(x, index, entry, bases, spare, value, damage)
    same(host, on_device)
    if damage is None and spare >= 0:
        assert host[3][host[3] >= 0].tolist() == index[index >= 0].tolist()


@pytest.mark.filterwarnings("ignore:invalid")
@settings(max_examples=30)
@given(
    n=st.one_of(st.sampled_from([1, 40, CHUNK, 9 * CHUNK]), st.integers(0, 9 * CHUNK)),
    density=st.sampled_from([0.0, 0.001, 0.1, 0.4, 0.7, 1.0]),
    spare=st.integers(0, 100),
    value=st.sampled_from(list(VALUES)),
    by=st.integers(0, 3),
    dtype=st.sampled_from(REALS),
    grid=SOME_GRID,
    damage=st.sampled_from([None, 0, 16]),
    seed=SEEDS,
)
@example(9 * CHUNK, 1.0, 0, "float16", 0, "float32", (1, 256, 0), 0, 0)  # one block has all pieces
@example(9 * CHUNK, 1.0, 0, "int8", 0, "float64", (2, 256, 3), None, 0)
@example(9 * CHUNK - 100, 1.0, 0, "2bit", 0, "float32", (1, 256, 0), 0, 0)
@example(3 * CHUNK + 7, 0.7, 50, "2bit", 1, "float64", (7, 32, 2), 16, 1)
def test_packed_payloads_have_the_hosts_bits_even_if_damaged(
    libraries, n, density, spare, value, by, dtype, grid, damage, seed
):
    """Places without an entry stand at the end; a payload of noise becomes the same on both sides."""
    rng = np.random.default_rng(seed)
    k = int(np.ceil(density * n))
    places = min(n, k + spare)
    index, entry = np.full(places, -1, np.int32), np.zeros(places, dtype)
    index[:k] = np.sort(rng.choice(n, k, replace=False))
    entry[:k] = rng.standard_normal(k) * 2.0 ** rng.integers(-140, 120, k)
    entry[: k // 5 : 3] = np.nan
    entry[: k // 7 : 3] = -np.inf
    x, index, entry = (shifted(a, by) for a in (np.zeros(n, dtype), index, entry))
    host = packed(x, index, entry, value, damage)
    with on(libraries, *grid):
        on_device = packed(x, index, entry, value, damage)
    same(host, on_device)
    np.testing.assert_array_equal(host[2][:places], index)
    assert not host[3][k:places].any()
    if damage == 0:
        assert (host[2][places:] == np.arange(places)).all()
        assert np.isnan(host[3][places:]).all()


@pytest.mark.skipif(SANITIZE in os.environ, reason="this is that run")
@pytest.mark.parametrize("made", ["text", pytest.param("ptx", marks=[*ptx.MARKS, pytest.mark.full])])
def test_no_thread_reads_or_writes_outside_of_its_arrays(made):
    """The same under the address and undefined-behaviour sanitizers."""
    if not sanitized():
        pytest.skip("the compiler has no libasan")
    env = sanitized() | {SANITIZE: "1"}
    some = "count or flat_kernels or tensors_of_every or above_a_bound or largest_of_every or all_ranks or refused"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        f"device and {'ptx' if made == 'ptx' else 'not ptx'} and not full",
        __file__,
        "-k",
        f"({some} or codes_of or packed or (16_bits and float16-1 and float32)) and not (newer or clang)",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
