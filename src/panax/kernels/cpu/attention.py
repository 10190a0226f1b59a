"""Flash attention on CPU by `csrc/attention.c`, where a kernel was chosen whose products it is made of.

What XLA makes of `attention_blockwise.py` copies queries, keys and values into the layout of its products, and walks blocks one
operation after the other. The C file multiplies straight from [batch, seq, heads, head_dim], a head's block at a time, and keeps
the block in the cache of the core that works on it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from panax.kernels.attention_layout import Blocks
from panax.kernels.attention_mask import MaskRule
from panax.kernels.cpu.native import KERNELS, native
from panax.kernels.cpu.products import handed_over


def kernel_that_attends(blocks: Blocks, *operands: Array | None) -> str | None:
    """Whose products attention of these is made of by the C file: for CPU, and large enough to be worth a call; None for XLA."""
    given = [x for x in operands if x is not None]
    (batch, query_seq, heads, head_dim), key_seq = given[0].shape, given[1].shape[1]
    if blocks.target is None or blocks.target.platform != "cpu":
        return None
    return handed_over("attention", batch * heads * query_seq * key_seq * head_dim, *given)


def native_forward(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    segments: tuple[Int[Array, "batch query_seq"], Int[Array, "batch key_seq"]] | None,
    *,
    mask: MaskRule,
    scale: float,
    soft_cap: float | None,
    blocks: Blocks,
    result_dtype: Any,
    kernel: str,
) -> tuple[Float[Array, "batch query_seq heads head_dim"], Float[Array, "batch query_seq heads"]]:
    """The output and the logarithm of each query's softmax sum, as `flash_forward`."""
    results = (jax.ShapeDtypeStruct(q.shape, result_dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    out, logsumexp = native("panax_attention_forward", results)(
        q, k, v, *(segments or ()), **_attributes(mask, scale, soft_cap, blocks, kernel)
    )
    return out, logsumexp


def native_backward(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    d_out: Float[Array, "batch query_seq heads head_dim"],
    logsumexp: Float[Array, "batch query_seq heads"],
    delta: Float[Array, "batch query_seq heads"],
    segments: tuple[Int[Array, "batch query_seq"], Int[Array, "batch key_seq"]] | None,
    *,
    mask: MaskRule,
    scale: float,
    soft_cap: float | None,
    blocks: Blocks,
    result_dtype: Any,
    kernel: str,
) -> tuple[Array, Array, Array]:
    """The cotangents of q, k and v, as `flash_backward`."""
    results = tuple(jax.ShapeDtypeStruct(x.shape, result_dtype) for x in (q, k, v))
    d_q, d_k, d_v = native("panax_attention_backward", results)(
        q, k, v, d_out, logsumexp, delta, *(segments or ()), **_attributes(mask, scale, soft_cap, blocks, kernel)
    )
    return d_q, d_k, d_v


def _attributes(mask: MaskRule, scale: float, soft_cap: float | None, blocks: Blocks, kernel: str) -> dict[str, Any]:
    # No window and no cap are 0: both are positive where they are given.
    whole = {
        "query_block": blocks.query,
        "key_block": blocks.key,
        "causal": mask.causal,
        "window": mask.window or 0,
        "offset": mask.offset,
        "kernel": KERNELS.index(kernel),
    }
    return {
        **{name: np.int32(value) for name, value in whole.items()},
        "scale": np.float32(scale),
        "soft_cap": np.float32(soft_cap or 0.0),
    }
