"""Parameters gathered and cast once per step, each with a separate full-precision slot for its gradient.

ZeRO-3 gathers a weight at each use and needs none of this. ZeRO-1 and ZeRO-2 gather it once per step
(`rules.zero`), and so does a pipeline, in which a stage uses each weight once per micro-batch. The gathered
copy has the compute dtype, but its gradient must not: a `StepWeight` is therefore a pair of `value` and `slot`,
and only the slot, in the parameter's dtype, is differentiated.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core.params.logical import lookup_axis
from ..core.protocols import Axes
from .collectives import scatter_dims
from .rows import GatheredRows, is_rows
from .weight_gather import gather_weight_as
from .weights import CompositeWeight, GatherSpec, gather_axes, gathers_together, is_wrapped_weight


class StepWeight(eqx.Module):
    """A gathered parameter, in place of the parameter in a module; a `WeightLike`.

    Attributes:
        value: The parameter in its compute layout and dtype; a constant.
        slot: Zeros, never read, with a gradient that is the parameter's; in the storage layout if
            `scattered`, otherwise in the compute layout.
        scattered: True to reduce-scatter the gradient at every use (ZeRO-2); False to accumulate this
            device's partial gradient unscattered (ZeRO-1).
    """

    value: Any
    slot: Any
    scattered: bool = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return self.slot.dtype

    def gather(self, to: GatherSpec) -> tuple[jax.Array, None]:
        return self.value.astype(to.dtype), None

    def reduce_grad(self, to: GatherSpec, kept: None, gradient: jax.Array) -> "StepWeight":
        gradient = gradient.astype(self.dtype)
        return StepWeight(None, scatter_dims(gradient, to.gathers) if self.scattered else gradient, self.scattered)


class FixedWeight(eqx.Module):
    """A parameter that is not differentiated, in place of the parameter: an array or a `StepWeight`."""

    value: Any


def is_weight(node: Any) -> bool:
    return isinstance(node, StepWeight)


def step_gather_dtype(axes: Axes, dtype: Any) -> Any:
    """Return the dtype in which a parameter is gathered for a whole step, given the dtype of most parameters.

    It is float32 for parameters that need it, such as those of a router, which makes discrete choices.

    >>> step_gather_dtype(("embed", "router"), jnp.bfloat16).name
    'float32'
    """
    return jnp.dtype(jnp.float32) if any(lookup_axis(axis).in_float32 for axis in axes) else dtype


def gather_params_per_step(params: Any, axes: Any, dtype: Any, *, scattered: bool) -> Any:
    """Replace each parameter by a gathered `StepWeight`.

    A parameter that needs no gather, or is not a plain array, is returned as it is; parts of a
    `CompositeWeight` may be replaced separately.

    Args:
        axes: Logical axes at each leaf, with the structure of `params`.
    """

    def one(w: Any, leaf_axes: Any) -> Any:
        if is_wrapped_weight(w) or not any(gathers := gather_axes(tuple(leaf_axes))):
            return w
        value = gather_weight_as(w, tuple(leaf_axes), gathers, step_gather_dtype(tuple(leaf_axes), dtype))
        return StepWeight(value, jnp.zeros_like(w) if scattered else jnp.zeros(value.shape, w.dtype), scattered)

    leaves, structure = jax.tree.flatten(
        params, is_leaf=lambda w: gathers_together(w) or (is_wrapped_weight(w) and not isinstance(w, CompositeWeight))
    )
    return structure.unflatten(map(one, leaves, structure.flatten_up_to(axes)))


def split_slots(params: Any) -> tuple[Any, Any]:
    """Partition parameters into (differentiated, constant): slots and values, values and indices of rows.

    A `FixedWeight` is unwrapped in the second tree; every other parameter is in the first.
    """

    def slot(w: Any) -> Any:
        if isinstance(w, FixedWeight):
            return None
        if is_rows(w):
            return GatheredRows(None, w.values, w.count)
        return StepWeight(None, w.slot, w.scattered) if is_weight(w) else w

    def value(w: Any) -> Any:
        if isinstance(w, FixedWeight):
            return w.value
        if is_rows(w):
            return GatheredRows(w.row_ids, None, w.count)
        return StepWeight(w.value, None, w.scattered) if is_weight(w) else None

    return jax.tree.map(slot, params, is_leaf=_is_pair), jax.tree.map(value, params, is_leaf=_is_pair)


def _is_pair(node: Any) -> bool:
    return is_weight(node) or is_rows(node) or isinstance(node, FixedWeight)


def slot_gradients(gradients: Any) -> Any:
    """Unwrap gradients with respect to the first result of `split_slots` into the structure of the
    parameters.
    """
    return jax.tree.map(lambda g: g.slot if is_weight(g) else g, gradients, is_leaf=is_weight)


def reduce_grads(gradients: Any, axes: Any) -> Any:
    """Unwrap gradients as `slot_gradients` does, and reduce-scatter those that are not yet in their storage
    layout.

    Args:
        axes: Logical axes at each leaf, with the structure of the parameters.
    """

    def one(gradient: Any, leaf_axes: Any) -> Any:
        if not is_weight(gradient):
            return gradient
        return gradient.slot if gradient.scattered else scatter_dims(gradient.slot, gather_axes(tuple(leaf_axes)))

    leaves, structure = jax.tree.flatten(gradients, is_leaf=lambda node: node is None or is_weight(node))
    return structure.unflatten(map(one, leaves, structure.flatten_up_to(axes)))
