"""Gathering of weights: from the stored shard to the value that a matmul reads, and from a gradient back to
the shard.

    gathered = gather_weight(w, "embed ffn", x.dtype)

`gathered.value` is the weight in its compute layout, a constant. `gathered.slot` is zeros that nothing reads.
A layer returns its gradient with respect to the slot: this device's partial sum of the weight's gradient, in
float32, which is then converted to the storage layout and dtype of the weight. Everything that reads a
parameter (`contract`, `gather`, `add_bias`, embeddings, experts, the loss) uses this module.

A parameter need not be an array: anything that implements `WeightLike` can replace it, such as an int8 base
with adapters, rows of a table, or a weight gathered once per step (`step_gather.py`).
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..core.layout.layout import MeshAxes, current_layout
from ..core.protocols import Axes
from .collectives import scatter_dims
from .weight_gather import gather_weight_as

GATHERED = "gathered_weight"
"""Name of gathered weights in rematerialization policies. They are unsharded over fsdp and must never be
saved.
"""


class GatherSpec(NamedTuple):
    """How to gather a weight: the mesh axes of each dimension, the dtype of the result, and the logical axes.

    Attributes:
        gathers: For each dimension, the mesh axes that shard it in storage but not in computation.
        dtype: Name of the value's dtype.
        axes: Logical axes of the weight.
    """

    gathers: tuple[MeshAxes, ...]
    dtype: str
    axes: Axes = ()


@runtime_checkable
class WeightLike(Protocol):
    """A stored weight: a pytree of arrays, each a device's local shard."""

    @property
    def dtype(self) -> Any:
        """The dtype of its gradient."""
        ...

    def gather(self, to: GatherSpec) -> tuple[jax.Array, Any]:
        """Return (the value in the compute layout and dtype, the arrays that `reduce_grad` needs)."""
        ...

    def reduce_grad(self, to: GatherSpec, kept: Any, gradient: jax.Array) -> Any:
        """Return the gradient of each stored array, in its dtype and layout, in this weight's structure; None
        for arrays that are not trained.

        Each is this device's partial sum over the mesh axes that do not shard the array; they are reduced
        once per step.

        Called in the backward pass, in which `self` holds shapes (`jax.ShapeDtypeStruct`) in place of arrays.

        Args:
            kept: The second result of `gather`.
            gradient: This device's partial gradient of the value, in the compute layout.
        """
        ...


@runtime_checkable
class CompositeWeight(WeightLike, Protocol):
    """A weight that is computed from parts.

    Attributes:
        has_plain_parts: True if each part is a parameter by itself, which may be gathered once per step; False if the weight
            gathers its parts together.
    """

    @property
    def has_plain_parts(self) -> bool: ...

    def part_axes(self, axes: Axes) -> Mapping[str, Axes]:
        """Return the logical axes of each part, by the name of its field, given those of the weight."""
        ...

    def contract(self, text: str, x: jax.Array, out_dtype: Any) -> jax.Array:
        """Contract an activation with the weight, by contractions with its parts; `text` as in `contract`."""
        ...


class PlainWeight(eqx.Module):
    """A plain array. It is cast before it is gathered, which halves the bytes sent if the precision is
    halved.
    """

    array: Any

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def gather(self, to: GatherSpec) -> tuple[jax.Array, None]:
        return gather_weight_as(self.array, to.axes, to.gathers, to.dtype), None

    def reduce_grad(self, to: GatherSpec, kept: None, gradient: jax.Array) -> "PlainWeight":
        return PlainWeight(scatter_dims(gradient.astype(self.dtype), to.gathers))


class GatheredWeight(NamedTuple):
    """A weight in its compute layout.

    Attributes:
        value: The weight; a constant.
        slot: Zeros of the same shape in the dtype of the gradient; never read.
    """

    value: jax.Array
    slot: jax.Array


