"""Flash attention on CPU by `csrc/attention.c`: kernels for "partial attention".

XLA's compilation of `attention/blockwise.py` copies queries, keys and values into the layout of its matmuls,
and processes blocks operation by operation. The C file multiplies directly from [batch, seq, heads,
head_dim], one block of a head at a time, and the block stays in the cache of its core.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from panax.kernels.attention.blockwise import AttentionPasses
from panax.kernels.attention.layout import ScoreBlocks
from panax.kernels.attention.operands import AttentionOperands, OutputGradient, ScoreRule
from panax.kernels.cpu.native import KERNELS, call_native
from panax.kernels.cpu.products import native_limit
from panax.kernels.registry import Kernel, register


def native_forward(
    name: str,
    operands: AttentionOperands,
    *,
    scores: ScoreRule,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike,
) -> tuple[Float[Array, "batch query_seq heads head_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute the output and the logarithm of each query's softmax sum, like `flash_forward`."""
    q = operands.q
    results = (jax.ShapeDtypeStruct(q.shape, result_dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    call = call_native("panax_attention_forward", results)
    out, logsumexp = call(*operands[:3], *_segments(operands), **_attributes(name, scores, blocks))
    return out, logsumexp


def native_backward(
    name: str,
    operands: AttentionOperands,
    output: OutputGradient,
    *,
    scores: ScoreRule,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    """Compute the cotangents of q, k and v, like `flash_backward`."""
    results = tuple(jax.ShapeDtypeStruct(x.shape, result_dtype) for x in (operands.q, operands.k, operands.v))
    call = call_native("panax_attention_backward", results)
    arrays = (*operands[:3], output.d_out, output.logsumexp, output.delta, *_segments(operands))
    d_q, d_k, d_v = call(*arrays, **_attributes(name, scores, blocks))
    return d_q, d_k, d_v


def _segments(operands: AttentionOperands) -> tuple[Array, ...]:
    query, key = operands.query_segments, operands.key_segments
    return () if query is None or key is None else (query, key)


def _attributes(name: str, scores: ScoreRule, blocks: ScoreBlocks) -> dict[str, Any]:
    # 0 stands for no window and no cap: both are positive if given.
    integer_attributes = {
        "query_block": blocks.query,
        "key_block": blocks.key,
        "causal": scores.mask.causal,
        "window": scores.mask.window or 0,
        "offset": scores.mask.offset,
        "kernel": KERNELS.index(name),
    }
    return {
        **{name: np.int32(value) for name, value in integer_attributes.items()},
        "scale": np.float32(scores.scale),
        "soft_cap": np.float32(scores.soft_cap or 0.0),
    }


for _name in KERNELS:
    _run = AttentionPasses(functools.partial(native_forward, _name), functools.partial(native_backward, _name))
    register(Kernel(work="partial attention", name=_name, run=_run, platforms=("cpu",), limit=native_limit(_name)))
