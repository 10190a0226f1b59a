"""A frozen weight with a trained correction of low rank beside it (LoRA).

    weight = base + gain * a @ b

A contraction with it never forms the sum: `x` is contracted with the base and, beside it, with `a` and then `b`,
so that a step computes no gradient of the base's size. Whatever reads the weight itself (experts, latent attention
while it decodes) gets the sum, and its gradient becomes that of `a` and `b`.

With magnitudes (DoRA), each column of the sum is scaled to a norm that is a parameter:

    weight = magnitude / |base + gain * a @ b| * (base + gain * a @ b)

The norms |.| are over all inputs, on every mesh, and constants in the backward pass.

Sources: LoRA (arXiv:2106.09685), DoRA (arXiv:2402.09353).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.layout.layout import current_layout
from ...core.protocols import Axes
from ..collectives import all_reduce
from ..contraction import contract, contract_opened, gather, parse_equation
from ..weights import GATHERED, GatherSpec, PlainWeight, as_weight, gather_axes, gather_weight
from .quantized_weight import dequantize_weights, is_quantized

RANK = "rank"
"""Logical axis of the dimension between `a` and `b`."""

MAGNITUDE = "magnitude"
"""Logical axis of size 1 after the outputs of magnitudes, which no step gathers in fewer bits than 32."""

_ROWS_AT_ONCE = 8


class LowRankWeight(eqx.Module):
    """A weight of the axes `(*copies, *inputs, *outputs)`, such as `layer`, `embed`, `heads head_dim`.

    Attributes:
        base: The weight that is not trained: an array, or a `WeightLike`.
        a: Of the axes `(*copies, *inputs, rank)`.
        b: Of the axes `(*copies, rank, *outputs)`.
        num_inputs: Number of input axes.
        num_outputs: Number of output axes.
        gain: Factor of the correction.
        magnitude: Norms of the columns, of the axes `(*copies, *outputs, magnitude)`; None to leave the sum as it is.
    """

    base: Any
    a: Any
    b: Any
    num_inputs: int = eqx.field(static=True)
    num_outputs: int = eqx.field(static=True)
    gain: float = eqx.field(static=True)
    magnitude: Any = None

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
        parts = {"base": axes, "a": (*copies, *inputs, RANK), "b": (*copies, RANK, *outputs)}
        return parts | {"magnitude": (*copies, *outputs, MAGNITUDE)}

    def contract(self, text: str, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Contract an activation with the base, and with `a` and then `b`."""
        x_axes, axes, out_axes = parse_equation(text).axes
        _, inputs, outputs = self._split(axes)
        parts = self.part_axes(axes)
        a, b = (gather_weight(w, parts[name], x.dtype) for name, w in (("a", self.a), ("b", self.b)))
        kept = " ".join(str(axis) for axis in x_axes if axis not in inputs)
        between, last = " ".join(map(str, inputs)), " ".join(map(str, outputs))
        low = contract_opened(f"{' '.join(map(str, x_axes))}, {between} {RANK} -> {kept} {RANK}", x, a)
        out = " ".join(map(str, out_axes))
        correction = contract_opened(f"{kept} {RANK}, {RANK} {last} -> {out}", low, b, out_dtype)
        total = contract(text, x, jax.lax.stop_gradient(self.base), out_dtype=out_dtype) + self.gain * correction
        if self.magnitude is None:
            return total
        base = gather_weight(jax.lax.stop_gradient(self.base), axes, x.dtype).value
        spec = GatherSpec(gather_axes(axes), x.dtype.name, axes)
        norms = self._norms(base, a.value, b.value, spec)
        scale = gather(self.magnitude, " ".join(map(str, parts["magnitude"])), "float32")[..., 0] / norms
        shape = [size if axis in outputs else 1 for axis, size in zip(out_axes, total.shape)]
        order = sorted(range(len(outputs)), key=lambda dim: out_axes.index(outputs[dim]))
        return (total * scale.transpose(order).reshape(shape)).astype(total.dtype)

    def gather(self, to: GatherSpec) -> tuple[jax.Array, Any]:
        value, _ = as_weight(self.base).gather(to)
        spec_a, spec_b, spec_magnitude = self._specs(to)
        (a, kept_a), (b, kept_b) = as_weight(self.a).gather(spec_a), as_weight(self.b).gather(spec_b)
        correction = jnp.matmul(self._flat_a(a), self._flat_b(b), preferred_element_type=jnp.float32)
        total = value + (self.gain * correction).reshape(value.shape).astype(value.dtype)
        if self.magnitude is None:
            return total, (a, b, kept_a, kept_b)
        norms = self._norms(value, a, b, to)
        magnitude, kept_magnitude = as_weight(self.magnitude).gather(spec_magnitude)
        scale = magnitude[..., 0] / norms
        # Named as a gathered weight is, of whose size it is: no rematerialization policy saves it.
        total = checkpoint_name(total, GATHERED)
        scaled = (total * self._beside_inputs(scale)).astype(total.dtype)
        return scaled, (a, b, kept_a, kept_b, total, norms, scale, kept_magnitude)

    def reduce_grad(self, to: GatherSpec, kept: Any, gradient: jax.Array) -> "LowRankWeight":
        a, b, kept_a, kept_b, *of_magnitude = kept
        spec_a, spec_b, spec_magnitude = self._specs(to)
        d_magnitude = None
        if self.magnitude is not None:
            total, norms, scale, kept_magnitude = of_magnitude
            gradient = gradient.astype(jnp.float32)
            first = total.ndim - self.num_outputs - self.num_inputs
            products = jnp.sum(gradient * total.astype(jnp.float32), range(first, first + self.num_inputs))
            d_magnitude = _reduced(self.magnitude, spec_magnitude, kept_magnitude, (products / norms)[..., None])
            gradient = gradient * self._beside_inputs(scale)
        flat_a, flat_b = self._flat_a(a), self._flat_b(b)
        gradient = self.gain * gradient.reshape(*flat_a.shape[:-1], flat_b.shape[-1]).astype(jnp.float32)
        d_a = jnp.matmul(gradient, flat_b.swapaxes(-1, -2)).reshape(a.shape)
        d_b = jnp.matmul(flat_a.swapaxes(-1, -2), gradient).reshape(b.shape)
        parts = _reduced(self.a, spec_a, kept_a, d_a), _reduced(self.b, spec_b, kept_b, d_b)
        return dataclasses.replace(self, base=None, a=parts[0], b=parts[1], magnitude=d_magnitude)

    def _norms(self, base: jax.Array, a: jax.Array, b: jax.Array, to: GatherSpec) -> jax.Array:
        """Return the norms of the sum's columns over all inputs, of the axes `(*copies, *outputs)`, from gathered parts."""
        flat_a, flat_b = self._flat_a(a), self._flat_b(b)
        flat = base.reshape(*flat_a.shape[:-1], flat_b.shape[-1])
        squares = _column_squares(flat, flat_a, flat_b, self.gain)
        layout = current_layout()
        if layout is not None:
            # Inputs that stay split in the computation.
            inputs = self._split(tuple(zip(layout.storage(to.axes), to.gathers)))[1]
            squares = all_reduce(squares, tuple(axis for stored, gone in inputs for axis in stored if axis not in gone))
        norms = jnp.maximum(jnp.sqrt(squares), jnp.finfo(jnp.float32).tiny)
        return jax.lax.stop_gradient(norms).reshape(*flat.shape[:-2], *b.shape[b.ndim - self.num_outputs :])

    def _beside_inputs(self, scale: jax.Array) -> jax.Array:
        """Return a factor of each column in a shape that broadcasts over inputs."""
        first = scale.ndim - self.num_outputs
        return scale.reshape(*scale.shape[:first], *(1,) * self.num_inputs, *scale.shape[first:])

    def _split(self, axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split items, one for each axis, into those of copies, inputs and outputs."""
        last = len(axes) - self.num_outputs
        first = last - self.num_inputs
        return axes[:first], axes[first:last], axes[last:]

    def _specs(self, to: GatherSpec) -> tuple[GatherSpec, GatherSpec, GatherSpec]:
        """Return how `a`, `b` and magnitudes are gathered, in float32."""
        axes = self.part_axes(to.axes)
        copies, inputs, outputs = self._split(to.gathers)
        return (
            GatherSpec((*copies, *inputs, ()), "float32", axes["a"]),
            GatherSpec((*copies, (), *outputs), "float32", axes["b"]),
            GatherSpec((*copies, *outputs, ()), "float32", axes["magnitude"]),
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


def _column_squares(base: jax.Array, a: jax.Array, b: jax.Array, gain: float) -> jax.Array:
    """Return the sum over the rows of `(base + gain * a @ b)²`, in float32, without forming the sum.

    Args:
        base: (..., inputs, outputs).
        a: (..., inputs, rank).
        b: (..., rank, outputs).
    """

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        # Factors in few bits are multiplied exactly; in float32, a square is no place for fewer.
        return jnp.matmul(x, y, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)

    rows = a.swapaxes(-1, -2)
    wide = b.astype(jnp.float32)
    mixed = 2 * gain * product(rows, base.astype(a.dtype)) + gain**2 * product(product(rows, a), wide)
    return jnp.sum(jnp.square(base.astype(jnp.float32)), -2) + jnp.sum(mixed * wide, -2)


def column_norms(base: Any, num_inputs: int, num_outputs: int) -> jax.Array:
    """Return the norms of a matrix's columns, with which magnitudes begin: float32, of the axes `(*copies, *outputs, 1)`.

    Their bits depend neither on the sharding nor on the program around, as a parameter's first value must not depend on the
    mesh: rows are added in a fixed order, and all products are exact, so that fusing one with a sum rounds nothing otherwise.

    Args:
        base: A matrix of the axes `(*copies, *inputs, *outputs)`, or a `QuantizedWeight` of one.
    """
    values = dequantize_weights(base)
    last = values.ndim - num_outputs
    copies, outputs = values.shape[: last - num_inputs], values.shape[last:]
    x = values.astype(jnp.float32).reshape(*copies, -1, math.prod(outputs))
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    low = x - high
    total = _sum_in_order((high * high, 2 * high * low, low * low))
    return jnp.sqrt(total).reshape(*copies, *outputs, 1)


def _sum_in_order(terms: tuple[jax.Array, ...]) -> jax.Array:
    """Sum terms of the shape (..., rows, columns) over them and their rows, in an order that no sharding changes."""
    while True:
        parts = [part for term in terms for part in _cut(term)]
        x = functools.reduce(jnp.add, parts)
        if x.shape[-2] == 1:
            return x[..., 0, :]
        terms = (x,)


def _cut(x: jax.Array) -> list[jax.Array]:
    """Cut the rows, of which some may be added as zeros, into equal parts of adjacent ones: one row of each at a time."""
    short = -x.shape[-2] % _ROWS_AT_ONCE
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, short), (0, 0)]) if short else x
    parts = x.reshape(*x.shape[:-2], -1, _ROWS_AT_ONCE, x.shape[-1])
    return [parts[..., row, :] for row in range(_ROWS_AT_ONCE)]


def is_low_rank(node: Any) -> bool:
    return isinstance(node, LowRankWeight)


def low_rank_mask(params: Any) -> Any:
    """Return a tree with the structure of the parameters: True for all parts of each `LowRankWeight` but its base."""

    def masked(node: Any) -> Any:
        if not is_low_rank(node):
            return False
        trained = jax.tree.map(lambda _: True, node)
        return dataclasses.replace(trained, base=jax.tree.map(lambda _: False, node.base))

    return jax.tree.map(masked, params, is_leaf=is_low_rank)


def random_mask(params: Any) -> Any:
    """Return a tree with the structure of the parameters: True for the parts of each `LowRankWeight` that begin
    independently of its base."""

    def masked(node: Any, trained: Any) -> Any:
        if not is_low_rank(node):
            return trained
        return dataclasses.replace(trained, magnitude=None if node.magnitude is None else False)

    return jax.tree.map(masked, params, low_rank_mask(params), is_leaf=is_low_rank)


def base_weights(params: Any) -> Any:
    """Return parameters with each `LowRankWeight` replaced by its base: those of the model without adapters."""
    return jax.tree.map(lambda node: node.base if is_low_rank(node) else node, params, is_leaf=is_low_rank)


def with_base_weights(params: Any, bases: Any) -> Any:
    """Return parameters with the bases replaced by those of a model without adapters, and magnitudes by their norms.

    Of magnitudes, shapes and shardings are enough.
    """

    def replaced(node: Any, base: Any) -> Any:
        if not is_low_rank(node):
            return base
        if node.magnitude is None:
            return dataclasses.replace(node, base=base)
        norms = jax.jit(column_norms, static_argnums=(1, 2), out_shardings=node.magnitude.sharding)
        return dataclasses.replace(node, base=base, magnitude=norms(base, node.num_inputs, node.num_outputs))

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
        if node.magnitude is not None:
            norms = jnp.maximum(column_norms(total, node.num_inputs, node.num_outputs), jnp.finfo(jnp.float32).tiny)
            total = total * node._beside_inputs((node.magnitude / norms)[..., 0])
        return total.astype(base.dtype)

    return jax.tree.map(merged, params, is_leaf=lambda node: is_low_rank(node) or is_quantized(node))
