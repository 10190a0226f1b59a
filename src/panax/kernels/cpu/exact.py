"""Kernels on CPU that compute a row from that row alone, bit by bit: not from the number of rows, their neighbors, or the
shape of the program. Named "exact", for every kind of work that they do.

A program that trains and one that generates compute equal bits with these, in spite of their different shapes.
The C files' products sum over k in one order for each element; attention visits keys in blocks that begin at the
first key of a document; norms and softmax sums have one order for each length.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from panax.core.errors import RecipeError
from panax.core.layout.target import Target
from panax.kernels.attention.blockwise import AttentionPasses
from panax.kernels.attention.key_cache import CachedKeys
from panax.kernels.attention.layout import ScoreBlocks
from panax.kernels.attention.operands import AttentionOperands, ScoreRule
from panax.kernels.cpu.attention import native_backward
from panax.kernels.cpu.choice import DTYPES, KERNELS_VARIABLE, XLA
from panax.kernels.cpu.grouped_matmul import native_grouped_outer, native_grouped_product
from panax.kernels.cpu.native import OWN, call_native, unavailable_reason
from panax.kernels.cpu.products import native_product
from panax.kernels.grouped.grouped_matmul import GroupedMatmul
from panax.kernels.registry import EXACT, Kernel, register
from panax.kernels.row_functions import NormParameters, NormRule, normalize_by_xla

KEY_BLOCK = 512
"""Keys of a block of attention. Another number gives other bits."""


def limit(case: Any, target: Target) -> str | None:
    """Return why the kernels do not support a case, or None."""
    if case.dtype not in DTYPES:
        return f"operands must be {' or '.join(DTYPES)}"
    if not case.local:
        return "it is a custom call, which XLA can't split over devices"
    return unavailable_reason(OWN, case.dtype)


def _avoid(case: Any, target: Target) -> str | None:
    name = os.environ.get(KERNELS_VARIABLE)
    return f"{KERNELS_VARIABLE}={name}" if name == XLA else None


def _score_attributes(scores: ScoreRule) -> dict[str, Any]:
    return {
        "key_block": np.int32(KEY_BLOCK),
        "window": np.int32(scores.mask.window or 0),
        "scale": np.float32(scores.scale),
        "soft_cap": np.float32(scores.soft_cap or 0.0),
    }


def _attention_results(q: jax.Array, dtype: DTypeLike) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)


def row_attention(
    operands: AttentionOperands, *, scores: ScoreRule, blocks: ScoreBlocks, result_dtype: DTypeLike
) -> tuple[Array, Array]:
    """Compute `flash_forward` for causal attention within rows; equal segments must be adjacent."""
    q, k, v, segments, _ = operands
    if not scores.mask.causal or scores.mask.offset or q.shape[1] != k.shape[1]:
        raise RecipeError(
            "kernels.exact_policy has no kernels for attention that is not causal, or over rows that are split over devices; "
            "remove it for this model or mesh"
        )
    call = call_native("panax_row_attention", _attention_results(q, result_dtype))
    packed = () if segments is None else (segments.astype(jnp.int32),)
    out, logsumexp = call(q, k, v, *packed, **_score_attributes(scores))
    return out, logsumexp


def native_cached_attention(
    q: jax.Array, cache: CachedKeys, scores: ScoreRule, result_dtype: DTypeLike
) -> tuple[Array, Array]:
    """Compute the output and the logarithm of each query's softmax sum."""
    call = call_native("panax_cached_attention", _attention_results(q, result_dtype))
    out, logsumexp = call(q, cache.k, cache.v, cache.start.astype(jnp.int32), **_score_attributes(scores))
    return out, logsumexp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def native_norm(x: jax.Array, parameters: NormParameters, rule: NormRule) -> jax.Array:
    """Compute `normalize_rows`."""
    attributes = {
        "centered": np.int32(rule.centered),
        "scaled": np.int32(parameters.scale is not None),
        "biased": np.int32(parameters.bias is not None),
        "epsilon": np.float32(rule.epsilon),
        "gain": np.float32(rule.gain),
    }
    call = call_native("panax_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, *[each.astype(jnp.float32) for each in parameters if each is not None], **attributes)


def _norm_forward(x: jax.Array, parameters: NormParameters, rule: NormRule) -> tuple[jax.Array, Any]:
    return native_norm(x, parameters, rule), (x, parameters)


def _norm_backward(rule: NormRule, saved: Any, cotangent: jax.Array) -> Any:
    return jax.vjp(functools.partial(normalize_by_xla, rule=rule), *saved)[1](cotangent)


native_norm.defvjp(_norm_forward, _norm_backward)


def native_logsumexp(logits: jax.Array, size: int) -> jax.Array:
    """Return the logarithm of the sum of the exponentials of each row's first `size` numbers."""
    call = call_native("panax_logsumexp", jax.ShapeDtypeStruct(logits.shape[:-1], jnp.float32))
    return call(logits, size=np.int32(size))


@jax.custom_vjp
def native_softmax(logits: jax.Array) -> jax.Array:
    """Compute the softmax of each row."""
    return call_native("panax_softmax", jax.ShapeDtypeStruct(logits.shape, jnp.float32))(logits)


def _softmax_backward(probability: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (probability * (cotangent - (cotangent * probability).sum(axis=-1, keepdims=True)),)


native_softmax.defvjp(lambda logits: (native_softmax(logits),) * 2, _softmax_backward)


@jax.custom_vjp
def _materialize(x: jax.Array) -> jax.Array:
    return call_native("panax_wall", jax.ShapeDtypeStruct(x.shape, x.dtype), {0: 0})(x)


_materialize.defvjp(lambda x: (_materialize(x), None), lambda _, cotangent: (cotangent,))


_kernel = functools.partial(Kernel, name=EXACT, platforms=("cpu",), limit=limit, rank=-10, strict=True)
_passes = AttentionPasses(row_attention, functools.partial(native_backward, OWN))
_grouped = GroupedMatmul(functools.partial(native_grouped_product, OWN), functools.partial(native_grouped_outer, OWN))

register(_kernel(work="matmul", run=functools.partial(native_product, OWN)))
register(_kernel(work="partial attention", run=_passes))
register(_kernel(work="grouped matmul", run=_grouped))
register(_kernel(work="norm", run=native_norm))
register(_kernel(work="softmax", run=native_softmax))
register(_kernel(work="logsumexp", run=native_logsumexp))
register(_kernel(work="materialize", run=_materialize))
# It reads each key up to a row's own length once, where XLA multiplies with the whole cache: the fastest on every processor.
register(_kernel(work="cached attention", run=native_cached_attention, rank=20, avoid=_avoid))