class GatheredWeightWithGrad(eqx.Module):
    """A weight in its compute layout, for a layer that computes the weight's gradient in the forward pass.

    Attributes:
        value: The weight; a constant.
        weight: The differentiated weight; its `reduce_grad` gives its gradient.
        saved: The second result of its `gather`.
        spec: How it was gathered.
    """

    value: Any
    weight: Any
    saved: Any
    spec: GatherSpec = eqx.field(static=True)

    def reduce_grad(self, gradient: jax.Array) -> Any:
        """Return the gradient of `weight`, given this device's partial gradient of the value."""
        return self.weight.reduce_grad(self.spec, self.saved, gradient)


def gather_weight(w: Any, axes: Axes | str, dtype: Any) -> GatheredWeight:
    """Gather a parameter for any number of matmuls: its value in the compute layout and `dtype`, and a
    gradient slot.

    Args:
        w: An array in its storage layout, or a `WeightLike`.
        axes: Its logical axes, as a tuple or separated by spaces.

    >>> gathered = gather_weight(jnp.ones((2, 3)), "embed ffn", jnp.bfloat16)
    >>> gathered.value.dtype.name, gathered.slot.dtype.name
    ('bfloat16', 'float32')
    """
    return _open(_opening(axes, dtype), as_weight(w))


def gather_weight_early(w: Any, axes: Axes | str, dtype: Any) -> GatheredWeightWithGrad:
    """Gather a parameter for a layer that computes the weight's gradient in the forward pass.

    Unlike with `gather_weight`, the layer can convert the gradient to the storage layout at once instead of
    keeping it unsharded until the backward pass.
    """
    to, weight = _opening(axes, dtype), as_weight(w)
    value, kept = jax.tree.map(jax.lax.stop_gradient, weight).gather(to)
    return GatheredWeightWithGrad(checkpoint_name(value, GATHERED), weight, kept, to)


def gather_axes(axes: Axes) -> tuple[MeshAxes, ...]:
    """Return, for each dimension, the mesh axes that shard a parameter in storage but not in computation."""
    layout = current_layout()
    if layout is None:
        return ((),) * len(axes)
    return tuple(
        tuple(axis for axis in stored if axis not in computed)
        for stored, computed in zip(layout.storage(axes), layout.compute(axes))
    )


def is_wrapped_weight(w: Any) -> bool:
    """Return True if `w` is a weight other than a plain array."""
    return isinstance(w, WeightLike)


def gathers_together(w: Any) -> bool:
    """Return True if `w` is a weight that gathers its parts by itself, each time that it is read."""
    return isinstance(w, CompositeWeight) and not w.has_plain_parts


def _opening(axes: Axes | str, dtype: Any) -> GatherSpec:
    axes = tuple(axes.split()) if isinstance(axes, str) else axes
    return GatherSpec(gather_axes(axes), jnp.dtype(dtype).name, axes)


def as_weight(w: Any) -> WeightLike:
    """Return a parameter as a `WeightLike`."""
    return w if is_wrapped_weight(w) else PlainWeight(w)


class _Shapes(eqx.Module):
    """Structure and shapes of a weight, without its arrays."""

    structure: Any = eqx.field(static=True)
    leaves: tuple[jax.ShapeDtypeStruct, ...] = eqx.field(static=True)

    @classmethod
    def of(cls, weight: WeightLike) -> "_Shapes":
        leaves, structure = jax.tree.flatten(weight)
        return cls(structure, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))

    @property
    def weight(self) -> WeightLike:
        return self.structure.unflatten(self.leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _open(to: GatherSpec, weight: WeightLike) -> GatheredWeight:
    return _open_forward(to, weight)[0]


def _open_forward(to: GatherSpec, weight: WeightLike) -> tuple[GatheredWeight, Any]:
    value, kept = weight.gather(to)
    # Named, so that every rematerialization policy drops the gathered copy and the backward pass gathers it
    # again, once.
    value = checkpoint_name(value, GATHERED)
    return GatheredWeight(value, jnp.zeros(value.shape, weight.dtype)), (_Shapes.of(weight), kept)


def _open_backward(to: GatherSpec, saved: tuple[_Shapes, Any], gradient: GatheredWeight) -> tuple[Any]:
    shapes, kept = saved
    return (shapes.weight.reduce_grad(to, kept, gradient.slot),)


_open.defvjp(_open_forward, _open_backward)
