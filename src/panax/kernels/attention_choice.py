"""Which implementation of attention a target gets, and why: a pure function of the static case.

Nothing here looks at the attached device, so that a program compiled ahead of time for another machine gets that
machine's kernels.
"""

import ctypes.util
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from panax.core.errors import nearest
from panax.core.target import Target

logger = logging.getLogger("panax.kernels")

Implementation = Literal["auto", "reference", "blockwise", "cudnn", "pallas"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """All of a call to `attention` that is known before it runs.

    Attributes:
        dtype: The name of the dtype of q, k and v.
        packed: Whether there are segments.
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


class Choice(NamedTuple):
    """An implementation's name, and why it and none that is faster."""

    name: str
    reason: str


@functools.cache
def cudnn_is_installed() -> bool:
    """Whether programs with cuDNN calls can be built here: JAX asks its CUDA plugin for the version of cuDNN."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    wheel = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    return plugin and (wheel or ctypes.util.find_library("cudnn") is not None)


def choose_attention(case: AttentionCase, target: Target, *, cudnn_installed: bool | None = None) -> Choice:
    """The fastest implementation that can do the case on the target platform.

    Args:
        cudnn_installed: Whether a program for cuDNN can be built, by default whether it can be on this machine.
    """
    if target.platform == "cpu":
        return Choice("blockwise", "the fastest on the CPU at every length")
    installed = cudnn_is_installed() if cudnn_installed is None else cudnn_installed
    why_not = []
    for name in _FASTEST_FIRST.get(target.platform, ()):
        limit = limit_of(name, case, target, cudnn_installed=installed)
        if limit is None:
            return Choice(name, "; ".join(why_not) or f"the fastest on {target}")
        why_not.append(f"{name} can't run here: {limit}")
    return Choice("blockwise", "; ".join(why_not))


def limit_of(name: str, case: AttentionCase, target: Target, *, cudnn_installed: bool | None = None) -> str | None:
    """What keeps an implementation from doing the case on the platform, or None if nothing does."""
    if name not in get_args(Implementation) or name == "auto":
        raise ValueError(f"implementation={name!r}: {nearest(name, get_args(Implementation))}")
    if name == "cudnn":
        if target.platform != "gpu":
            return f"it is for GPUs, and the target is {target}"
        installed = cudnn_is_installed() if cudnn_installed is None else cudnn_installed
        return _first(_CUDNN_LIMITS, case) or (
            None if installed else "JAX's CUDA plugin or cuDNN is not installed here"
        )
    if name == "pallas":
        if target.platform == "cpu":
            return "it is for GPUs and TPUs, and the target is cpu"
        return _first(_PALLAS_GPU_LIMITS if target.platform == "gpu" else _PALLAS_TPU_LIMITS, case)
    return None


@functools.cache
def say_once(target: Target, choice: Choice) -> None:
    """Log that a target runs something else than its fastest kernel, once per distinct reason."""
    if target.platform == "cpu" or choice.name == _FASTEST_FIRST[target.platform][0]:
        return
    level = logging.WARNING if choice.name == "blockwise" else logging.INFO
    logger.log(level, "attention on %s runs %r: %s", target, choice.name, choice.reason)


_FASTEST_FIRST = {"gpu": ("cudnn", "pallas"), "tpu": ("pallas",)}

_Limits = tuple[tuple[Callable[[AttentionCase], bool], str], ...]

# The limits of `jax.nn.dot_product_attention(implementation="cudnn")` in jax 0.10.2, as the least capable GPU has them
# (Hopper also does head dimensions to 256), since the attached GPU, if any, is not necessarily the target.
_CUDNN_LIMITS: _Limits = (
    (lambda case: case.dtype not in ("bfloat16", "float16"), "q, k and v must be bfloat16 or float16"),
    (lambda case: case.head_dim % 8 != 0 or case.head_dim > 128, "head_dim must be a multiple of 8 up to 128"),
    (lambda case: case.query_seq % 2 != 0 or case.key_seq % 2 != 0, "lengths must be even for its backward pass"),
    (lambda case: case.packed, "it has no packed segments without a quadratic mask"),
    (lambda case: case.soft_cap is not None, "it has no soft_cap"),
    (lambda case: case.window is not None and not case.causal, "its window must be causal"),
    (lambda case: case.causal and case.query_seq != case.key_seq, "a causal mask needs equal lengths of q and k"),
)
_PALLAS_GPU_LIMITS: _Limits = (
    (lambda case: case.dtype not in ("bfloat16", "float16", "float32"), "q, k and v must have 16 or 32 bits"),
    (lambda case: case.head_dim > 256, "head_dim must be at most 256"),
)
_PALLAS_TPU_LIMITS: _Limits = (
    (lambda case: case.dtype not in ("bfloat16", "float32"), "q, k and v must be bfloat16 or float32"),
    (lambda case: case.head_dim > 256, "head_dim must be at most 256"),
)


def _first(limits: _Limits, case: AttentionCase) -> str | None:
    return next((text for broken, text in limits if broken(case)), None)
