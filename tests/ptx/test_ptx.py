"""The translation of PTX itself: what its instructions compute, what it traps, and what it refuses."""

import ctypes

import numpy as np
import pytest
from test_nvrtc import kernels_of
from test_simt import alone, launch

import ptx
from benchmarks.gpu_sass import TEXTS
from doubles.gpu import argument_sizes
from ptx.translate import translate

pytestmark = [pytest.mark.device, *ptx.MARKS]
MODULE = """
.version 9.0
.target sm_80
.address_size 64

.visible .entry {name}_float(
	.param .u64 {name}_float_param_0,
	.param .u64 {name}_float_param_1
)
.maxntid 64, 1, 1
{{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<30>;
	.reg .b64 	%rd<20>;
	.reg .f32 	%f<9>;
	.shared .align 4 .b8 room[64];

	ld.param.u64 	%rd1, [{name}_float_param_1];
	cvta.to.global.u64 	%rd2, %rd1;
{body}
	ret;

}}
"""
# of 32-bit a, b, c: the statement that leaves its answer in %r4, and the answer by the manual, in whole numbers
A, B, C = 0x80F1_23C4, 0x0000_0F35, 12
INSTRUCTIONS = {
    "prmt.b32 %r4, %r1, %r2, 29728": int.from_bytes([(A | B << 32) >> 8 * k & 255 for k in (0, 2, 4, 7)], "little"),
    "prmt.b32 %r4, %r1, %r2, 11": 0xC4C4_C4FF,
    "bfi.b32 %r4, %r2, %r1, 4, 8": A & ~0xFF0 | (B & 0xFF) << 4,
    "bfind.shiftamt.u32 %r4, %r2": 32 - B.bit_length(),
    "brev.b32 %r4, %r1": int(f"{A:032b}"[::-1], 2),
    "popc.b32 %r4, %r1": A.bit_count(),
    "shl.b32 %r4, %r1, %r3": A << C & 0xFFFF_FFFF,
    "shl.b32 %r4, %r1, 32": 0,
    "shr.u32 %r4, %r1, 40": 0,
    "shr.s32 %r4, %r1, 40": 0xFFFF_FFFF,
    "shr.s32 %r4, %r1, %r3": (A - (1 << 32) >> C) & 0xFFFF_FFFF,
    "mul.hi.u32 %r4, %r1, %r2": A * B >> 32,
    "mul.lo.s32 %r4, %r1, %r2": A * B & 0xFFFF_FFFF,
    "mad.lo.s32 %r4, %r1, %r2, %r3": A * B + C & 0xFFFF_FFFF,
    "div.s32 %r4, %r1, %r2": -(((1 << 32) - A) // B) & 0xFFFF_FFFF,
    "rem.u32 %r4, %r1, %r2": A % B,
    "min.s32 %r4, %r1, %r2": A,
    "max.u32 %r4, %r1, %r2": A,
    "sub.s32 %r4, %r2, %r1": B - A & 0xFFFF_FFFF,
    "mov.f32 %f1, 0f4F800000; cvt.rzi.s32.f32 %r4, %f1": 0x7FFF_FFFF,  # 2^32
    "mov.f32 %f1, 0fCF800000; cvt.rzi.s32.f32 %r4, %f1": 0x8000_0000,
    "mov.f32 %f1, 0f7FC00000; cvt.rzi.s32.f32 %r4, %f1": 0,  # a NaN
    "mov.f32 %f1, 0fC0200000; cvt.rzi.s32.f32 %r4, %f1": 0xFFFF_FFFE,  # -2.5
    "mov.f32 %f1, 0f7FC00000; setp.neu.f32 %p1, %f1, %f1; selp.b32 %r4, 1, 2, %p1": 1,
    "mov.f32 %f1, 0f7FC00000; setp.leu.f32 %p1, %f1, 0f00000000; selp.b32 %r4, 1, 2, %p1": 1,
    "mov.f32 %f1, 0f7FC00000; setp.le.f32 %p1, %f1, 0f00000000; selp.b32 %r4, 1, 2, %p1": 2,
    "mov.u32 %r4, 5; setp.lt.s32 %p1, %r1, 0; @!%p1 mov.u32 %r4, 6": 5,
    "mov.b64 %rd3, {%r1, %r2}; mov.b64 {%r5, %r4}, %rd3": B,
    # only clang's
    "mov.b64 %rd3, {%r1, %r2}; mov.b64 {_, %r4}, %rd3": B,
    "bfe.u32 %r4, %r1, 4, 8": A >> 4 & 0xFF,
    "bfe.u32 %r4, %r1, 28, 8": A >> 28,
    "bfe.u32 %r4, %r1, 4, 0": 0,
    "bfe.s32 %r4, %r1, 6, 4": 0xFFFF_FFFF,  # 15 of four bits
    "bfe.s32 %r4, %r1, 40, 4": 0xFFFF_FFFF,
    "mov.b32 %r5, 0fC0200000; abs.f32 %r4, %r5": 0x4020_0000,  # floats in registers of bits
    "mov.b32 %r5, 0f3F800000; add.rn.f32 %r4, %r5, 0f40000000": 0x4040_0000,
    "mov.b32 %r5, 0fC0200000; cvt.f64.f32 %rd3, %r5; cvt.rn.f32.f64 %r4, %rd3": 0xC020_0000,
    "cvt.s8.s32 %r4, %r1": 0xFFFF_FFC4,
    "setp.gt.u32 %p1, %r1, 1; selp.f32 %r4, 0f3F800000, 0f40000000, %p1": 0x3F80_0000,
    "mov.b64 %rd3, {name}_float_param_1; ld.param.b64 %rd4, [%rd3]; cvta.global.u64 %rd4, %rd4; sub.s64 %rd4, %rd4, "
    "%rd1; cvt.u32.u64 %r4, %rd4": 0,
    ".local .align 8 .b8 __local_depot0[16]; mov.b64 %rd3, __local_depot0; cvta.local.u64 %rd4, %rd3; "
    "st.local.b32 [%rd3+8], %r1; ld.b32 %r4, [%rd4+8]": A,
    "$a: .branchtargets $b, $c; mov.u32 %r5, 1; mov.u32 %r4, 7; brx.idx %r5, $a; $b: mov.u32 %r4, 5; "
    "$c: mov.u32 %r6, 0": 7,
    "shfl.sync.idx.b32 %r4, %r2, 0, 0, 1": B,  # the only lane; no predicate
    # only NVRTC's for newer GPUs
    "prmt.b32 %r4, %r1, %r2, 0x5410U": A & 0xFFFF | (B & 0xFFFF) << 16,
    "prmt.b32 %r4, %r1, 0, 0xbbb3U": 0xFFFF_FF80,  # the highest byte, and thrice its sign
    "shf.r.wrap.b32 %r4, %r1, %r2, %r3": (A | B << 32) >> C & 0xFFFF_FFFF,
    "shf.r.wrap.b32 %r4, %r1, %r2, 32": A,
    "shf.r.wrap.b32 %r4, %r1, %r2, 44": (A | B << 32) >> 12 & 0xFFFF_FFFF,
    "mov.b32 %r5, room; add.s32 %r5, %r5, -1024; st.shared.b32 [%r5+1024], %r1; ld.shared.b32 %r4, [%r5+1024]": A,
    "st.global.b32 [%rd2], %r1; atom.relaxed.gpu.global.add.u32 %r5, [%rd2], %r2; ld.global.b32 %r4, [%rd2]": A + B,
    "st.global.b32 [%rd2], %r1; atom.relaxed.gpu.global.add.u32 %r4, [%rd2], %r2": A,
}
TRAPS = {
    "ld.global.u32 %r1, [%rd2+2]": "misaligned",
    "st.global.v2.u32 [%rd2+4], {%r1, %r1}": "misaligned",
    "mov.u64 %rd3, 0; st.global.u32 [%rd3+4], 1": "a null pointer",
    "mov.u32 %r1, room; st.shared.u32 [%r1+64], 1": "shared memory outside of all variables",
    "mov.u32 %r1, room; st.shared.u32 [%r1+-4], 1": "shared memory outside of all variables",
    "mov.u32 %r1, room; st.shared.u32 [%r1], 1; ld.shared.u32 %r2, [%r1+4]": "shared memory that no thread has written",
    "mov.u32 %r1, room; cvt.u64.u32 %rd3, %r1; cvta.shared.u64 %rd4, %rd3; st.global.u32 [%rd4], 1": "a global access",
}


def module(name, statements):
    body = "\n".join(f"\t{part};" for part in statements.split("; "))
    return translate(MODULE.format(name=name, body=body), "m")


def test_instructions_compute_what_the_manual_says(tmp_path):
    found = []
    for number, text in enumerate(INSTRUCTIONS):
        given = f"mov.u32 %r1, {A}; mov.u32 %r2, {B}; mov.u32 %r3, {C}"
        text = text.replace("{name}", f"k{number}")
        found += module(f"k{number}", f"{given}; {text}; st.global.u32 [%rd2], %r4")
    library = ctypes.CDLL(str(ptx.library(tmp_path, "instructions", found)))
    for number, (text, expected) in enumerate(INSTRUCTIONS.items()):
        y = np.zeros(1, np.uint32)
        launch(library, f"k{number}", 1, 1, 1, y)
        assert y[0] == expected, f"{text}: {y[0]:x}, not {expected:x}"


@pytest.mark.parametrize("text", TRAPS)
def test_an_access_that_a_gpu_would_refuse_or_that_reads_what_nobody_wrote_is_trapped(text, tmp_path):
    library = ptx.library(tmp_path, "traps", module("trap", text))
    done = alone(library, "trap")
    assert done.returncode < 0
    assert f"simt: block 0: trap_float, thread 0, m:{20 + text.count(';')}: {TRAPS[text]}" in done.stderr


RACES = {  # statements, and whether nothing orders what two threads do there
    "st.shared.u32 [%r1], %r2": True,
    "st.shared.u32 [%r3], %r2; ld.shared.u32 %r4, [%r1]": True,
    "st.shared.u32 [%r3], %r2; bar.sync 0; ld.shared.u32 %r4, [%r1]": False,
    "st.shared.u32 [%r3], %r2; bar.sync 0; ld.shared.u32 %r4, [%r1]; st.shared.u32 [%r3], %r2": True,
    "st.shared.u32 [%r3], %r2; bar.sync 0; ld.shared.u32 %r4, [%r1]; bar.sync 0; st.shared.u32 [%r3], %r2": False,
    "st.shared.u32 [%r3], %r2; bar.sync 0; atom.shared.add.u32 %r4, [%r1], 1": False,
    "st.shared.u32 [%r3], %r2; atom.shared.add.u32 %r4, [%r1], 1": True,
    "st.shared.u32 [%r3], %r2; bar.warp.sync -1; ld.shared.u32 %r4, [%r6]": False,  # of its own warp
    "st.shared.u32 [%r3], %r2; ld.shared.u32 %r4, [%r6]": True,
}


@pytest.mark.parametrize("text", RACES)
def test_accesses_of_shared_memory_that_nothing_orders_are_trapped(text, tmp_path):
    """%r1: the first word; %r3: that of each thread; %r6: of the lane before, if there is one."""
    given = "mov.u32 %r1, room; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2; add.s32 %r3, %r1, %r3; and.b32 %r8, %r2, 31"
    given += (
        "; sub.s32 %r8, %r8, 1; max.s32 %r8, %r8, 0; and.b32 %r9, %r2, 32; or.b32 %r8, %r8, %r9; shl.b32 %r8, %r8, 2"
    )
    given += "; add.s32 %r6, %r1, %r8"
    source = MODULE.replace("room[64]", "room[256]")
    body = "\n".join(f"\t{part};" for part in f"{given}; {text}".split("; "))
    done = alone(ptx.library(tmp_path, "race", translate(source.format(name="race", body=body), "m")), "race")
    assert ("a race with block 0, thread" in done.stderr) == RACES[text] == (done.returncode != 0), done.stderr


IN_GLOBAL = {  # of 2 blocks of 64 threads: %rd2 is an address for all, %rd5 of a block, %rd6 of a thread
    "st.global.u32 [%rd2], %r2": True,
    "st.global.u32 [%rd5], %r2": True,
    "st.global.u32 [%rd6], %r2; ld.global.u32 %r4, [%rd6]": False,
    "st.global.u8 [%rd2], %r2; ld.global.u32 %r4, [%rd6]": True,
    "ld.global.u32 %r4, [%rd2]; st.global.u32 [%rd6+4], %r2": False,
    "st.global.u32 [%rd6], %r2; bar.sync 0; ld.global.u32 %r4, [%rd5]": False,
    "st.global.u32 [%rd6], %r2; bar.sync 0; ld.global.u32 %r4, [%rd2]": True,
    "atom.global.add.u32 %r4, [%rd2], 1": False,
    "ld.global.u32 %r4, [%rd2]; add.s32 %r4, %r4, 1; st.global.u32 [%rd2], %r4": True,
    "st.volatile.global.u32 [%rd2], %r2; ld.volatile.global.u32 %r4, [%rd2]": False,
    "st.volatile.global.u32 [%rd2], %r2; ld.global.u32 %r4, [%rd2]": True,
    "st.global.v2.u32 [%rd7], {%r2, %r2}; st.global.u32 [%rd7+4], %r2": False,
    "st.global.v2.u32 [%rd7], {%r2, %r2}; st.global.u32 [%rd7+8], %r2": True,
    "st.global.u16 [%rd8], %r2": False,  # two threads to a word
    "st.global.u16 [%rd8], %r2; st.global.u8 [%rd8+2], %r2": True,
}


@pytest.mark.parametrize("text", IN_GLOBAL)
def test_accesses_of_global_memory_that_nothing_orders_are_trapped(text, tmp_path):
    """By two orders of four, one of which is looked at."""
    given = "mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 6; mov.u32 %r2, %tid.x; add.s32 %r3, %r1, %r2"
    for to, of, nbytes in ((5, 1, 4), (6, 3, 4), (7, 3, 8), (8, 3, 2)):
        given += f"; mul.wide.u32 %rd{to}, %r{of}, {nbytes}; add.s64 %rd{to}, %rd2, %rd{to}"
    library = ptx.library(tmp_path, "race", module("race", f"{given}; {text}"))
    for seed in (1, 2):
        done = alone(library, "race", n=256, blocks=2, seed=seed)
        assert ("a race with " in done.stderr) == (IN_GLOBAL[text] and seed == 2) == (done.returncode != 0), done.stderr


def test_a_block_of_more_threads_than_was_compiled_for_is_trapped(tmp_path):
    entry = module("large", "mov.u32 %r1, 1")[0]
    library = ptx.library(tmp_path, "large", [entry._replace(code=entry.code.replace(", 64, ", ", 63, "))])
    assert "a block of more threads than .maxntid" in alone(library, "large").stderr


@pytest.mark.parametrize(
    "text",
    [
        "add.ftz.f32 %f1, %f1, %f2",
        "add.f32 %f1, %f1, %f2",
        "bar.sync 1",
        "fma.rn.f32 %f1, %f2, %f3, %f4",
        "atom.acquire.gpu.global.add.u32 %r1, [%rd2], 1",
        "atom.relaxed.sys.global.add.u32 %r1, [%rd2], 1",
        "shf.l.wrap.b32 %r1, %r2, %r3, 4",
        "shf.r.clamp.b32 %r1, %r2, %r3, 4",
        "bfind.u32 %r1, %r2",
        "bfind.shiftamt.s32 %r1, %r2",
        "brev.b64 %rd1, %rd2",
        "min.NaN.f32 %f1, %f1, %f2",
        "neg.ftz.f32 %f1, %f1",
        "add.sat.s32 %r1, %r1, %r2",
        "mad.lo.cc.u32 %r1, %r1, %r2, %r3",
        "cvt.rzi.u32.f32 %r1, %f1",
        "mov.u32 %r1, 0b101U",
        "call f",
    ],
)
def test_a_statement_without_a_rule_is_refused(text):
    with pytest.raises(ValueError, match=r"^m:20: no rule for"):
        module("unknown", text)


@pytest.mark.parametrize(
    "by",
    [
        ptx.by_nvrtc,
        pytest.param(ptx.by_nvrtc_for_newer, marks=pytest.mark.full),
        pytest.param(ptx.by_clang, marks=ptx.CLANG_MARKS),
    ],
    ids=["nvrtc", "newer", "clang"],
)
@pytest.mark.parametrize("real", ["float", "double"])
def test_every_kernel_has_an_entry_that_takes_what_is_launched_with(real, by):
    """As many bytes of each argument, in order: the driver copies so many from where the launch points."""
    found = {entry.name.rpartition("_")[0]: entry.parameters for entry in ptx.entries(real, compile_text=by)}
    of_gpus = [name for text in TEXTS for name in kernels_of(text)]
    assert found == {name: argument_sizes(name) for name in of_gpus}
