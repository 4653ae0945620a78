"""Every kernel text compiles for every GPU, without one: needs only NVIDIA's run-time compiler."""

import re

import pytest

from benchmarks.gpu_sass import REALS, TEXTS, nvrtc
from distopt.kernels.dispatch import KERNELS, NATIVE
from ptx import everything

# Those of data centres are compiled for test_sass.py anyhow.
ARCHITECTURES = [80, 90, 100, *(pytest.param(architecture, marks=pytest.mark.full) for architecture in (75, 120))]
FLAVOURS = [(80, 90), pytest.param((100, 120), marks=pytest.mark.full)]  # of PTX: tests/ptx runs one of each
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(nvrtc() is None, reason="NVRTC is missing: pip install 'distopt[nvrtc]'"),
]


def kernels_of(text):
    """The names of a text's kernels; those of topk_host.cu are the host's alone."""
    source = (NATIVE / text).read_text()
    return [] if text == "topk_host.cu" else [name for name in KERNELS if f"KERNEL({name})" in source]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_kernel_compiles_without_spilling(text, real, architecture):
    binary, ptx, log = everything(architecture)[text, real].result()
    assert binary.startswith(b"\x7fELF")
    names = kernels_of(text)
    assert all(f"{name}_{real}".encode() in binary for name in names)
    assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(names), log
    assert {body.split("(")[0].strip() for body in ptx.split(".visible .entry ")[1:]} == {f"{n}_{real}" for n in names}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("text", TEXTS)
def test_one_ptx_is_for_many_gpus(text, real, flavour):
    found = (everything(architecture)[text, real].result()[1] for architecture in flavour)
    assert len({re.sub(r"\n\.target sm_\d+\n", "", ptx) for ptx in found}) == 1
