"""Attention over rows sharded along a context axis: the kernels for "context attention", and the choice
between them."""

import dataclasses
import functools
from typing import Literal

from jaxtyping import Array, Float, Int

from panax.core.layout.layout import current_target
from panax.core.layout.target import Target
from panax.kernels.attention.attention import AttentionOptions, attention
from panax.kernels.registry import Kernel, choose, log_choice, register
from panax.parallel.context import ContextAxis
from panax.parallel.ring import ring_attention
from panax.parallel.ulysses import heads_limit, ulysses_attention

ContextAttention = Literal["auto", "ring", "ulysses"]
"""Attention algorithm for sequences sharded over devices; see `choose_context_attention`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCase:
    """The inputs of the choice of algorithm.

    Attributes:
        heads: Query heads on a device, before any exchange.
        kv_heads: Key-value heads on a device, before any exchange.
        axis_size: Number of devices along the context axis.
    """

    heads: int
    kv_heads: int
    axis_size: int


def choose_context_attention(heads: int, kv_heads: int, axis_size: int, requested: ContextAttention = "auto") -> str:
    """Return the name of the kernel for a layer; "auto" chooses Ulysses if it runs without repeating
    key-value heads.

    Ulysses uses the fast kernels, and each device sends (heads / kv_heads + 1) / (2 * axis_size) times the
    bytes of a ring, forward and backward in bfloat16: fewer, except for many query heads per group on a short
    axis. A ring overlaps its communication with its matmuls, and runs at any axis size.

    Args:
        heads: Query heads on this device, before any exchange.
        kv_heads: Key-value heads on this device, before any exchange.

    Raises:
        ValueError: Ulysses is requested, but `axis_size` does not divide the heads.

    >>> choose_context_attention(32, 8, 4), choose_context_attention(32, 8, 16)
    ('ulysses', 'ring')
    """
    case = ContextCase(heads=heads, kv_heads=kv_heads, axis_size=axis_size)
    return choose("context attention", case, _ANY, named=requested).name


def context_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    requested: ContextAttention,
    options: AttentionOptions,
    *,
    axis: ContextAxis,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute softmax attention over whole rows for the current target; this device holds the part of each row
    given by the axis's order.

    Args:
        requested: Requested algorithm, as in `choose_context_attention`.
    """
    case, target = ContextCase(heads=q.shape[2], kv_heads=k.shape[2], axis_size=axis.size), current_target()
    run = log_choice(choose("context attention", case, target, named=requested), target).kernel.run
    return run(q, k, v, segments, axis=axis, options=options, target=target)


def _ulysses(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    *,
    axis: ContextAxis,
    options: AttentionOptions,
    target: Target,
) -> Array:
    static = options._asdict()
    sinks = static.pop("sinks")
    kernel = functools.partial(attention, target=target, **static)
    return ulysses_attention(q, k, v, segments, axis=axis, sinks=sinks, kernel=kernel)


def _limit(case: ContextCase, target: Target) -> str | None:
    return heads_limit(case.heads, case.axis_size)


def _avoid(case: ContextCase, target: Target) -> str | None:
    fits = case.kv_heads % case.axis_size == 0
    return None if fits else f"it would repeat key-value heads: {case.kv_heads} over context={case.axis_size}"


_ANY = Target("any")
"""A placeholder: neither kernel depends on the target."""

register(Kernel(work="context attention", name="ulysses", run=_ulysses, rank=20, limit=_limit, avoid=_avoid))
register(Kernel(work="context attention", name="ring", run=ring_attention, rank=10))
