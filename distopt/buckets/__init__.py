"""Fuse many small arrays into few flat ones: the plan, its memory, and the staging of the fused verbs."""

from distopt.buckets.buffers import Buffer, Buffers, States
from distopt.buckets.norm import global_norm
from distopt.buckets.piece import Piece, Sum, in_one_piece, own, shared
from distopt.buckets.plan import Bucket, Plan, plan
from distopt.buckets.staging import Staging
from distopt.buckets.sums import leave, take

__all__ = [
    "Bucket",
    "Buffer",
    "Buffers",
    "Piece",
    "Plan",
    "Staging",
    "States",
    "Sum",
    "global_norm",
    "in_one_piece",
    "leave",
    "own",
    "plan",
    "shared",
    "take",
]
