"""Per-layer gradient clipping: to a norm, or to a fraction of the norm of the weights."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.params.axes import named_leaves, path_name
from ..core.protocols import Axes
from ..kernels.precision import accumulation_dtype
from .parameter import Parameter
from .sharded.shard import ParameterShard, partition_spec, shard_map_over_params

MIN_NORM = 1e-3
"""Minimum weight norm in adaptive clipping, so that weights initialized with zeros can move
(arXiv:2102.06171)."""


def clip_by_layer(
    gradients: Any,
    params: Any,
    axes: Mapping[str, Axes],
    norm: float | None = None,
    ratio: float | None = None,
    meanings: Mapping[str, Axes] | None = None,
) -> Any:
    """Scale down the gradient of each layer's, and each expert's, array if it is too large.

    Args:
        axes: Parameter name to the logical axes that determine its sharding.
        norm: Maximum gradient norm of an array; None for no limit.
        ratio: Maximum norm of the gradient of one output's weights (a column of a matrix, a whole norm or
            bias), relative to the norm of those weights (adaptive clipping, arXiv:2102.06171); None for no
            limit.
        meanings: Parameter name to the logical axes that determine its role; None: `axes`.
    """
    leaves, values = named_leaves(gradients), named_leaves(params)
    kinds = axes if meanings is None else meanings
    parameters = {name: Parameter.of(name, values[name], axes[name], kinds[name]) for name in leaves}

    def local(gradients: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: _clipped(ParameterShard.of(p), gradients[name], values[name], norm, ratio)
            for name, p in parameters.items()
        }

    places = {name: partition_spec(parameter.axes, parameter.shape) for name, parameter in parameters.items()}
    result = shard_map_over_params(local, (places, places), places)(leaves, {name: values[name] for name in leaves})
    paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
    return structure.unflatten([result[path_name(path)] for path, _ in paths])


def _clipped(
    shard: ParameterShard, gradient: jax.Array, value: jax.Array, norm: float | None, ratio: float | None
) -> jax.Array:
    wide = gradient.astype(accumulation_dtype(gradient.dtype))
    if norm is not None:
        wide = _scale_down(wide, shard.norm(wide), jnp.asarray(norm, wide.dtype))
    if ratio is not None:
        into = shard.parameter.matrix
        dims = shard.parameter.array_dims if into is None else into[0]
        weights = jnp.maximum(shard.norm(value, dims), MIN_NORM)
        wide = _scale_down(wide, shard.norm(wide, dims), ratio * weights.astype(wide.dtype))
    return wide.astype(gradient.dtype)


def _scale_down(gradient: jax.Array, norm: jax.Array, max_norm: jax.Array) -> jax.Array:
    """Scale a gradient down to norm `max_norm` if its norm is larger."""
    return jnp.where(norm > max_norm, gradient * (max_norm / jnp.where(norm > 0, norm, 1)), gradient)
