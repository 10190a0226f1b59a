"""A parameter that was made ready once for many uses: gathered, cast, and with a place of its own for its gradient.

ZeRO-3 gathers a weight at each use and needs nothing of this. ZeRO-1 and ZeRO-2 gather it once a step (`rules.zero`), and so
does a pipeline, whose stages use each weight once per micro-batch. The gathered copy is in the compute dtype, and its gradient
must not be: so a `Weight` is a pair, and only its `slot`, in the parameter's own dtype, is differentiated.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core.layout import MeshAxes, current_layout
from ..core.protocols import Axes
from .collectives import gather_dims, scatter_dims


class Weight(eqx.Module):
    """Stands in a module where the parameter stood.

    Attributes:
        value: In its compute layout and dtype; a constant.
        slot: Zeros, never read, whose gradient is the parameter's; in the storage layout where `scattered`, else in the compute
            layout.
        scattered: Reduce-scatter the gradient at every use (ZeRO-2), or leave this device's share whole (ZeRO-1).
    """

    value: Any
    slot: Any
    scattered: bool = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.slot.dtype


def is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


@dataclasses.dataclass(frozen=True)
class Source:
    """The static half of a weight: how to bring it into its compute layout, and its gradient back.

    Attributes:
        gathers: For each dimension, the mesh axes that it is stored over and not computed over.
        dtype: The parameter's own, which its gradient is in.
        gathered: The value is in its compute layout already, and a slot takes the gradient.
        scattered: The gradient is to be reduce-scattered into the storage layout.
    """

    gathers: tuple[MeshAxes, ...]
    dtype: str
    gathered: bool
    scattered: bool

    def place(self, value: jax.Array, dtype: Any) -> jax.Array:
        """Cast as stored, then gathered: a half of the bytes for a half of the precision."""
        value = value.astype(dtype)
        return value if self.gathered else gather_dims(value, self.gathers)

    def returned(self, gradient: jax.Array) -> jax.Array:
        """A gradient in the dtype and the layout of what it is the gradient of.

        It is this device's share still over the mesh axes that the parameter is not split over: these are summed once a step.
        """
        gradient = gradient.astype(self.dtype)
        return scatter_dims(gradient, self.gathers) if self.scattered else gradient


def opened(w: Any, axes: Axes) -> tuple[Source, jax.Array, jax.Array | None]:
    """A parameter's static half, its value, and the slot that takes its gradient where that is not the value itself."""
    gathers = gathers_of(axes)
    if is_weight(w):
        return Source(gathers, w.slot.dtype.name, True, w.scattered), w.value, w.slot
    return Source(gathers, w.dtype.name, False, True), w, None


def gathers_of(axes: Axes) -> tuple[MeshAxes, ...]:
    """For each dimension, the mesh axes that a parameter is stored over and not computed over."""
    layout = current_layout()
    if layout is None:
        return ((),) * len(axes)
    return tuple(
        tuple(axis for axis in stored if axis not in computed)
        for stored, computed in zip(layout.storage(axes), layout.compute(axes))
    )


def once_dtype(axes: Axes, dtype: Any) -> Any:
    """What a parameter is gathered in for a whole step, where most are in `dtype`: a router's, which chooses, in float32.

    >>> once_dtype(("embed", "router"), jnp.bfloat16).name
    'float32'
    """
    return jnp.dtype(jnp.float32) if "router" in axes else dtype


def gathered_once(w: jax.Array, axes: Axes, dtype: Any, *, scattered: bool) -> Any:
    """`w` as a `Weight`; itself where it is computed with as it is stored."""
    gathers = gathers_of(axes)
    if not any(gathers):
        return w
    value = gather_dims(w.astype(once_dtype(axes, dtype)), gathers)
    slot = jnp.zeros_like(w) if scattered else jnp.zeros(value.shape, w.dtype)
    return Weight(value, slot, scattered)


def split_slots(params: Any) -> tuple[Any, Any]:
    """(what is differentiated, the rest): slots against values; every other parameter is in the first."""
    slots = jax.tree.map(lambda w: Weight(None, w.slot, w.scattered) if is_weight(w) else w, params, is_leaf=is_weight)
    values = jax.tree.map(
        lambda w: Weight(w.value, None, w.scattered) if is_weight(w) else None, params, is_leaf=is_weight
    )
    return slots, values


def slot_gradients(gradients: Any) -> Any:
    """Gradients by what `split_slots` gave, in the structure of the parameters."""
    return jax.tree.map(lambda g: g.slot if is_weight(g) else g, gradients, is_leaf=is_weight)
