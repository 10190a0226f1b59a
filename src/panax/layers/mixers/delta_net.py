"""Gated delta net: short convolutions and the gated delta rule, in place of attention (Qwen3-Next, Qwen3.5)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...core import Module, constant, current_layout, current_target, normal, parameter
from ...core.layout.layout import MeshAxes, axis_size
from ...kernels.causal_convolution import causal_convolution
from ...kernels.delta_rule.delta_rule import DeltaInputs, delta_rule
from ...kernels.registry import refuse_exact
from ...parallel.delta_passing import delta_rule_over_devices
from ...spmd import (
    ValueState,
    add_bias,
    assert_cotangent_sharding,
    assert_sharding,
    contract,
    contract_gathered,
    gather,
)
from ..attention.shared_heads import local_shared_heads
from .initial_values import first_step, quantiles
from .row_edges import CONTEXT, edges_before, last_inputs

KEYS, VALUES = "delta_key_heads delta_key_dim", "delta_heads delta_value_dim"

KEY_EPSILON = 1e-6
"""Added to the squared length of a query or key before they are divided by it."""


class DeltaNetCache(NamedTuple):
    """State of a delta-net layer for generation, of constant size.

    Attributes:
        q: The convolution's last inputs, one fewer than its taps; the same for `k` and `v`.
        state: float32.
    """

    q: Float[Array, "batch tail delta_key_heads delta_key_dim"]
    k: Float[Array, "batch tail delta_key_heads delta_key_dim"]
    v: Float[Array, "batch tail delta_heads delta_value_dim"]
    state: Float[Array, "batch delta_heads delta_key_dim delta_value_dim"]


class _Projected(NamedTuple):
    """Projections of each position.

    Attributes:
        gate: Gate of the output.
        log_decay: float32.
        beta: float32.
        inputs: Those of the convolutions: queries, keys and values.
    """

    gate: Array
    log_decay: Array
    beta: Array
    inputs: tuple[Array, Array, Array]


class DeltaNet(Module):
    """Delta-net mixer: project to queries, keys, values, a decay, a beta and a gate; convolve the first three; apply
    the delta rule with queries and keys of unit length; normalize each value head, gate, project back.

    It is sharded by value heads, and by key heads if they divide. Rows sharded over the context axis must be in
    contiguous order: a task with such a layer sets `row_order = "contiguous"`.

    Source: Gated Delta Networks (arXiv:2412.06464), section 3.4. Differs: as in Qwen3-Next, value heads share key
    heads, and queries are scaled; one matrix per result, so that each is sharded by its heads.
    """

    epsilon: float = eqx.field(static=True)
    w_q: Float[Array, "embed delta_key_heads delta_key_dim"] = parameter(normal("embed"))
    w_k: Float[Array, "embed delta_key_heads delta_key_dim"] = parameter(normal("embed"))
    w_v: Float[Array, "embed delta_heads delta_value_dim"] = parameter(normal("embed"))
    w_z: Float[Array, "embed delta_heads delta_value_dim"] = parameter(normal("embed"))
    w_beta: Float[Array, "embed delta_heads"] = parameter(normal("embed"))
    w_dt: Float[Array, "embed delta_heads"] = parameter(normal("embed"))
    # The variance of PyTorch's uniform initialization between -1 / sqrt(taps) and 1 / sqrt(taps).
    conv_q: Float[Array, "delta_key_heads delta_key_dim tap"] = parameter(normal("tap", gain=3**-0.5))
    conv_k: Float[Array, "delta_key_heads delta_key_dim tap"] = parameter(normal("tap", gain=3**-0.5))
    conv_v: Float[Array, "delta_heads delta_value_dim tap"] = parameter(normal("tap", gain=3**-0.5))
    dt_bias: Float[Array, " delta_heads"] = parameter(quantiles(first_step))
    a_log: Float[Array, " delta_heads"] = parameter(quantiles(lambda share: math.log(16.0 * share)))
    scale: Float[Array, " delta_value_dim"] = parameter(constant(1.0))
    w_o: Float[Array, "delta_heads delta_value_dim embed"] = parameter(normal("delta_heads", "delta_value_dim"))

    @classmethod
    def build(
        cls,
        key: jax.Array,
        embed: int,
        *,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        taps: int = 4,
        epsilon: float = 1e-6,
        output_gain: float = 1.0,
    ) -> "DeltaNet":
        """Initialize a layer of `heads * value_dim` inner features."""
        sizes = {"embed": embed, "delta_key_heads": key_heads, "delta_key_dim": key_dim, "tap": taps}
        sizes |= {"delta_heads": heads, "delta_value_dim": value_dim}
        output = normal("delta_heads", "delta_value_dim", gain=output_gain)
        return cls.create(key, sizes, epsilon=epsilon, w_o=output)

    def __call__(
        self,
        x: Float[Array, "batch residual embed"],
        position: Int[Array, "batch seq"],
        segment: Int[Array, "batch seq"] | None,
    ) -> Float[Array, "batch residual embed"]:
        """Mix the positions of each row, within equal segments if given (0 is padding).

        Args:
            position: Unused: a recurrence is inherently ordered.
        """
        projected = self._project(x)
        before, segment_before = edges_before(projected.inputs, segment, self.conv_q.shape[-1] - 1)
        q, k, v = self._convolved(projected.inputs, before, segment, segment_before)
        return self._output(_recurred(q, k, v, projected, segment), projected.gate)

    @property
    def flops(self) -> float:
        """FLOPs of one layer's forward matmuls per position: matrices, convolution taps, and the recurrence itself.

        The recurrence multiplies each head's state by a key and a query, and adds an outer product to it. The
        additional work of chunks is not counted, like that of rematerialization.
        """
        weights = (self.w_q, self.w_k, self.w_v, self.w_z, self.w_beta, self.w_dt, self.w_o)
        weights += (self.conv_q, self.conv_k, self.conv_v)
        heads, value_dim = self.w_v.shape[-2:]
        return 2.0 * (sum(math.prod(w.shape) for w in weights) + 3 * heads * value_dim * self.w_k.shape[-1])

    def empty_cache(self, batch: int, length: int, dtype: Any) -> DeltaNetCache:
        """Create an empty cache; stacked if the layers are.

        Args:
            length: Unused: the state's size does not depend on the number of positions.
        """
        *stacked, key_heads, key_dim, taps = self.conv_k.shape
        *_, heads, value_dim, _ = self.conv_v.shape
        keys = jnp.zeros((*stacked, batch, taps - 1, key_heads, key_dim), dtype)
        values = jnp.zeros((*stacked, batch, taps - 1, heads, value_dim), dtype)
        return DeltaNetCache(keys, keys, values, jnp.zeros((*stacked, batch, heads, key_dim, value_dim), jnp.float32))

    @property
    def cache_axes(self) -> DeltaNetCache:
        """Logical axes of a cache."""
        keys = ("batch", None, "delta_key_heads", None)
        return DeltaNetCache._make(
            (keys, keys, ("batch", None, "delta_heads", None), ("batch", "delta_heads", None, None))
        )

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        cache: DeltaNetCache,
        start: Int[Array, " batch"],
        valid: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], DeltaNetCache]:
        """Continue from the cached state; `position` and `start` are unused.

        Args:
            valid: False after a row's last new position; these leave its state as it is. None: all are new.
        """
        projected = self._project(x)
        if valid is not None:
            # Without decay and with a step of size 0, the state is kept.
            log_decay, beta = (
                jnp.where(valid[:, :, None], each, 0.0) for each in (projected.log_decay, projected.beta)
            )
            projected = projected._replace(log_decay=log_decay, beta=beta)
        before = [old.astype(new.dtype) for old, new in zip(cache[:3], projected.inputs)]
        q, k, v = self._convolved(projected.inputs, before, None, None)
        q, k = local_shared_heads(v.shape[2], q, k, heads="delta_heads", shared="delta_key_heads")
        inputs = DeltaInputs(q, k, v, projected.log_decay, projected.beta)
        y, state = delta_rule(inputs, state=cache.state, target=current_target())
        tail = self.conv_q.shape[-1] - 1
        tails = last_inputs(cache[:3], projected.inputs, tail, valid)
        return self._output(y, projected.gate), DeltaNetCache(tails[0], tails[1], tails[2], state)

    def _project(self, x: jax.Array) -> _Projected:
        refuse_exact("delta-net layers")
        q, k, v, z, beta, dt = contract_gathered(
            x,
            (f"batch seq embed, embed {KEYS} -> batch seq {KEYS}", self.w_q),
            (f"batch seq embed, embed {KEYS} -> batch seq {KEYS}", self.w_k),
            (f"batch seq embed, embed {VALUES} -> batch seq {VALUES}", self.w_v),
            (f"batch seq embed, embed {VALUES} -> batch seq {VALUES}", self.w_z),
            ("batch seq embed, embed delta_heads -> batch seq delta_heads", self.w_beta),
            ("batch seq embed, embed delta_heads -> batch seq delta_heads", self.w_dt),
        )
        step = jax.nn.softplus(add_bias(dt.astype(jnp.float32), self.dt_bias, "delta_heads"))
        rates = jnp.exp(gather(self.a_log, "delta_heads", jnp.float32))
        return _Projected(z, -rates[None, None] * step, jax.nn.sigmoid(beta.astype(jnp.float32)), (q, k, v))

    def _convolved(
        self,
        inputs: Sequence[jax.Array],
        before: Sequence[jax.Array] | None,
        segment: jax.Array | None,
        segment_before: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Convolve; return queries and keys in float32, of unit length, the former scaled, and values."""
        results = []
        weights = ((self.conv_q, KEYS), (self.conv_k, KEYS), (self.conv_v, VALUES))
        for part, (weight, axes), earlier in zip(inputs, weights, before or [None] * 3):
            taps = gather(weight, f"{axes} tap", jnp.float32)
            results.append(jax.nn.silu(causal_convolution(part, taps, earlier, segment, segment_before)))
        q, k, v = results
        return _unit(q) * q.shape[-1] ** -0.5, _unit(k), v

    def _output(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        y = y.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * gather(self.scale, "delta_value_dim", jnp.float32)[None, None, None]
        y = (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
        return contract(f"batch seq {VALUES}, {VALUES} embed -> batch seq embed", y, self.w_o)


def _unit(x: jax.Array) -> jax.Array:
    """Divide vectors by their length, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + KEY_EPSILON)


def _recurred(q: jax.Array, k: jax.Array, v: jax.Array, projected: _Projected, segment: jax.Array | None) -> jax.Array:
    """Apply the rule to this device's heads, over whole rows."""
    q, k = local_shared_heads(v.shape[2], q, k, heads="delta_heads", shared="delta_key_heads")
    # Heads are local here: sums over a device's heads are not partial terms of a global sum.
    parts = dict.fromkeys(_head_axes(), ValueState.SPLIT)
    inputs = DeltaInputs(q, k, v, projected.log_decay, projected.beta)
    inputs = assert_cotangent_sharding(inputs, parts, dim=2)
    size, target = axis_size(CONTEXT), current_target()
    if size > 1:
        y = delta_rule_over_devices(inputs, segment, axis_name=CONTEXT, axis_size=size, target=target)
    else:
        y = delta_rule(inputs, segments=segment, target=target).y
    return assert_sharding(y, parts, dim=2)


def _head_axes() -> MeshAxes:
    """Return the mesh axes that shard value heads."""
    layout = current_layout()
    return () if layout is None else layout.compute(("delta_heads",))[0]
