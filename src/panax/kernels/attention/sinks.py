"""Attention sinks: one learned score for each head, which takes its share of every softmax and has no value.

A kernel needs no code for them. With the logarithm l of a query's softmax sum and the sink s, the sum becomes
exp(l) + exp(s), so that the output shrinks by exp(l) / (exp(l) + exp(s)), and the backward pass is that of a
softmax with the new sum. The gradient of a sink is that of a key with a value of zero.

Source: gpt-oss (arXiv:2508.10925), section 2.2; StreamingLLM (arXiv:2309.17453), section 3.3.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_sinks(
    out: Float[Array, "batch query_seq heads head_dim"],
    logsumexp: Float[Array, "batch query_seq heads"],
    sinks: Float[Array, " heads"] | None,
) -> tuple[Float[Array, "batch query_seq heads head_dim"], Float[Array, "batch query_seq heads"]]:
    """Add the sinks to the softmax sums of attention that was computed without them; None changes nothing.

    Args:
        out: Best in float32: it is multiplied by a factor.
        logsumexp: Natural logarithm of each query's sum; -1e30 if it sees no key, then the output stays zero.
    """
    if sinks is None:
        return out, logsumexp
    total = jnp.logaddexp(logsumexp, sinks.astype(logsumexp.dtype)[None, None])
    return out * jnp.exp(logsumexp - total)[..., None].astype(out.dtype), total


def sink_gradient(
    sinks: Float[Array, " heads"] | None,
    logsumexp: Float[Array, "batch query_seq heads"],
    delta: Float[Array, "batch query_seq heads"],
) -> Float[Array, " heads"] | None:
    """Return the cotangent of the sinks, summed over queries.

    Args:
        logsumexp: Of the sums that include the sinks.
        delta: From `output_delta`, of the output with sinks.
    """
    if sinks is None:
        return None
    share = jnp.exp(sinks.astype(logsumexp.dtype)[None, None] - logsumexp)
    return -(share * delta).sum(axis=(0, 1)).astype(sinks.dtype)
