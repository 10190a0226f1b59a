"""Kernels for operations that XLA alone does not compile well: a reference and fast versions of each, chosen
by target.

Kernels are functions of local arrays, called inside `jax.shard_map` over batch and heads, or without a mesh.
"""

import panax.kernels.cpu.attention
import panax.kernels.cpu.convolution
import panax.kernels.cpu.exact
import panax.kernels.cpu.grouped_matmul
import panax.kernels.cpu.products  # noqa: F401 (all register their kernels)
from panax.kernels.attention.attention import attention
from panax.kernels.attention.case import AttentionCase
from panax.kernels.cpu.timing import KernelSelection as TimedKernels
from panax.kernels.cpu.timing import choose_kernels as choose_by_timing
from panax.kernels.cpu.timing import current_record as timed_kernels_in_force
from panax.kernels.cpu.timing import machine_key
from panax.kernels.cross_entropy import (
    CrossEntropySettings,
    CrossEntropySums,
    chunk_tokens_within,
    cross_entropy_sums,
    cross_entropy_sums_and_gradients,
    linear_cross_entropy,
)
from panax.kernels.grouped.grouped_matmul import grouped_outer, grouped_product
from panax.kernels.kernel_choice import Kernels
from panax.kernels.log_probabilities import linear_log_probabilities, log_probability_gradients
from panax.kernels.registry import Kernel, KernelChoice, choose, list_kernels, register, use_kernels

__all__ = [
    "AttentionCase", "CrossEntropySettings", "CrossEntropySums", "Kernel", "KernelChoice", "Kernels",
    "TimedKernels", "attention", "choose", "choose_by_timing", "chunk_tokens_within", "cross_entropy_sums",
    "cross_entropy_sums_and_gradients", "grouped_outer", "grouped_product", "linear_cross_entropy",
    "linear_log_probabilities", "list_kernels", "log_probability_gradients", "machine_key", "register",
    "timed_kernels_in_force", "use_kernels",
]  # fmt: skip
