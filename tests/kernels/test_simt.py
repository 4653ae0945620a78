"""The shim itself: it computes what a device would, and finds planted mistakes."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

import ptx
from simt.build import HERE, build, sanitized

pytestmark = pytest.mark.device
ROWS = 16


@pytest.fixture(scope="session", params=["own switch", "ucontext", pytest.param("ptx", marks=ptx.MARKS)])
def planted(request, tmp_path_factory):
    folder, texts = tmp_path_factory.mktemp("planted"), [HERE / "planted.cu"]
    if request.param == "ptx":
        return ptx.build(folder, "float", texts=texts)
    return build(folder, "float", ["-DSIMT_UCONTEXT"] if request.param == "ucontext" else (), texts=texts)


def test_a_library_is_compiled_once_and_again_where_its_text_or_an_option_is_another(tmp_path, monkeypatch):
    kept, text = tmp_path / "kept", tmp_path / "some.cu"
    kept.mkdir()
    monkeypatch.setattr("simt.build.folder", lambda: kept)
    text.write_text('extern "C" void some_float(int) {}\n')
    found = [build(tmp_path, "float", texts=[text]).read_bytes() for _ in "ab"]
    assert found[0] == found[1]
    assert len(list(kept.iterdir())) == 1
    build(tmp_path, "float", ["-DSIMT_UCONTEXT"], texts=[text])
    assert len(list(kept.iterdir())) == 2
    text.write_text('extern "C" void some_float(long) {}\n')
    build(tmp_path, "float", texts=[text])
    assert len(list(kept.iterdir())) == 3


def launch(library, name, blocks, threads, *values):
    """The kernel's launch; numbers are passed as long long."""
    held = [ctypes.c_void_p(v.ctypes.data) if isinstance(v, np.ndarray) else ctypes.c_longlong(v) for v in values]
    places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    getattr(library, f"launch_{name}_float")((ctypes.c_uint * 6)(blocks, 1, 1, threads, 1, 1), 0, places)


def test_warp_intrinsics_and_barriers_return_what_a_gpu_returns(planted):
    library, lane = ctypes.CDLL(str(planted)), np.arange(32)
    for seed in range(5):
        library.simt_seed(ctypes.c_ulonglong(seed))
        y = np.zeros((ROWS, 32), np.int64)
        launch(library, "ask", 1, 32, y.size, y)
        expected = [
            np.full(32, 105),
            2**40 | (lane ^ 3),
            np.where(lane < 2, lane, lane - 2),
            np.where(lane > 29, lane, lane + 2),
            np.full(32, sum(1 << k for k in range(0, 32, 3))),
            np.full(32, 3),
            15 << (lane // 4 * 4),
            np.full(32, 16),
            np.full(32, 1),
            lane ^ 1,
            np.where(lane < 8, 7, 0),
        ]
        np.testing.assert_array_equal(y[: len(expected)], expected)


def test_a_missing_barrier_gives_wrong_results(planted):
    library, x = ctypes.CDLL(str(planted)), np.arange(512, dtype=np.float32)
    for wait in (1,) if planted.stem.startswith("ptx") else (1, 0):  # PTX's loads would see that nothing is there yet
        right = []
        for seed in range(4):
            library.simt_seed(ctypes.c_ulonglong(seed))
            y = np.zeros_like(x)
            launch(library, "reverse", 2, 256, x.size, x, y, wait)
            right.append((y == x.reshape(2, -1)[:, ::-1].ravel()).all())
        assert right == [bool(wait)] * 4


def test_shared_memory_starts_poisoned(planted):
    if planted.stem.startswith("ptx"):
        assert "shared memory that no thread has written" in alone(planted, "read_what_nobody_wrote").stderr
        return
    y = np.zeros(32, np.uint32)
    launch(ctypes.CDLL(str(planted)), "read_what_nobody_wrote", 1, 32, 32, y)
    assert (y == 0xC3C3C3C3).all()


@pytest.mark.parametrize("seed", range(6))
def test_blocks_may_wait_for_those_that_run(planted, seed):
    library, y = ctypes.CDLL(str(planted)), np.zeros(21, np.int64)
    library.simt_seed(ctypes.c_ulonglong(seed))
    launch(library, "chain", 20, 64, y.size, y)
    np.testing.assert_array_equal(y, [20, *np.cumsum(np.arange(1, 21))])


MISTAKES = {
    "lane_missing": "deadlock: some threads wait for others that will not come",
    "lane_gone": "a mask names a lane that is gone",
    "lane_not_named": "a lane is in a warp operation whose mask lacks it",
    "two_operations": "lanes are in different warp operations",
    "barrier_of_some": "deadlock: some threads wait for others that will not come",
    "two_barriers": "threads are at different barriers",
    "waits_for_ever": "deadlock: blocks wait for each other without end",
}


def alone(library, name, n=64, blocks=1, seed=0, **options):
    """A launch of blocks of 64 threads in a process of its own, with n floats."""
    code = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
held = [ctypes.c_longlong({n}), ctypes.c_void_p(libc.malloc(4 * {n}))]
places = (ctypes.c_void_p * 2)(*map(ctypes.addressof, held))
library = ctypes.CDLL({str(library)!r})
library.simt_seed(ctypes.c_ulonglong({seed}))
library.launch_{name}_float((ctypes.c_uint * 6)({blocks}, 1, 1, 64, 1, 1), 0, places)
"""
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_kernel_that_would_hang_or_diverge_is_ended_with_a_text(planted, name):
    done = alone(planted, name)
    assert done.returncode < 0
    assert f"simt: block 0: {MISTAKES[name]}" in done.stderr
    assert "thread 0: " in done.stderr or name in ("lane_not_named", "waits_for_ever")


@pytest.mark.skipif(sanitized() is None, reason="the compiler has no libasan")
@pytest.mark.parametrize("make", [build, pytest.param(ptx.build, marks=ptx.MARKS)], ids=["text", "ptx"])
def test_the_address_sanitizer_finds_an_overrun_of_a_device_thread(make, tmp_path):
    library = make(tmp_path, "float", sanitize=True, texts=[HERE / "planted.cu"])
    done = alone(library, "overrun", 1000, env=sanitized())
    assert done.returncode
    assert "heap-buffer-overflow" in done.stderr
    assert "overrun_float" in done.stderr
    assert alone(library, "waits_for_ever", env=sanitized()).returncode
