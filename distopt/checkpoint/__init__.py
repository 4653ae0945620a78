"""Checkpoints: trees of values and arrays in safetensors files, and folders of such files."""

from distopt.checkpoint.error import CheckpointError
from distopt.checkpoint.file import check, header, prepare, read, write
from distopt.checkpoint.head import Header, Tensor
from distopt.io.pending import Pending, sweep

__all__ = ["CheckpointError", "Header", "Pending", "Tensor", "check", "header", "prepare", "read", "sweep", "write"]
