"""Memory, and a GPU: the only package that touches cupy's runtime.

An array is numpy's, or cupy's on one GPU; what is done with one on a GPU is *enqueued*: it happens when the current
stream comes to it, and the host goes on.
"""

from distopt.device.arrays import address, check_place, describe, is_array, on_gpu, place, remedy, writable
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
from distopt.device.graph import Graph, drop_graphs
from distopt.device.kernels import compile_text, launch
from distopt.device.memory import HUGE_PAGE, clear, empty, gpu_zeros, last_read, lasting_zeros, owned_by, zeros
from distopt.device.messages import Mirror, Readback
from distopt.device.streams import Order, current_stream, finish, new_stream

__all__ = [
    "DEVICE_TO_DEVICE",
    "DEVICE_TO_HOST",
    "HOST_TO_DEVICE",
    "HUGE_PAGE",
    "NO_CUPY",
    "Graph",
    "Mirror",
    "Order",
    "Readback",
    "address",
    "array_module",
    "bus_id",
    "check_place",
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
    "finish",
    "gpu_count",
    "gpu_name",
    "gpu_state",
    "gpu_zeros",
    "has_cupy",
    "host_copy",
    "is_array",
    "last_read",
    "lasting_zeros",
    "launch",
    "multiprocessors",
    "new_stream",
    "nvrtc_version",
    "on_gpu",
    "owned_by",
    "place",
    "remedy",
    "use_gpu",
    "uuid",
    "writable",
    "zeros",
]
