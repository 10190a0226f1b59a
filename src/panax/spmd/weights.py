"""Opening a weight: from its bytes at rest to the value that a product reads, and from a gradient back to what rests.

    opened = open_weight(w, "embed ffn", x.dtype)

`opened.value` is the weight in its compute layout, a constant. `opened.slot` is zeros that nothing reads: what a layer returns as
its gradient, this device's share of the weight's in float32, is brought back into the layout and dtype that the weight rests in.
All that reads a parameter (`contract`, `gather`, `add_bias`, embeddings, experts, the loss) stands on this.

A parameter need not be an array. Anything that implements `WeightLike` can take its place: an int8 base with adapters, rows of a
table, a weight gathered once per step (`once.py`).
"""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..core.layout import MeshAxes, current_layout
from ..core.protocols import Axes
from .collectives import scatter_dims
from .gathering import gather_weight_as

GATHERED = "gathered_weight"
"""The name under which a rematerialisation policy knows an opened weight: whole over fsdp, and never to be kept."""


class GatherSpec(NamedTuple):
    """What a weight is opened to.

    Attributes:
        gathers: For each dimension, the mesh axes that it is stored over and not computed over.
        dtype: The value's.
        axes: Its logical axes.
    """

    gathers: tuple[MeshAxes, ...]
    dtype: str
    axes: Axes = ()


@runtime_checkable
class WeightLike(Protocol):
    """A weight as it rests between its uses: a pytree of arrays, each a device's own shard."""

    @property
    def dtype(self) -> Any:
        """What its gradient is formed in."""
        ...

    def open(self, to: GatherSpec) -> tuple[jax.Array, Any]:
        """(its value in the compute layout and dtype, the arrays that `returned` needs)."""
        ...

    def returned(self, to: GatherSpec, kept: Any, gradient: jax.Array) -> Any:
        """The gradient of each array at rest, in its dtype and layout: this weight's structure, None for what is not trained.

        Each is this device's share over the mesh axes that the array is not split over; these are summed once a step.

        Called in the backward pass, where `self` holds shapes (`jax.ShapeDtypeStruct`) in place of arrays.

        Args:
            kept: What `open` gave.
            gradient: This device's share of the value's gradient, in the compute layout.
        """
        ...


class PlainWeight(eqx.Module):
    """A plain array: cast as it is stored, and only then gathered, which halves the bytes where the precision is halved."""

    array: Any

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def open(self, to: GatherSpec) -> tuple[jax.Array, None]:
        return gather_weight_as(self.array, to.axes, to.gathers, to.dtype), None

    def returned(self, to: GatherSpec, kept: None, gradient: jax.Array) -> "PlainWeight":
        return PlainWeight(scatter_dims(gradient.astype(self.dtype), to.gathers))


class GatheredWeight(NamedTuple):
    """A weight in its compute layout.

    Attributes:
        value: A constant.
        slot: Zeros of the same shape, in the dtype that gradients are formed in; never read.
    """

    value: jax.Array
    slot: jax.Array


class GatheredWeightWithGrad(eqx.Module):
    """A weight in its compute layout, for a layer that forms its gradient in the forward pass.

    Attributes:
        value: A constant.
        weight: What is differentiated: `returned` gives its gradient.
    """

    value: Any
    weight: Any
    kept: Any
    to: GatherSpec = eqx.field(static=True)

    def returned(self, gradient: jax.Array) -> Any:
        """The gradient of `weight`, from this device's share of the value's."""
        return self.weight.returned(self.to, self.kept, gradient)


def gather_weight(w: Any, axes: Axes | str, dtype: Any) -> GatheredWeight:
    """A parameter for any number of products: its value in its compute layout and `dtype`, and a slot for its gradient.

    Args:
        w: An array in its storage layout, or an `WeightLike`.
        axes: Its logical axes, in a tuple or separated by spaces.

    >>> opened = gather_weight(jnp.ones((2, 3)), "embed ffn", jnp.bfloat16)
    >>> opened.value.dtype.name, opened.slot.dtype.name
    ('bfloat16', 'float32')
    """
    return _open(_opening(axes, dtype), _openable(w))


def gather_weight_early(w: Any, axes: Axes | str, dtype: Any) -> GatheredWeightWithGrad:
    """As `gather_weight`, for a layer that forms the gradient before it is asked for, and should not keep it whole until then."""
    to, weight = _opening(axes, dtype), _openable(w)
    value, kept = jax.tree.map(jax.lax.stop_gradient, weight).open(to)
    return GatheredWeightWithGrad(checkpoint_name(value, GATHERED), weight, kept, to)


def gathers_of(axes: Axes) -> tuple[MeshAxes, ...]:
    """For each dimension, the mesh axes that a parameter is stored over and not computed over."""
    layout = current_layout()
    if layout is None:
        return ((),) * len(axes)
    return tuple(
        tuple(axis for axis in stored if axis not in computed)
        for stored, computed in zip(layout.storage(axes), layout.compute(axes))
    )


def is_openable(w: Any) -> bool:
    """Whether `w` is a weight that is not a plain array."""
    return isinstance(w, WeightLike)


def _opening(axes: Axes | str, dtype: Any) -> GatherSpec:
    axes = tuple(axes.split()) if isinstance(axes, str) else axes
    return GatherSpec(gathers_of(axes), jnp.dtype(dtype).name, axes)


def _openable(w: Any) -> WeightLike:
    return w if is_openable(w) else PlainWeight(w)


class _Shapes(eqx.Module):
    """A weight without its arrays."""

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
    value, kept = weight.open(to)
    # Named, so that every rematerialisation policy drops the gathered copy and the backward pass gathers it again, once.
    value = checkpoint_name(value, GATHERED)
    return GatheredWeight(value, jnp.zeros(value.shape, weight.dtype)), (_Shapes.of(weight), kept)


def _open_backward(to: GatherSpec, saved: tuple[_Shapes, Any], gradient: GatheredWeight) -> tuple[Any]:
    shapes, kept = saved
    return (shapes.weight.returned(to, kept, gradient.slot),)


_open.defvjp(_open_forward, _open_backward)
