"""What XLA alone does not do well: each kernel has a reference and fast versions, chosen by the target.

Kernels are functions of local arrays: they are called inside `jax.shard_map` over batch and heads, or without a mesh.
"""

from panax.kernels.attention import attention
from panax.kernels.attention_choice import AttentionCase, Choice, choose_attention
from panax.kernels.cpu.timing import Chosen as TimedKernels
from panax.kernels.cpu.timing import choose as choose_by_timing
from panax.kernels.cpu.timing import in_force as timed_kernels_in_force
from panax.kernels.cross_entropy import (
    CrossEntropySums,
    chunk_tokens_within,
    cross_entropy_sums,
    cross_entropy_sums_and_gradients,
    linear_cross_entropy,
)

__all__ = [
    "AttentionCase",
    "Choice",
    "CrossEntropySums",
    "TimedKernels",
    "attention",
    "choose_attention",
    "choose_by_timing",
    "chunk_tokens_within",
    "cross_entropy_sums",
    "cross_entropy_sums_and_gradients",
    "linear_cross_entropy",
    "timed_kernels_in_force",
]
