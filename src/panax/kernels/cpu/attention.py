"""Flash attention on CPU by `csrc/attention.c`: kernels for "partial attention".

XLA's compilation of `attention_blockwise.py` copies queries, keys and values into the layout of its matmuls,
and processes blocks operation by operation. The C file multiplies directly from [batch, seq, heads,
head_dim], one block of a head at a time, and the block stays in the cache of its core.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from panax.kernels.attention.blockwise import AttentionPasses, Scores
from panax.kernels.attention.layout import ScoreBlocks
from panax.kernels.cpu.native import KERNELS, call_native
from panax.kernels.cpu.products import native_limit
from panax.kernels.registry import Kernel, register


def native_forward(
    name: str,
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    query_segments: Int[Array, "batch query_seq"] | None,
    key_segments: Int[Array, "batch key_seq"] | None,
    *,
    scores: Scores,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike,
) -> tuple[Float[Array, "batch query_seq heads head_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute the output and the logarithm of each query's softmax sum, like `flash_forward`."""
    results = (jax.ShapeDtypeStruct(q.shape, result_dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    call = call_native("panax_attention_forward", results)
    out, logsumexp = call(q, k, v, *_both(query_segments, key_segments), **_attributes(name, scores, blocks))
    return out, logsumexp


def native_backward(
    name: str,
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    query_segments: Int[Array, "batch query_seq"] | None,
    key_segments: Int[Array, "batch key_seq"] | None,
    logsumexp: Float[Array, "batch query_seq heads"],
    delta: Float[Array, "batch query_seq heads"],
    d_out: Float[Array, "batch query_seq heads head_dim"],
    *,
    scores: Scores,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    """Compute the cotangents of q, k and v, like `flash_backward`."""
    call = call_native(
        "panax_attention_backward", tuple(jax.ShapeDtypeStruct(x.shape, result_dtype) for x in (q, k, v))
    )
    arrays = (q, k, v, d_out, logsumexp, delta, *_both(query_segments, key_segments))
    d_q, d_k, d_v = call(*arrays, **_attributes(name, scores, blocks))
    return d_q, d_k, d_v


def _both(query: Array | None, key: Array | None) -> tuple[Array, ...]:
    return () if query is None or key is None else (query, key)


def _attributes(name: str, scores: Scores, blocks: ScoreBlocks) -> dict[str, Any]:
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
