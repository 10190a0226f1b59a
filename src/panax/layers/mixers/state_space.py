"""Mamba-2 mixer: a short convolution and a selective state-space scan, in place of attention."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...core import Module, constant, current_layout, current_target, normal, parameter
from ...core.layout.layout import MeshAxes, axis_size
from ...kernels.causal_convolution import causal_convolution
from ...kernels.registry import refuse_exact
from ...kernels.state_space.state_space import ScanInputs, state_space_scan
from ...parallel.state_passing import scan_over_devices
from ...spmd import (
    ValueState,
    add_bias,
    assert_cotangent_sharding,
    assert_sharding,
    contract,
    contract_gathered,
    gather,
    psum_both,
)
from ...spmd.collectives import axis_index
from ..attention.shared_heads import local_shared_heads
from ..feed_forward import ACTIVATIONS
from .initial_values import first_step, quantiles
from .row_edges import CONTEXT, edges_before, last_inputs

HEADS, GROUPS = "ssm_heads ssm_head_dim", "ssm_groups ssm_state"


class StateSpaceCache(NamedTuple):
    """State of a state-space layer for generation, of constant size.

    Attributes:
        x: The convolution's last inputs, one fewer than its taps; the same for `b` and `c`.
        state: float32.
    """

    x: Float[Array, "batch tail ssm_heads ssm_head_dim"]
    b: Float[Array, "batch tail ssm_groups ssm_state"]
    c: Float[Array, "batch tail ssm_groups ssm_state"]
    state: Float[Array, "batch ssm_heads ssm_head_dim ssm_state"]


class StateSpace(Module):
    """State-space mixer: project to x, b, c, a step size and a gate; convolve x, b and c; scan; gate,
    normalize, project back.

    It is sharded by heads. Rows sharded over the context axis must be in contiguous order: a task with such a
    layer sets `row_order = "contiguous"`.

    Source: Transformers are SSMs (Mamba-2, arXiv:2405.21060), section 7. Differs: the input projection is one
    matrix per result instead of a single matrix, so that each is sharded by its heads.

    Attributes:
        step_floor: Smallest step size.
        multipliers: Factors of the projections: z, x, b, c and the step size; none for 1.
        scale: None for an output that is gated and not normalized.
        norm_groups: Number of parts of the inner width that are normalized separately; 1 normalizes all of it
            together.
    """

    norm_groups: int = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    w_z: Float[Array, "embed ssm_heads ssm_head_dim"] = parameter(normal("embed"))
    w_x: Float[Array, "embed ssm_heads ssm_head_dim"] = parameter(normal("embed"))
    w_b: Float[Array, "embed ssm_groups ssm_state"] = parameter(normal("embed"))
    w_c: Float[Array, "embed ssm_groups ssm_state"] = parameter(normal("embed"))
    w_dt: Float[Array, "embed ssm_heads"] = parameter(normal("embed"))
    # The variance of PyTorch's uniform initialization between -1 / sqrt(taps) and 1 / sqrt(taps).
    conv_x: Float[Array, "ssm_heads ssm_head_dim tap"] = parameter(normal("tap", gain=3**-0.5))
    conv_b: Float[Array, "ssm_groups ssm_state tap"] = parameter(normal("tap", gain=3**-0.5))
    conv_c: Float[Array, "ssm_groups ssm_state tap"] = parameter(normal("tap", gain=3**-0.5))
    conv_bias_x: Float[Array, "ssm_heads ssm_head_dim"] | None = parameter(constant(0.0))
    conv_bias_b: Float[Array, "ssm_groups ssm_state"] | None = parameter(constant(0.0))
    conv_bias_c: Float[Array, "ssm_groups ssm_state"] | None = parameter(constant(0.0))
    dt_bias: Float[Array, " ssm_heads"] = parameter(quantiles(first_step))
    a_log: Float[Array, " ssm_heads"] = parameter(quantiles(lambda share: math.log(1.0 + 15.0 * share)))
    d: Float[Array, " ssm_heads"] = parameter(constant(1.0))
    scale: Float[Array, "ssm_heads ssm_head_dim"] | None = parameter(constant(1.0))
    w_o: Float[Array, "ssm_heads ssm_head_dim embed"] = parameter(normal("ssm_heads", "ssm_head_dim"))
    step_floor: float = eqx.field(static=True, default=0.0)
    multipliers: tuple[float, ...] = eqx.field(static=True, default=())

    @classmethod
    def build(
        cls,
        key: jax.Array,
        embed: int,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state: int,
        taps: int = 4,
        conv_bias: bool = True,
        norm_by_group: bool = False,
        step_floor: float = 0.0,
        multipliers: tuple[float, ...] = (),
        norm: bool = True,
        epsilon: float = 1e-5,
        output_gain: float = 1.0,
    ) -> "StateSpace":
        """Initialize a layer of `heads * head_dim` inner features.

        Args:
            norm: False for no norm of the gated output.
            norm_by_group: True to normalize the features of each group's heads separately instead of all
                together.
        """
        sizes = {"embed": embed, "ssm_heads": heads, "ssm_head_dim": head_dim}
        sizes |= {"ssm_groups": groups, "ssm_state": state, "tap": taps}
        fields: dict = {"w_o": normal("ssm_heads", "ssm_head_dim", gain=output_gain)}
        if not conv_bias:
            fields |= dict.fromkeys(("conv_bias_x", "conv_bias_b", "conv_bias_c"))
        fields |= {"multipliers": multipliers, **({} if norm else {"scale": None})}
        fields |= {"norm_groups": groups if norm_by_group else 1, "epsilon": epsilon, "step_floor": step_floor}
        return cls.create(key, sizes, **fields)

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
        z, dt, inputs = self._project(x)
        before, segment_before = edges_before(inputs, segment, self.conv_x.shape[-1] - 1)
        x, b, c = self._convolved(inputs, before, segment, segment_before)
        return self._output(_scanned(x, dt, self._rates(), b, c, segment), x, z)

    @property
    def flops(self) -> float:
        """FLOPs of one layer's forward matmuls per position: matrices, convolution taps, and the recurrence
        itself.

        The recurrence adds an outer product to each head's state, and multiplies the state by a vector. The
        additional work of a chunked scan is not counted, like that of rematerialization.
        """
        weights = (self.w_z, self.w_x, self.w_b, self.w_c, self.w_dt, self.w_o, self.conv_x, self.conv_b, self.conv_c)
        heads, head_dim = self.w_x.shape[-2:]
        return 2.0 * (sum(math.prod(w.shape) for w in weights) + 2 * heads * head_dim * self.w_b.shape[-1])

    def empty_cache(self, batch: int, length: int, dtype: Any) -> StateSpaceCache:
        """Create an empty cache; stacked if the layers are.

        Args:
            length: Unused: the state's size does not depend on the number of positions.
        """
        *stacked, heads, head_dim, taps = self.conv_x.shape
        *_, groups, state, _ = self.conv_b.shape
        x, shared = (
            jnp.zeros((*stacked, batch, taps - 1, *sizes), dtype) for sizes in ((heads, head_dim), (groups, state))
        )
        return StateSpaceCache(x, shared, shared, jnp.zeros((*stacked, batch, heads, head_dim, state), jnp.float32))

    @property
    def cache_axes(self) -> StateSpaceCache:
        """Logical axes of a cache."""
        shared = ("batch", None, "ssm_groups", None)
        return StateSpaceCache._make(
            (("batch", None, "ssm_heads", None), shared, shared, ("batch", "ssm_heads", None, None))
        )

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        cache: StateSpaceCache,
        start: Int[Array, " batch"],
        valid: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], StateSpaceCache]:
        """Continue from the cached state; `position` and `start` are unused.

        Args:
            valid: False after a row's last new position; these leave its state as it is. None: all are new.
        """
        z, dt, inputs = self._project(x)
        # A step of size 0 keeps the state.
        dt = dt if valid is None else jnp.where(valid[:, :, None], dt, 0.0)
        before = [old.astype(new.dtype) for old, new in zip(cache[:3], inputs)]
        x, b, c = self._convolved(inputs, before, None, None)
        b, c = local_shared_heads(x.shape[2], b, c, heads="ssm_heads", shared="ssm_groups")
        scan = state_space_scan(ScanInputs(x, dt, self._rates(), b, c), state=cache.state, target=current_target())
        tail = self.conv_x.shape[-1] - 1
        tails = last_inputs(cache[:3], inputs, tail, valid)
        return self._output(scan.y, x, z), StateSpaceCache(tails[0], tails[1], tails[2], scan.state)

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        """Compute the gate, the step sizes in float32, and the convolution's inputs x, b and c."""
        refuse_exact("state-space layers")
        z, x, b, c, dt = contract_gathered(
            x,
            ("batch seq embed, embed ssm_heads ssm_head_dim -> batch seq ssm_heads ssm_head_dim", self.w_z),
            ("batch seq embed, embed ssm_heads ssm_head_dim -> batch seq ssm_heads ssm_head_dim", self.w_x),
            ("batch seq embed, embed ssm_groups ssm_state -> batch seq ssm_groups ssm_state", self.w_b),
            ("batch seq embed, embed ssm_groups ssm_state -> batch seq ssm_groups ssm_state", self.w_c),
            ("batch seq embed, embed ssm_heads -> batch seq ssm_heads", self.w_dt),
        )
        if self.multipliers:
            z, x, b, c, dt = (each * factor for each, factor in zip((z, x, b, c, dt), self.multipliers, strict=True))
        step = jax.nn.softplus(add_bias(dt.astype(jnp.float32), self.dt_bias, "ssm_heads"))
        return z, jnp.maximum(step, self.step_floor) if self.step_floor else step, (x, b, c)

    def _convolved(
        self, inputs: Any, before: Any, segment: jax.Array | None, segment_before: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        weights = (self.conv_x, self.conv_b, self.conv_c)
        biases = (self.conv_bias_x, self.conv_bias_b, self.conv_bias_c)
        results = []
        for part, w, bias, axes, earlier in zip(inputs, weights, biases, (HEADS, GROUPS, GROUPS), before or [None] * 3):
            w = gather(w, f"{axes} tap", jnp.float32)
            out = causal_convolution(part, w, earlier, segment, segment_before)
            results.append(ACTIVATIONS["silu"](out if bias is None else add_bias(out, bias, axes)))
        return tuple(results)

    def _rates(self) -> jax.Array:
        return -jnp.exp(gather(self.a_log, "ssm_heads", jnp.float32))

    def _output(self, y: jax.Array, x: jax.Array, z: jax.Array) -> jax.Array:
        y = y.astype(jnp.float32) + gather(self.d, "ssm_heads", jnp.float32)[None, None, :, None] * x.astype(
            jnp.float32
        )
        y = y * jax.nn.silu(z.astype(jnp.float32))
        if self.scale is not None:
            y = y * jax.lax.rsqrt(self._mean_squares(y) + self.epsilon)[..., None]
            y = y * gather(self.scale, HEADS, jnp.float32)[None, None]
        y = y.astype(z.dtype)
        equation = "batch seq ssm_heads ssm_head_dim, ssm_heads ssm_head_dim embed -> batch seq embed"
        return contract(equation, y, self.w_o)

    def _mean_squares(self, y: jax.Array) -> jax.Array:
        """Compute mean squares over the features that are normalized together: [batch, seq, heads or 1]."""
        local, head_dim = y.shape[2:]
        axes = _head_axes()
        each = local * (jax.lax.axis_size(axes) if axes else 1) // self.norm_groups
        squares = jnp.sum(y * y, axis=-1)
        if local % each == 0:
            parts = dict.fromkeys(axes, ValueState.SPLIT)
            sums = assert_sharding(squares.reshape(*squares.shape[:2], -1, each).sum(axis=-1), parts, dim=2)
            sums = assert_cotangent_sharding(sums, parts, dim=2)
            return jnp.repeat(sums, each, axis=2) / (each * head_dim)
        if self.norm_groups == 1:
            sums: jax.Array = psum_both(squares.sum(axis=-1, keepdims=True), axes)  # pyright: ignore[reportAssignmentType]
            return sums / (each * head_dim)
        # Groups span devices: each device adds its heads' squares to those of their groups.
        group = (axis_index(axes) * local + jnp.arange(local)) // each
        member = (group[:, None] == jnp.arange(self.norm_groups)[None]).astype(y.dtype)
        sums = psum_both(jnp.einsum("bsh,hg->bsg", squares, member), axes)
        return jnp.einsum("bsg,hg->bsh", sums, member) / (each * head_dim)


def _scanned(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, segment: jax.Array | None
) -> jax.Array:
    """Scan this device's heads over whole rows."""
    b, c = local_shared_heads(x.shape[2], b, c, heads="ssm_heads", shared="ssm_groups")
    # Heads and their groups are local here: sums over a device's heads are not partial terms of a global sum.
    parts = dict.fromkeys(_head_axes(), ValueState.SPLIT)
    x, dt, b, c = assert_cotangent_sharding((x, dt, b, c), parts, dim=2)
    a = assert_cotangent_sharding(a, parts)
    inputs, size, target = ScanInputs(x, dt, a, b, c), axis_size(CONTEXT), current_target()
    if size > 1:
        y = scan_over_devices(inputs, segment, axis_name=CONTEXT, axis_size=size, target=target)
    else:
        y = state_space_scan(inputs, segments=segment, target=target).y
    return assert_sharding(y, parts, dim=2)


def _head_axes() -> MeshAxes:
    """Return the mesh axes that shard heads."""
    layout = current_layout()
    return () if layout is None else layout.compute(("ssm_heads",))[0]
