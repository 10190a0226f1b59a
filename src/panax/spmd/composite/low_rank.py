"""A frozen weight with a trained correction of low rank beside it (LoRA).

    weight = base + gain * a @ b

A contraction with it never forms the sum: `x` is contracted with the base and, beside it, with `a` and then `b`,
so that a step computes no gradient of the base's size. Whatever reads the weight itself (experts, latent attention
while it decodes) gets the sum, and its gradient becomes that of `a` and `b`.

Source: LoRA (arXiv:2106.09685).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ...core.protocols import Axes
from ..contraction import contract, parse_equation
from ..weights import GatherSpec, PlainWeight, as_weight
from .quantized_weight import dequantize_weights, is_quantized

RANK = "rank"
"""Logical axis of the dimension between `a` and `b`."""


class LowRankWeight(eqx.Module):
    """A weight of the axes `(*copies, *inputs, *outputs)`, such as `layer`, `embed`, `heads head_dim`.

    Attributes:
        base: The weight that is not trained: an array, or a `WeightLike`.
        a: Of the axes `(*copies, *inputs, rank)`.
        b: Of the axes `(*copies, rank, *outputs)`.
        num_inputs: Number of input axes.
        num_outputs: Number of output axes.
        gain: Factor of the correction.
    """

    base: Any
    a: Any
    b: Any
    num_inputs: int = eqx.field(static=True)
    num_outputs: int = eqx.field(static=True)
    gain: float = eqx.field(static=True)

    has_plain_parts: ClassVar[bool] = True

    @property
    def dtype(self) -> Any:
        return as_weight(self.a).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def part_axes(self, axes: Axes) -> Mapping[str, Axes]:
        """Return the logical axes of each array, given those of the weight."""
        copies, inputs, outputs = self._split(axes)
        return {"base": axes, "a": (*copies, *inputs, RANK), "b": (*copies, RANK, *outputs)}

    def contract(self, text: str, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Contract an activation with the base, and with `a` and then `b`."""
        x_axes, axes, out_axes = parse_equation(text).axes
        _, inputs, outputs = self._split(axes)
        kept = " ".join(str(axis) for axis in x_axes if axis not in inputs)
        between, last = " ".join(map(str, inputs)), " ".join(map(str, outputs))
        low = contract(f"{' '.join(map(str, x_axes))}, {between} {RANK} -> {kept} {RANK}", x, self.a)
        out = " ".join(map(str, out_axes))
        correction = contract(f"{kept} {RANK}, {RANK} {last} -> {out}", low, self.b, out_dtype=out_dtype)
        return contract(text, x, jax.lax.stop_gradient(self.base), out_dtype=out_dtype) + self.gain * correction

    def gather(self, to: GatherSpec) -> tuple[jax.Array, Any]:
        value, _ = as_weight(self.base).gather(to)
        (a, kept_a), (b, kept_b) = (as_weight(w).gather(spec) for w, spec in zip((self.a, self.b), self._specs(to)))
        correction = jnp.matmul(self._flat_a(a), self._flat_b(b), preferred_element_type=jnp.float32)
        value = value + (self.gain * correction).reshape(value.shape).astype(value.dtype)
        return value, (a, b, kept_a, kept_b)

    def reduce_grad(self, to: GatherSpec, kept: Any, gradient: jax.Array) -> "LowRankWeight":
        a, b, kept_a, kept_b = kept
        flat_a, flat_b = self._flat_a(a), self._flat_b(b)
        gradient = self.gain * gradient.reshape(*flat_a.shape[:-1], flat_b.shape[-1]).astype(jnp.float32)
        d_a = jnp.matmul(gradient, flat_b.swapaxes(-1, -2)).reshape(a.shape)
        d_b = jnp.matmul(flat_a.swapaxes(-1, -2), gradient).reshape(b.shape)
        spec_a, spec_b = self._specs(to)
        parts = _reduced(self.a, spec_a, kept_a, d_a), _reduced(self.b, spec_b, kept_b, d_b)
        return dataclasses.replace(self, base=None, a=parts[0], b=parts[1])

    def _split(self, axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split items, one for each axis, into those of copies, inputs and outputs."""
        last = len(axes) - self.num_outputs
        first = last - self.num_inputs
        return axes[:first], axes[first:last], axes[last:]

    def _specs(self, to: GatherSpec) -> tuple[GatherSpec, GatherSpec]:
        """Return how `a` and `b` are gathered, in float32."""
        axes = self.part_axes(to.axes)
        copies, inputs, outputs = self._split(to.gathers)
        return (
            GatherSpec((*copies, *inputs, ()), "float32", axes["a"]),
            GatherSpec((*copies, (), *outputs), "float32", axes["b"]),
        )

    def _flat_a(self, a: jax.Array) -> jax.Array:
        copies = a.shape[: a.ndim - 1 - self.num_inputs]
        return a.reshape(*copies, math.prod(a.shape[len(copies) : -1]), a.shape[-1])

    def _flat_b(self, b: jax.Array) -> jax.Array:
        copies = b.shape[: b.ndim - 1 - self.num_outputs]
        return b.reshape(*copies, b.shape[len(copies)], math.prod(b.shape[len(copies) + 1 :]))


def _reduced(weight: Any, to: GatherSpec, kept: Any, gradient: jax.Array) -> Any:
    """Return the gradient of a stored array in its structure."""
    reduced = as_weight(weight).reduce_grad(to, kept, gradient)
    return reduced.array if isinstance(reduced, PlainWeight) else reduced


def is_low_rank(node: Any) -> bool:
    return isinstance(node, LowRankWeight)


def low_rank_mask(params: Any) -> Any:
    """Return a tree with the structure of the parameters: True for `a` and `b` of each `LowRankWeight`."""

    def masked(node: Any) -> Any:
        if not is_low_rank(node):
            return False
        return dataclasses.replace(node, base=jax.tree.map(lambda _: False, node.base), a=True, b=True)

    return jax.tree.map(masked, params, is_leaf=is_low_rank)


def base_weights(params: Any) -> Any:
    """Return parameters with each `LowRankWeight` replaced by its base: those of the model without adapters."""
    return jax.tree.map(lambda node: node.base if is_low_rank(node) else node, params, is_leaf=is_low_rank)


def with_base_weights(params: Any, bases: Any) -> Any:
    """Return parameters with the bases replaced by those of a model without adapters."""

    def replaced(node: Any, base: Any) -> Any:
        return dataclasses.replace(node, base=base) if is_low_rank(node) else base

    leaves, structure = jax.tree.flatten(params, is_leaf=is_low_rank)
    return structure.unflatten(map(replaced, leaves, structure.flatten_up_to(bases)))


def merge_low_rank(params: Any) -> Any:
    """Return parameters with each `LowRankWeight` replaced by its sum: added in float32, and rounded once to the dtype of
    the base. Quantized weights without one are replaced by their values."""

    def merged(node: Any) -> Any:
        if not is_low_rank(node):
            return node.dequantize() if is_quantized(node) else node
        correction = jnp.matmul(
            node._flat_a(node.a.astype(jnp.float32)),
            node._flat_b(node.b.astype(jnp.float32)),
            precision=jax.lax.Precision.HIGHEST,
        )
        base = dequantize_weights(node.base)
        total = base.astype(jnp.float32) + node.gain * correction.reshape(node.shape)
        return total.astype(base.dtype)

    return jax.tree.map(merged, params, is_leaf=lambda node: is_low_rank(node) or is_quantized(node))
