"""A frozen matrix in few bits: codes, and a scale for each block along its inputs.

    weight = quantize_weight(w, num_inputs=1, num_outputs=2, format=NF4, block=64)

Codes and scales are gathered, and the value is computed from them after that; a backward pass gathers and computes it
again, so that no device keeps a matrix in more bits.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.jax_primitives import define_primitive
from ...core.protocols import Axes
from ...kernels.quantized import Format, QuantizedArray, quantize
from ..collectives import gather_dims
from ..contraction import PRODUCT, contract_value
from ..weights import GatherSpec


class QuantizedWeight(eqx.Module):
    """A weight of the axes `(*copies, *inputs, *outputs)`, such as `layer`, `embed`, `heads head_dim`.

    Attributes:
        codes: Of the axes `(*copies, *outputs, inputs)`, with all inputs in one dimension, packed.
        scales: Of the axes `(*copies, *outputs, blocks)`.
        inner: Sizes of the input axes after the first, which no mesh axis splits.
        num_outputs: Number of output axes.
        block: Number of inputs with one scale.
        value_dtype: Dtype of the matrix before quantization.
    """

    codes: Any
    scales: Any
    format: Format = eqx.field(static=True)
    inner: tuple[int, ...] = eqx.field(static=True)
    num_outputs: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    value_dtype: Any = eqx.field(static=True)

    has_plain_parts: ClassVar[bool] = False

    @property
    def dtype(self) -> Any:
        return self.value_dtype

    @property
    def num_inputs(self) -> int:
        return 1 + len(self.inner)

    @property
    def shape(self) -> tuple[int, ...]:
        return _value_shape(self.codes.shape, self.format, self.inner, self.num_outputs)

    def part_axes(self, axes: Axes) -> Mapping[str, Axes]:
        """Return the logical axes of codes and scales, given those of the weight."""
        first = len(axes) - self.num_outputs - self.num_inputs
        stored = (*axes[:first], *axes[first + self.num_inputs :], axes[first])
        return {"codes": stored, "scales": stored}

    def contract(self, text: str, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Contract an activation with the weight; only codes and scales are saved for the backward pass."""

        def product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
            return contract_value(text, x, jax.lax.stop_gradient(weight), out_dtype)

        nothing = jax.checkpoint_policies.nothing_saveable
        return checkpoint_name(jax.checkpoint(product, policy=nothing)(x, self), PRODUCT)

    def gather(self, to: GatherSpec) -> tuple[jax.Array, None]:
        first = len(to.gathers) - self.num_outputs - self.num_inputs
        last = first + self.num_inputs
        if any(to.gathers[first + 1 : last]):
            raise ValueError(f"{to.axes}: only the first axis of a quantized weight's inputs may be split over devices")
        gathers = (*to.gathers[:first], *to.gathers[last:], to.gathers[first])
        codes, scales = (gather_dims(part, gathers) for part in (self.codes, self.scales))
        fields = {"format": self.format, "inner": self.inner, "num_outputs": self.num_outputs, "block": self.block}
        return DEQUANTIZED.bind(codes, scales, **fields, dtype=jnp.dtype(to.dtype)), None

    def reduce_grad(self, to: GatherSpec, kept: None, gradient: jax.Array) -> "QuantizedWeight":
        return dataclasses.replace(self, codes=None, scales=None)

    def dequantize(self) -> jax.Array:
        """Return the whole matrix in `value_dtype`."""
        fields = {"format": self.format, "inner": self.inner, "num_outputs": self.num_outputs, "block": self.block}
        return _dequantize(self.codes, self.scales, **fields, dtype=self.value_dtype)


def quantize_weight(
    w: Any, *, num_inputs: int, num_outputs: int, format: Format, block: int, dtype: Any = None
) -> QuantizedWeight:
    """Quantize a matrix of the axes `(*copies, *inputs, *outputs)`.

    Args:
        dtype: Default dtype of the dequantized matrix; None for that of `w`.

    Raises:
        ValueError: The inputs are not whole blocks.
    """
    last = w.ndim - num_outputs
    first = last - num_inputs
    inputs = w.shape[first:last]
    if (count := math.prod(inputs)) % block:
        raise ValueError(f"{count} inputs are not whole blocks of {block}")
    turned = jnp.moveaxis(w, range(first, last), range(w.ndim - num_inputs, w.ndim))
    flat = turned.reshape(*w.shape[:first], *w.shape[last:], count)
    parts = quantize(flat, format, block)
    dtype = jnp.dtype(w.dtype if dtype is None else dtype)
    return QuantizedWeight(parts.codes, parts.scales, format, inputs[1:], num_outputs, block, dtype)


def is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedWeight)


def dequantize_weights(params: Any) -> Any:
    """Return parameters with each `QuantizedWeight` replaced by its value."""
    return jax.tree.map(lambda node: node.dequantize() if is_quantized(node) else node, params, is_leaf=is_quantized)


def weight_shapes(params: Any) -> Any:
    """Return parameters with each `QuantizedWeight` replaced by the shape and dtype of its value."""

    def one(node: Any) -> Any:
        return jax.ShapeDtypeStruct(node.shape, node.dtype) if is_quantized(node) else node

    return jax.tree.map(one, params, is_leaf=is_quantized)


def quantize_like(wanted: Any, params: Any) -> Any:
    """Return parameters in the structure of `wanted`: quantized where it has a `QuantizedWeight`."""

    def one(node: Any, w: Any) -> Any:
        if not is_quantized(node):
            return w
        counts = {"num_inputs": node.num_inputs, "num_outputs": node.num_outputs}
        return quantize_weight(w, **counts, format=node.format, block=node.block, dtype=node.value_dtype)

    return jax.tree.map(one, wanted, params, is_leaf=is_quantized)


def _value_shape(codes: tuple[int, ...], format: Format, inner: tuple[int, ...], num_outputs: int) -> tuple[int, ...]:
    first = len(codes) - 1 - num_outputs
    return (*codes[:first], codes[-1] * format.packed // math.prod(inner), *inner, *codes[first:-1])


def _dequantize(
    codes: jax.Array,
    scales: jax.Array,
    *,
    format: Format,
    inner: tuple[int, ...],
    num_outputs: int,
    block: int,
    dtype: Any,
) -> jax.Array:
    shape = _value_shape(codes.shape, format, inner, num_outputs)
    first, last = codes.ndim - 1 - num_outputs, codes.ndim + len(inner) - num_outputs
    flat = QuantizedArray(codes, scales, format, (block,), dtype).dequantize()
    values = flat.reshape(*shape[:first], *shape[last:], *shape[first:last])
    return jnp.moveaxis(values, range(len(shape) - len(inner) - 1, len(shape)), range(first, last))


def _in_front(arrays: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    # Both have the same number of dimensions; those in front of the last ones are copies.
    return DEQUANTIZED.bind(*(jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims)), **params), 0


DEQUANTIZED = define_primitive(
    "dequantize_weight",
    compute=_dequantize,
    infer=lambda codes, _, *, format, inner, num_outputs, dtype, **__: codes.update(
        shape=_value_shape(codes.shape, format, inner, num_outputs), dtype=dtype
    ),
    batch=_in_front,
)
"""Computes a weight from gathered codes and scales. A single primitive, so that a rematerialization policy saves no
intermediate result."""
