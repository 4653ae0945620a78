"""The functions of NCCL that cupy lacks, in the real library: a machine without a GPU can show that they are called."""

import subprocess
import sys

import pytest

pytest.importorskip("cupy", reason="cupy is missing: pip install 'distopt[cuda13]'")

from distopt.comm import nccl_library
from launch import finish

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not nccl_library.binding().available, reason="NCCL is missing: pip install 'distopt[cuda13]'"),
]


class Communicator:
    """None, as NCCL sees it."""

    comm = 0


@pytest.mark.parametrize("windows", [True, False])
def test_nccl_refuses_to_register_for_no_communicator(windows, monkeypatch):
    """Rather than crash, as it would for arguments in another order."""
    monkeypatch.setattr(nccl_library, "WINDOWS", 0 if windows else 10**6)
    with pytest.raises(nccl_library.binding().NcclError, match="NCCL_ERROR_INVALID_ARGUMENT"):
        nccl_library.Registration(Communicator, 4096, 10)


@pytest.mark.parametrize("window", [None, 4096])
def test_nccl_refuses_to_deregister_from_no_communicator(window):
    registration = object.__new__(nccl_library.Registration)
    registration._comm = Communicator
    registration._window, registration._handle = (nccl_library.ctypes.c_void_p(at) for at in (window, 4096))
    with pytest.raises(nccl_library.binding().NcclError, match="NCCL_ERROR_INVALID_ARGUMENT"):
        registration.end()


def test_a_second_nccl_that_hides_the_first_is_refused(tmp_path):
    """Its communicators are not those of the library that cupy's binding is linked to."""
    source, other = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text('extern "C" int ncclGetVersion(int *version) { *version = 22001; return 0; }')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", other, source], check=True)
    code = f"import ctypes; ctypes.CDLL({str(other)!r}, ctypes.RTLD_GLOBAL); "
    code += "from distopt.comm import nccl_library; nccl_library.library()"
    _, output = finish([sys.executable, "-c", code], 60)
    assert "needs one NCCL library in a process, got " in output
    assert " beside 2.20.1: import cupy before" in output


def test_the_library_is_the_one_that_cupys_binding_has_loaded():
    version = nccl_library.ctypes.c_int()
    assert nccl_library.library().ncclGetVersion(nccl_library.ctypes.byref(version)) == 0
    assert version.value == nccl_library.nccl_version()
    assert all(hasattr(nccl_library.library(), name) for name in ("ncclMemAlloc", "ncclMemFree"))
    assert len(nccl_library.library_paths()) == 1
    assert nccl_library.library_paths()[0].startswith("/")
