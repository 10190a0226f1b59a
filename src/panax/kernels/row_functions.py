"""Functions of rows, with a kernel chosen by the target: norms, and the logarithm of a softmax's sum."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from panax.core.layout.layout import current_target
from panax.kernels.product import MatmulCase
from panax.kernels.registry import Kernel, choose, register


class NormParameters(NamedTuple):
    """Scale and bias of a norm in float32; None for one without."""

    scale: Float[Array, " norm"] | None
    bias: Float[Array, " norm"] | None


@dataclasses.dataclass(frozen=True)
class NormRule:
    """How rows are normalized.

    Attributes:
        centered: True to subtract the mean first.
        gain: Factor of the result, before it is rounded.
    """

    centered: bool
    epsilon: float
    gain: float = 1.0


def normalize_rows(
    x: Float[Array, "*rest norm"], parameters: NormParameters, rule: NormRule
) -> Float[Array, "*rest norm"]:
    """Normalize the last axis to mean squares of 1, in float32."""
    kernel = choose("norm", MatmulCase.of(x.size, x), current_target()).kernel
    return kernel.run(x, parameters, rule)


def normalize_by_xla(x: jax.Array, parameters: NormParameters, rule: NormRule) -> jax.Array:
    """Compute `normalize_rows` by operations of XLA."""
    y = x.astype(jnp.float32)
    if rule.centered:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + rule.epsilon)
    ones = (1,) * (x.ndim - 1)
    if parameters.scale is not None:
        y = y * parameters.scale.reshape(*ones, -1)
    if parameters.bias is not None:
        y = y + parameters.bias.reshape(*ones, -1)
    return (y if rule.gain == 1.0 else y * rule.gain).astype(x.dtype)


def log_softmax(logits: Float[Array, "*rest vocab"]) -> Float[Array, "*rest vocab"]:
    """Return the logarithm of the softmax over the last axis."""
    kernel = choose("logsumexp", MatmulCase.of(logits.size, logits), current_target()).kernel
    if kernel.run is None:
        return jax.nn.log_softmax(logits, axis=-1)
    return logits - kernel.run(logits, logits.shape[-1])[..., None]


def softmax(logits: Float[Array, "*rest choice"]) -> Float[Array, "*rest choice"]:
    """Return the softmax over the last axis."""
    return choose("softmax", MatmulCase.of(logits.size, logits), current_target()).kernel.run(logits)


def named_logsumexp(logits: Float[Array, "*rest vocab"], size: int) -> Float[Array, "*rest"] | None:
    """Return the logarithm of the sum of the exponentials of each row's first `size` numbers; None if no kernel is named for
    it."""
    kernel = choose("logsumexp", MatmulCase.of(logits.size, logits), current_target()).kernel
    return None if kernel.run is None else kernel.run(logits, size)


register(Kernel(work="norm", name="xla", run=normalize_by_xla, rank=10))
register(Kernel(work="softmax", name="xla", run=jax.nn.softmax, rank=10))
register(Kernel(work="logsumexp", name="xla", run=None, rank=10))
