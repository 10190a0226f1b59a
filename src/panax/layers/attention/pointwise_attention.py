"""HSTU layer: attention with independent SiLU weights instead of a softmax, so that the magnitude of the
history is preserved."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Module, constant, normal, parameter, scope
from ...kernels.precision import accumulation_dtype
from ...spmd import contract, contract_gathered, gather
from ..block import Block, Context, Positions
from ..feed_forward import ACTIVATIONS
from ..norm import Norm
from ..transformer import add_residual

TIME_BUCKETS = 129
"""Number of logarithmic buckets (base e ** 0.301) of the seconds between two events; the last one holds all
longer times."""


class RelativeBias(Module):
    """Score biases by the distance of two events: in positions, and in time if times are known."""

    places: Float[Array, " position"] = parameter(normal(std=0.02))
    times: Float[Array, " bucket"] = parameter(normal(std=0.02))

    def __call__(
        self, seq: int, times: Int[Array, "batch seq"] | None, target_times: Int[Array, "batch seq"] | None = None
    ) -> Float[Array, "rows seq seq"]:
        """Compute the bias of each (query, key) pair; `rows` is 1 without times, otherwise the batch size.

        Keys after the query get the bias of distance 0.
        """
        distance = jnp.maximum(jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :], 0)
        bias = gather(self.places, "position", jnp.float32)[distance][None]
        if times is None:
            return bias
        return bias + gather(self.times, "bucket", jnp.float32)[time_buckets(times, target_times)]


def time_buckets(
    times: Int[Array, "batch seq"], target_times: Int[Array, "batch seq"] | None = None
) -> Int[Array, "batch seq seq"]:
    """Return the bucket of the time between each event (last axis) and the event that each query predicts, or
    the query's own event.

    The rule is the same for all positions: at the end of a row or in padding, the next position is not the
    next event.

    Args:
        target_times: Time of each query's target; None if unknown, in which case the query's own time is
            used.

    >>> time_buckets(jnp.array([[0, 10]]))[0].tolist()
    [[0, 7], [7, 0]]
    """
    following = times if target_times is None else target_times
    seconds = jnp.maximum(jnp.abs(following[:, :, None] - times[:, None, :]), 1).astype(jnp.float32)
    return jnp.clip(jnp.log(seconds) / 0.301, 0, TIME_BUCKETS - 1).astype(jnp.int32)


class PointwiseAttention(Block):
    """`x + W_o (norm(A V) * U)`, with `A = SiLU(Q Kᵀ + bias) / length` and U, V, Q, K each `SiLU(W norm(x))`.

    `length` is the maximum row length.

    Differs from the paper: the attention output is normalized per head, so that heads can be sharded.

    Source: Actions Speak Louder than Words (arXiv:2402.17152), section 3.
    """

    positions: ClassVar[Positions | None] = "shards"

    norm: Norm
    bias: RelativeBias
    w_q: Float[Array, "embed heads head_dim"] = parameter(normal("embed"))
    w_k: Float[Array, "embed heads head_dim"] = parameter(normal("embed"))
    w_v: Float[Array, "embed heads value_dim"] = parameter(normal("embed"))
    w_u: Float[Array, "embed heads value_dim"] = parameter(normal("embed"))
    w_o: Float[Array, "heads value_dim embed"] = parameter(normal("heads", "value_dim"))
    epsilon: float = eqx.field(static=True, default=1e-6)
    dropout: float = eqx.field(static=True, default=0.0)
    length: int = eqx.field(static=True, default=1)

    @classmethod
    def build(
        cls, key: jax.Array, embed: int, heads: int, head_dim: int, max_length: int, *, norm: Any, epsilon: float,
        dropout: float, output_gain: float,
    ) -> "PointwiseAttention":  # fmt: skip
        """Initialize a layer.

        Args:
            norm: Builds the norm of the layer's input from a key and a size.
            epsilon: Added to the variance of a head's attention output. If a single score determines the
                output, as at the first position, the score's sign flips the vector, more abruptly the smaller
                epsilon is.
        """
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim, "value_dim": head_dim}
        bias = RelativeBias.create(
            jax.random.fold_in(key, 1),
            {"position": max_length, "bucket": TIME_BUCKETS},
            places=constant(0.0),
            times=constant(0.0),
        )
        w_o = normal("heads", "value_dim", gain=output_gain)
        return cls.create(
            key, sizes, norm=norm(key, embed), bias=bias, epsilon=epsilon, dropout=dropout, length=max_length, w_o=w_o
        )

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, state: Any = None
    ) -> tuple[Float[Array, "batch residual embed"], None]:
        act = ACTIVATIONS["silu"]
        with scope("attention"):
            projections = (
                ("batch seq embed, embed heads head_dim -> batch seq heads head_dim", self.w_q),
                ("batch seq embed, embed heads head_dim -> batch seq heads head_dim", self.w_k),
                ("batch seq embed, embed heads value_dim -> batch seq heads value_dim", self.w_v),
                ("batch seq embed, embed heads value_dim -> batch seq heads value_dim", self.w_u),
            )
            q, k, v, u = (act(y) for y in contract_gathered(self.norm(x), *projections))
            bias = self.bias(q.shape[1], context.times, context.target_times)
            attended = attend_pointwise(q, k, v, bias, self.length)
            gated = _normalized(attended, self.epsilon) * u
            out = contract("batch seq heads value_dim, heads value_dim embed -> batch seq embed", gated, self.w_o)
            return add_residual(x, out, self.dropout, context, 0), None

    def flops(self, length: int) -> float:
        heads, head_dim = self.w_q.shape[-2:]
        weights = sum(math.prod(w.shape) for w in (self.w_q, self.w_k, self.w_v, self.w_u, self.w_o))
        # All pairs are computed; the mask only zeroes those after the query.
        return 2.0 * (weights + 2 * heads * head_dim * length)


def attend_pointwise(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq heads head_dim"],
    v: Float[Array, "batch seq heads value_dim"],
    bias: Float[Array, "rows seq seq"],
    length: int,
) -> Float[Array, "batch seq heads value_dim"]:
    """Compute causal attention with weights `SiLU(q·k + bias) / length`, which do not sum to one.

    Args:
        length: Maximum row length: a constant of the model, since a row's own length includes padding.
    """
    seq, wide = q.shape[1], accumulation_dtype(q.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide) + bias[:, None].astype(wide)
    causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
    weights = jnp.where(causal, jax.nn.silu(scores) / length, 0.0).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, preferred_element_type=wide).astype(v.dtype)


def _normalized(x: jax.Array, epsilon: float) -> jax.Array:
    """Normalize each head's vector to mean 0 and variance 1."""
    y = x.astype(jnp.float32)
    y = y - y.mean(axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + epsilon)).astype(x.dtype)
