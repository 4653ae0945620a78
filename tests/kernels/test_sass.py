"""The machine code of every kernel: what a GPU's speed hangs on and no CPU can time."""

import functools

import pytest
from test_nvrtc import kernels_of

from benchmarks import gpu_sass
from benchmarks.gpu_sass import REALS, SHARED, TEXTS, resident_blocks
from distopt.kernels.dispatch import THREADS
from ptx import everything

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        gpu_sass.nvrtc() is None or gpu_sass.disassembler() is None,
        reason="pip install nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
    ),
    pytest.mark.parametrize(
        "architecture", [pytest.param(a, marks=pytest.mark.full if a == 80 else ()) for a in SHARED]
    ),
    pytest.mark.parametrize("real", REALS),
]

# By text, how many registers a thread has at most, for float and for double.  40 leave room for six blocks of a
# multiprocessor, 48 for five, 64 for four, 80 for three, 128 for two.
REGISTERS = {
    **dict.fromkeys(["pack.cu", "cast.cu", "codec.cu", "dgc.cu"], (48, 48)),
    **dict.fromkeys(["sgd.cu", "lars.cu", "lbsgd.cu", "rmsprop.cu", "adagrad.cu", "reduce.cu", "muon.cu"], (64, 80)),
    **dict.fromkeys(["adam.cu", "adamw.cu", "lamb.cu", "lans.cu", "packed.cu"], (64, 112)),
    "blocks.cu": (64, 96),
    "share.cu": (48, 56),
    "rows.cu": (64, 112),
    "exact.cu": (56, 80),  # sixteen loads of the largest magnitude are under way
    "sparse.cu": (56, 56),
    "dct.cu": (64, 128),
    "signum.cu": (64, 80),
    "topk_device.cu": (64, 80),
    "topk_host.cu": (0, 0),  # no kernel of a GPU
}
# How many loads of 16 bytes a thread has under way before it stores anything: one from every array that it reads, and
# where sums are taken as many as make four.
LOADS = {
    **dict.fromkeys(["scale", "clip", "pack", "unpack", "count_nonfinite", "count_above", "clip_norms"], 1),
    **dict.fromkeys(["encode_half", "encode_bfloat16", "copy_half", "copy_bfloat16", "to_half", "to_bfloat16"], 1),
    **dict.fromkeys(["add_half", "add_bfloat16", "encode_two_bits", "encode_one_bit", "add_parts", "widen"], 1),
    **dict.fromkeys(["count_digits", "deliver", "sift_above", "sift_parts", "add_decay", "decay_momentum"], 1),
    "select_chunks": 1,
    "sign_descent": 2,
    "signum": 3,
    **dict.fromkeys(["accumulate", "add_scaled", "correct_momentum", "encode_whole", "lbsgd_gather", "sgd", "lerp"], 2),
    **dict.fromkeys(["muon_average", "muon"], 2),
    **dict.fromkeys(["encode_int8", "encode_int4", "dither_int8", "dither_int4"], 2),
    **dict.fromkeys(["sgd_momentum", "sgd_nesterov", "rmsprop", "adagrad", "lars", "lamb", "lbsgd_squares"], 3),
    **dict.fromkeys(["adam", "adamw", "lans", "lbsgd", "lbsgd_lars", "lamb_moments", "lans_moments"], 4),
    **dict.fromkeys(["lars_squares", "partial_squares", "partial_magnitudes"], 4),
}
# How many arrays a kernel writes 16 bytes at a time.
STORES = {
    **dict.fromkeys(["scale", "clip", "clear", "pack", "unpack", "accumulate", "add_scaled", "widen", "add_parts"], 1),
    **dict.fromkeys(["encode_half", "encode_bfloat16", "decode_half", "decode_bfloat16", "clip_norms", "add_decay"], 1),
    **dict.fromkeys(["add_half", "add_bfloat16", "from_half", "from_bfloat16", "decode_all", "lbsgd_gather"], 1),
    **dict.fromkeys(["divide_by_senders", "overwrite"], 1),
    **dict.fromkeys(["encode_two_bits", "encode_one_bit", "decode_two_bits", "decode_one_bit"], 1),
    **dict.fromkeys(["add_half_parts", "add_bfloat16_parts", "sgd", "lamb", "lans", "partial_magnitudes"], 1),
    "lerp": 1,
    **dict.fromkeys(["sift_above", "sift_parts", "select_chunks"], 1),
    **dict.fromkeys(["encode_int8", "encode_int4", "dither_int8", "dither_int4", "decode_int8", "decode_int4"], 1),
    **dict.fromkeys(["correct_momentum", "encode_whole", "decay_momentum", "lamb_moments", "lans_moments"], 2),
    **dict.fromkeys(["sgd_momentum", "sgd_nesterov", "rmsprop", "adagrad", "lars", "blank"], 2),
    "muon_average": 2,
    "muon": 1,
    **dict.fromkeys(["adam", "adamw", "lbsgd", "lbsgd_lars"], 3),
}
EITHER = {"add_parts", "add_decay", "decay_momentum"}  # read what lies in shared memory, or does not


@functools.cache
def codes(text, real, architecture):
    """What the compiler made of a text's kernels, by name."""
    binary, _, log = everything(architecture)[text, real].result()
    found = gpu_sass.kernel_codes(binary, log) if kernels_of(text) else {}
    return {name.removesuffix(f"_{real}"): code for name, code in found.items()}


def every_kernel(real, architecture):
    """(text, name, code) of every kernel."""
    found = [(text, name, code) for text in TEXTS for name, code in codes(text, real, architecture).items()]
    assert {name for _, name, _ in found} == {name for text in TEXTS for name in kernels_of(text)}
    return found


def test_no_kernel_spills_or_needs_a_stack(real, architecture):
    wrong = [name for _, name, code in every_kernel(real, architecture) if code.spilled or code.stack]
    assert wrong == []


def test_registers_of_a_kernel_are_at_most_those_of_its_family(real, architecture):
    beyond = {
        name: code.registers
        for text, name, code in every_kernel(real, architecture)
        if code.registers > REGISTERS[text][REALS.index(real)]
    }
    assert beyond == {}


def test_four_blocks_of_a_float_kernel_fit_on_a_multiprocessor_and_two_of_doubles(real, architecture):
    least = {"float": 4, "double": 2}[real]
    fitting = {
        name: resident_blocks(code.registers, code.shared, architecture, THREADS)
        for _, name, code in every_kernel(real, architecture)
    }
    assert {name: blocks for name, blocks in fitting.items() if blocks < least} == {}


def test_kernels_load_16_bytes_of_every_array_before_they_store(real, architecture):
    at_once = {name: code.accesses.loads_at_once for _, name, code in every_kernel(real, architecture)}
    assert {name: at_once[name] for name, least in LOADS.items() if at_once[name] < least} == {}


def test_kernels_store_16_bytes_at_a_time(real, architecture):
    stores = {name: code.accesses.counts["STG", 128] for _, name, code in every_kernel(real, architecture)}
    assert {name: stores[name] for name, least in STORES.items() if stores[name] < least} == {}


def test_accesses_know_that_global_memory_is_global(real, architecture):
    """A generic access may be one to shared memory, and is slower."""
    generic = {
        name
        for _, name, code in every_kernel(real, architecture)
        if any(kind in ("LD", "ST") for kind, _ in code.accesses.counts)
    }
    assert generic == EITHER
