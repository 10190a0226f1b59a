"""A parameter that was made ready once for many uses: gathered, cast, and with a place of its own for its gradient.

ZeRO-3 opens a weight at each use and needs nothing of this. ZeRO-1 and ZeRO-2 gather it once a step (`rules.zero`), and so
does a pipeline, whose stages use each weight once per micro-batch. The gathered copy is in the compute dtype, and its gradient
must not be: so a `Weight` is a pair, and only its `slot`, in the parameter's own dtype, is differentiated.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core.logical import traits_of
from ..core.protocols import Axes
from .collectives import scatter_dims
from .gathering import gather_weight_as
from .rows import GatheredRows, is_rows
from .weights import GatherSpec, gathers_of, is_openable


class Weight(eqx.Module):
    """Stands in a module where the parameter stood; an `WeightLike`.

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

    def open(self, to: GatherSpec) -> tuple[jax.Array, None]:
        return self.value.astype(to.dtype), None

    def returned(self, to: GatherSpec, kept: None, gradient: jax.Array) -> "Weight":
        gradient = gradient.astype(self.dtype)
        return Weight(None, scatter_dims(gradient, to.gathers) if self.scattered else gradient, self.scattered)


def is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


def once_dtype(axes: Axes, dtype: Any) -> Any:
    """What a parameter is gathered in for a whole step, where most are in `dtype`: some in float32, as a router's, which chooses.

    >>> once_dtype(("embed", "router"), jnp.bfloat16).name
    'float32'
    """
    return jnp.dtype(jnp.float32) if any(traits_of(axis).in_float32 for axis in axes) else dtype


def gather_params_per_step(params: Any, axes: Any, dtype: Any, *, scattered: bool) -> Any:
    """Each parameter as a `Weight`; itself where it is computed with as it is stored, or is not a plain array.

    Args:
        axes: Like `params`, the logical axes at each leaf.
    """

    def one(w: Any, leaf_axes: Any) -> Any:
        if is_openable(w) or not any(gathers := gathers_of(tuple(leaf_axes))):
            return w
        value = gather_weight_as(w, tuple(leaf_axes), gathers, once_dtype(tuple(leaf_axes), dtype))
        return Weight(value, jnp.zeros_like(w) if scattered else jnp.zeros(value.shape, w.dtype), scattered)

    leaves, structure = jax.tree.flatten(params, is_leaf=is_openable)
    return structure.unflatten(map(one, leaves, structure.flatten_up_to(axes)))


def split_slots(params: Any) -> tuple[Any, Any]:
    """(what is differentiated, the rest): slots against values, and rows against their numbers; every other parameter is in the
    first."""

    def slot(w: Any) -> Any:
        if is_rows(w):
            return GatheredRows(None, w.values, w.count)
        return Weight(None, w.slot, w.scattered) if is_weight(w) else w

    def value(w: Any) -> Any:
        if is_rows(w):
            return GatheredRows(w.numbers, None, w.count)
        return Weight(w.value, None, w.scattered) if is_weight(w) else None

    return jax.tree.map(slot, params, is_leaf=_is_pair), jax.tree.map(value, params, is_leaf=_is_pair)


def _is_pair(node: Any) -> bool:
    return is_weight(node) or is_rows(node)


def slot_gradients(gradients: Any) -> Any:
    """Gradients by what `split_slots` gave, in the structure of the parameters."""
    return jax.tree.map(lambda g: g.slot if is_weight(g) else g, gradients, is_leaf=is_weight)


def reduce_grads(gradients: Any, axes: Any) -> Any:
    """As `slot_gradients`, each in its parameter's storage layout: what was left whole at every use is scattered now.

    Args:
        axes: Like the parameters, the logical axes at each leaf.
    """

    def one(gradient: Any, leaf_axes: Any) -> Any:
        if not is_weight(gradient):
            return gradient
        return gradient.slot if gradient.scattered else scatter_dims(gradient.slot, gathers_of(tuple(leaf_axes)))

    leaves, structure = jax.tree.flatten(gradients, is_leaf=lambda node: node is None or is_weight(node))
    return structure.unflatten(map(one, leaves, structure.flatten_up_to(axes)))
