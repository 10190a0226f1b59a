"""Static case that the choice of an attention kernel depends on, and the limits of each kernel.

Limits are functions of the static case and the target; the attached device is not considered.
"""

import ctypes.util
import dataclasses
import functools
import importlib.util
from collections.abc import Callable

from panax.core.layout.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Static properties of a call to `attention`.

    Attributes:
        dtype: The name of the dtype of q, k and v.
        packed: True if there are segments.
        sinks: True if each head has a sink.
    """

    batch: int
    query_seq: int
    key_seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    window: int | None
    soft_cap: float | None
    packed: bool
    sinks: bool = False


@functools.cache
def cudnn_missing() -> str | None:
    """Return the missing requirement for building programs with cuDNN calls, or None: JAX asks its CUDA
    plugin for the version of cuDNN."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    wheel = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    if plugin and (wheel or ctypes.util.find_library("cudnn") is not None):
        return None
    return "JAX's CUDA plugin or cuDNN is not installed here"


_Limits = tuple[tuple[Callable[[AttentionCase], bool], str], ...]

# The limits of `jax.nn.dot_product_attention(implementation="cudnn")` in jax 0.10.2, for the least capable
# GPU (Hopper also supports head dimensions up to 256).
_CUDNN: _Limits = (
    (lambda case: case.dtype not in ("bfloat16", "float16"), "q, k and v must be bfloat16 or float16"),
    (lambda case: case.head_dim % 8 != 0 or case.head_dim > 128, "head_dim must be a multiple of 8 up to 128"),
    (lambda case: case.query_seq % 2 != 0 or case.key_seq % 2 != 0, "lengths must be even for its backward pass"),
    (lambda case: case.packed, "it has no packed segments without a quadratic mask"),
    (lambda case: case.soft_cap is not None, "it has no soft_cap"),
    (lambda case: case.sinks, "it has no sinks"),
    (lambda case: case.window is not None and not case.causal, "its window must be causal"),
    (lambda case: case.causal and case.query_seq != case.key_seq, "a causal mask needs equal lengths of q and k"),
)
_TRITON: _Limits = (
    (lambda case: case.dtype not in ("bfloat16", "float16", "float32"), "q, k and v must have 16 or 32 bits"),
    (lambda case: case.head_dim > 256, "head_dim must be at most 256"),
)
_MOSAIC: _Limits = (
    (lambda case: case.dtype not in ("bfloat16", "float32"), "q, k and v must be bfloat16 or float32"),
    (lambda case: case.head_dim > 256, "head_dim must be at most 256"),
)


def cudnn_limit(case: AttentionCase, target: Target) -> str | None:
    return _first(_CUDNN, case) if target.vendor == "nvidia" else f"it is for NVIDIA's GPUs, not for {target.vendor}'s"


def triton_limit(case: AttentionCase, target: Target) -> str | None:
    return _first(_TRITON, case)


def mosaic_limit(case: AttentionCase, target: Target) -> str | None:
    return _first(_MOSAIC, case)


def _first(limits: _Limits, case: AttentionCase) -> str | None:
    return next((text for broken, text in limits if broken(case)), None)
