"""Gradients scaled down layer by layer: to a norm, or to a share of the norm of the weights they belong to."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.axes import named_leaves, path_name
from ..core.protocols import Axes
from ..kernels.precision import accumulation_dtype
from .parameter import Parameter
from .shard import ParameterShard, partition_spec, shard_map_over_params

LEAST_NORM = 1e-3
"""What weights of a smaller norm count as, so that those that begin with zeros move at all (arXiv:2102.06171)."""


def clipped_by_layer(
    gradients: Any,
    params: Any,
    axes: Mapping[str, Axes],
    norm: float | None = None,
    ratio: float | None = None,
    meanings: Mapping[str, Axes] | None = None,
) -> Any:
    """Gradients of which each layer's, and each expert's, own array is scaled down where it is too large.

    Args:
        axes: Parameter name to logical axes.
        norm: The largest norm of an own array's gradient; None for any.
        ratio: The largest norm of the gradients of what goes into one output (a column of a weight, a whole norm or bias), as a
            share of the norm of its weights (adaptive clipping, arXiv:2102.06171); None for any.
        meanings: The logical axes that say what each parameter is; None: `axes`.
    """
    found, values = named_leaves(gradients), named_leaves(params)
    kinds = axes if meanings is None else meanings
    parameters = {name: Parameter.of(name, values[name], axes[name], kinds[name]) for name in found}

    def local(gradients: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: _clipped(ParameterShard.of(p), gradients[name], values[name], norm, ratio)
            for name, p in parameters.items()
        }

    places = {name: partition_spec(parameter.axes, parameter.shape) for name, parameter in parameters.items()}
    result = shard_map_over_params(local, (places, places), places)(found, {name: values[name] for name in found})
    paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
    return structure.unflatten([result[path_name(path)] for path, _ in paths])


def _clipped(
    shard: ParameterShard, gradient: jax.Array, value: jax.Array, norm: float | None, ratio: float | None
) -> jax.Array:
    wide = gradient.astype(accumulation_dtype(gradient.dtype))
    if norm is not None:
        wide = _at_most(wide, shard.norm(wide), jnp.asarray(norm, wide.dtype))
    if ratio is not None:
        into = shard.parameter.matrix
        dims = shard.parameter.own if into is None else into[0]
        weights = jnp.maximum(shard.norm(value, dims), LEAST_NORM)
        wide = _at_most(wide, shard.norm(wide, dims), ratio * weights.astype(wide.dtype))
    return wide.astype(gradient.dtype)


def _at_most(gradient: jax.Array, norm: jax.Array, most: jax.Array) -> jax.Array:
    """Scaled down to the norm `most`, where its own is larger."""
    return jnp.where(norm > most, gradient * (most / jnp.where(norm > 0, norm, 1)), gradient)
