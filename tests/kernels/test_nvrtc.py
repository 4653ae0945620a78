"""Every kernel text compiles for every GPU, without one: needs only NVIDIA's run-time compiler."""

import ctypes
import functools
import importlib.util
import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distopt.kernels.dispatch import CUDA_FLAGS, KERNELS, NATIVE

ARCHITECTURES = (75, 80, 90, 100, 120)
TEXTS = sorted(p.name for p in NATIVE.glob("*.cu"))


@functools.cache
def nvrtc():
    """NVRTC of the extra, None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(folder).rglob("libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(nvrtc() is None, reason="NVRTC is missing: pip install 'distopt[nvrtc]'"),
]


# What loads and stores 16 bytes a thread.
WIDE = ("ld", "st")
ACCESSES = {
    **dict.fromkeys("pack unpack accumulate scale clip encode_half encode_bfloat16 add_half".split(), WIDE),
    **dict.fromkeys("sgd sgd_momentum sgd_nesterov rmsprop adagrad adam sift_above sift_parts".split(), WIDE),
    **dict.fromkeys("adamw lars lamb lans lbsgd lbsgd_gather lbsgd_lars add_parts add_bfloat16".split(), WIDE),
    **dict.fromkeys("encode_two_bits encode_one_bit".split(), WIDE),
    **dict.fromkeys("count_nonfinite to_half count_digits deliver".split(), ("ld",)),
    **dict.fromkeys("decode_half from_half from_bfloat16 decode_all blank".split(), ("st",)),
    **dict.fromkeys("decode_two_bits decode_one_bit".split(), ("st",)),
}


def compiled(text, real, architecture):
    """(machine code, PTX, the compiler's log) of a text; the log is the failure's text if it does not compile."""
    lib, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    source = (NATIVE / text).read_bytes()
    headers = sorted(NATIVE.glob("*.h"))
    names = (ctypes.c_char_p * len(headers))(*(h.name.encode() for h in headers))
    bodies = (ctypes.c_char_p * len(headers))(*(h.read_bytes() for h in headers))
    assert lib.nvrtcCreateProgram(ctypes.byref(program), source, text.encode(), len(headers), bodies, names) == 0
    flags = [*CUDA_FLAGS, f"-Dreal={real}", f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"]
    options = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    code = lib.nvrtcCompileProgram(program, len(flags), options)
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, binary)
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw, ptx.value.decode(), log.value.decode()


@functools.cache
def everything():
    """All texts, compiled by as many threads as there are cores."""
    pool, cases = ThreadPoolExecutor(os.cpu_count()), itertools.product(TEXTS, ("float", "double"), ARCHITECTURES)
    return {case: pool.submit(compiled, *case) for case in cases}


def kernels_of(text):
    """The names of a text's kernels; those of topk_host.cu are the host's alone."""
    source = (NATIVE / text).read_text()
    return [] if "#if HOST" in source else [name for name in KERNELS if f"KERNEL({name})" in source]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_kernel_compiles_without_spilling_and_with_wide_accesses(text, real, architecture):
    binary, ptx, log = everything()[text, real, architecture].result()
    assert binary.startswith(b"\x7fELF")
    names = kernels_of(text)
    assert all(f"{name}_{real}".encode() in binary for name in names)
    assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(names), log
    bodies = {body.split("(")[0].strip(): body for body in ptx.split(".visible .entry ")[1:]}
    assert bodies.keys() == {f"{name}_{real}" for name in names}
    for name in names:
        for access in ACCESSES.get(name, ()):
            wide = rf"\b{access}\.global\.(wb\.)?(v4\.[bfu]32|v2\.[bfu]64)"
            assert re.search(wide, bodies[f"{name}_{real}"]), f"{name}: no {access} of 16 bytes"
