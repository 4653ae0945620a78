"""Memory on the host and on GPUs; the only package that calls cupy's runtime.

An array is numpy's, or cupy's on one GPU.  Work on a GPU is *enqueued*: it happens when the current stream comes to
it, and the host goes on.
"""

from distopt.device.arrays import (
    address,
    check_gpu,
    describe,
    gpu_of,
    is_array,
    matching_address,
    matching_addresses,
    on_gpu,
    remedy,
    writable,
)
from distopt.device.copies import DEVICE_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_DEVICE, contiguous, copied, copy, host_copy
from distopt.device.gpus import (
    NO_CUPY,
    bus_id,
    current_gpu,
    driver_version,
    gpu_count,
    gpu_name,
    gpu_state,
    has_cupy,
    multiprocessors,
    nvrtc_version,
    use_gpu,
    uuid,
)
from distopt.device.gpus import cupy as array_module
from distopt.device.graph import Graph, drop_graphs, is_capture_error
from distopt.device.kernels import compile_text, launch
from distopt.device.memory import (
    HUGE_PAGE,
    clear,
    empty,
    gpu_zeros,
    owned_by,
    persistent_zeros,
    wait_for_last_use,
    zeros,
)
from distopt.device.messages import AsyncReadback, DeviceMirror
from distopt.device.streams import StreamEvent, current_stream, new_stream, synchronize

__all__ = [
    "DEVICE_TO_DEVICE",
    "DEVICE_TO_HOST",
    "HOST_TO_DEVICE",
    "HUGE_PAGE",
    "NO_CUPY",
    "AsyncReadback",
    "DeviceMirror",
    "Graph",
    "StreamEvent",
    "address",
    "array_module",
    "bus_id",
    "check_gpu",
    "clear",
    "compile_text",
    "contiguous",
    "copied",
    "copy",
    "current_gpu",
    "current_stream",
    "describe",
    "driver_version",
    "drop_graphs",
    "empty",
    "gpu_count",
    "gpu_name",
    "gpu_of",
    "gpu_state",
    "gpu_zeros",
    "has_cupy",
    "host_copy",
    "is_array",
    "is_capture_error",
    "launch",
    "matching_address",
    "matching_addresses",
    "multiprocessors",
    "new_stream",
    "nvrtc_version",
    "on_gpu",
    "owned_by",
    "persistent_zeros",
    "remedy",
    "synchronize",
    "use_gpu",
    "uuid",
    "wait_for_last_use",
    "writable",
    "zeros",
]
