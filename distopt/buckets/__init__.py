"""Buckets: many small arrays fused into few flat ones; their plan, their memory, and the staging of fused verbs."""

from distopt.buckets.bucket import Bucket, BucketSet, Reduced, Shard, States, local_shard, sharded, unsharded
from distopt.buckets.grad_io import read_sums, write_sums
from distopt.buckets.plan import BucketSpec, Plan, plan
from distopt.buckets.staging import Staging

__all__ = [
    "Bucket",
    "BucketSet",
    "BucketSpec",
    "Plan",
    "Reduced",
    "Shard",
    "Staging",
    "States",
    "local_shard",
    "plan",
    "read_sums",
    "sharded",
    "unsharded",
    "write_sums",
]
