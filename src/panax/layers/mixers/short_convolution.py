"""Gated short convolution, in place of attention (LFM2)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...core import Module, normal, parameter
from ...kernels.causal_convolution import causal_convolution
from ...kernels.registry import refuse_exact
from ...spmd import contract, contract_gathered, gather
from .row_edges import edges_before, last_inputs


class ConvolutionCache(NamedTuple):
    """State of a short convolution for generation, of constant size.

    Attributes:
        inputs: The convolution's last inputs, one fewer than its taps.
    """

    inputs: Float[Array, "batch tail conv_channel"]


class ShortConvolution(Module):
    """Convolution along the row between two gates: project to b, c and x; convolve `b * x`; multiply by c; project back.

    It is sharded by channels. Rows sharded over the context axis must be in contiguous order: a task with such a layer sets
    `row_order = "contiguous"`.

    Source: LFM2 (arXiv:2511.23404), section 2. Differs: one matrix per result, so that each is sharded by its channels.
    """

    w_b: Float[Array, "embed conv_channel"] = parameter(normal("embed"))
    w_c: Float[Array, "embed conv_channel"] = parameter(normal("embed"))
    w_x: Float[Array, "embed conv_channel"] = parameter(normal("embed"))
    # The variance of PyTorch's uniform initialization between -1 / sqrt(taps) and 1 / sqrt(taps).
    conv: Float[Array, "conv_channel tap"] = parameter(normal("tap", gain=3**-0.5))
    w_o: Float[Array, "conv_channel embed"] = parameter(normal("conv_channel"))

    @classmethod
    def build(
        cls, key: jax.Array, embed: int, *, channels: int, taps: int = 3, output_gain: float = 1.0
    ) -> "ShortConvolution":
        """Initialize a layer with this many channels."""
        sizes = {"embed": embed, "conv_channel": channels, "tap": taps}
        return cls.create(key, sizes, w_o=normal("conv_channel", gain=output_gain))

    def __call__(
        self,
        x: Float[Array, "batch residual embed"],
        position: Int[Array, "batch seq"],
        segment: Int[Array, "batch seq"] | None,
    ) -> Float[Array, "batch residual embed"]:
        """Mix the positions of each row, within equal segments if given (0 is padding).

        Args:
            position: Unused: a convolution is inherently ordered.
        """
        inputs, gate = self._project(x)
        before, segment_before = edges_before([inputs], segment, self.conv.shape[-1] - 1)
        y = self._convolved(inputs, None if before is None else before[0], segment, segment_before)
        return self._output(y, gate)

    @property
    def flops(self) -> float:
        """FLOPs of one layer's forward matmuls and taps per position."""
        weights = (self.w_b, self.w_c, self.w_x, self.conv, self.w_o)
        return 2.0 * sum(math.prod(w.shape) for w in weights)

    def empty_cache(self, batch: int, length: int, dtype: Any) -> ConvolutionCache:
        """Create an empty cache; stacked if the layers are.

        Args:
            length: Unused: the state's size does not depend on the number of positions.
        """
        *stacked, channels, taps = self.conv.shape
        return ConvolutionCache(jnp.zeros((*stacked, batch, taps - 1, channels), dtype))

    @property
    def cache_axes(self) -> ConvolutionCache:
        """Logical axes of a cache."""
        return ConvolutionCache._make([("batch", None, "conv_channel")])

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        cache: ConvolutionCache,
        start: Int[Array, " batch"],
        valid: Bool[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], ConvolutionCache]:
        """Continue from the cached inputs; `position` and `start` are unused.

        Args:
            valid: False after a row's last new position; these are not cached. None: all are new.
        """
        inputs, gate = self._project(x)
        y = self._convolved(inputs, cache.inputs.astype(inputs.dtype), None, None)
        (last,) = last_inputs(cache, [inputs], self.conv.shape[-1] - 1, valid)
        return self._output(y, gate), ConvolutionCache(last)

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the convolution's inputs, and the gate of its outputs."""
        refuse_exact("short convolutions")
        equation = "batch seq embed, embed conv_channel -> batch seq conv_channel"
        b, gate, x = contract_gathered(x, *((equation, w) for w in (self.w_b, self.w_c, self.w_x)))
        return b * x, gate

    def _convolved(
        self,
        inputs: jax.Array,
        before: jax.Array | None,
        segment: jax.Array | None,
        segment_before: jax.Array | None,
    ) -> jax.Array:
        taps = gather(self.conv, "conv_channel tap", jnp.float32)
        return causal_convolution(inputs, taps, before, segment, segment_before)

    def _output(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        return contract("batch seq conv_channel, conv_channel embed -> batch seq embed", gate * y, self.w_o)
