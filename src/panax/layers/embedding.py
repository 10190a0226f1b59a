"""Token and position embeddings, and the output head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import Module, current_layout, normal, parameter
from ..core.errors import LayoutError
from ..core.layout.layout import MeshAxes
from ..core.params.module import Initializer
from ..core.protocols import Axes
from ..spmd import (
    WeightOp,
    apply_weight_op,
    gather_weight,
    local_sequence,
    reduce_scatter_sequence,
    sequence_parallel_axes,
    token_axes,
)
from ..spmd.collectives import axis_index
from ..spmd.linear import psum_both
from ..spmd.sharding_marks import ValueState, assert_sharding
from ..spmd.weights import GatheredWeight


class Embedding(Module):
    """A table with a vector for each token."""

    table: Float[Array, "vocab embed"] = parameter(normal(std=0.02))

    def __call__(self, tokens: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch residual embed"]:
        """Look up the tokens; with a sharded vocabulary, each device reads the tokens in its shard and the
        results are summed.

        Raises:
            LayoutError: The vocabulary is sharded over axes that shard the tokens, or over axes other than
                those of the residual stream.
        """
        layout = current_layout()
        split = () if layout is None else layout.compute(("vocab",))[0]
        if split:
            _check_split(split)
        table = gather_weight(self.table, "vocab embed", dtype)
        if not split:
            return _looked_up(table, local_sequence(tokens))
        rows = table.value.shape[0]
        local = tokens.astype(jnp.int32) - axis_index(split) * rows
        inside = (local >= 0) & (local < rows)
        # A token in another device's shard reads zeros and receives no gradient.
        part = _looked_up(table, jnp.where(inside, local, rows))
        part = assert_sharding(part, dict.fromkeys(split, ValueState.PARTIAL))
        return reduce_scatter_sequence(part) if sequence_parallel_axes() else psum_both(part, split)


class PositionEmbedding(Module):
    """A table with a learned vector for each position."""

    table: Float[Array, "position embed"] = parameter(normal(std=0.02))

    def __call__(self, position: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch residual embed"]:
        return _looked_up(gather_weight(self.table, "position embed", dtype), local_sequence(position))


class Head(Module):
    """The projection from the residual stream to the vocabulary, stored like the embedding to which it may be
    tied."""

    table: Float[Array, "vocab embed"] = parameter(normal("embed"))


def init_padded(init: Initializer, rows: int) -> Initializer:
    """Wrap `init` to set rows beyond the first `rows` to zero. They receive no gradient, so they stay
    zero."""

    def draw(key: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        real = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < rows
        return jnp.where(real, init(key, shape, axes), 0.0)

    return draw


def _check_split(split: MeshAxes) -> None:
    over, tokens = sequence_parallel_axes(), [axis for axis in split if axis in token_axes()]
    if tokens:
        raise LayoutError(
            f"rules.compute: vocab -> {split}, and {tokens[0]} splits the tokens; devices that look up different tokens can't "
            f"share a vocabulary: split it over tensor"
        )
    if over and set(over) != set(split):
        raise LayoutError(
            f"rules.compute: vocab is split over {split}, and the positions of the residual stream over {over}; split both over "
            f"the same mesh axes, or only one of them"
        )


def _looked_up(table: GatheredWeight, index: jax.Array) -> jax.Array:
    return apply_weight_op(_LookUp(table.value.shape[0]), index, table)


@dataclasses.dataclass(frozen=True)
class _LookUp(WeightOp):
    """Gather of table rows; indices past the end give zeros."""

    rows: int

    def forward(self, inputs: jax.Array, *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        return weights[0].value.at[inputs].get(mode="fill", fill_value=0), inputs

    def backward(self, saved: jax.Array, gradient: jax.Array, *dtypes: Any) -> tuple[None, list[jax.Array]]:
        # A frequent token's gradient sums thousands of terms, so accumulate in the parameter's dtype.
        wide = gradient.astype(dtypes[0])
        # Tie the zeros to the gradient: otherwise XLA merges them with the loss's and keeps them for the whole backward.
        wide, zero = jax.lax.optimization_barrier((wide, jnp.zeros((), wide.dtype)))
        whole = jnp.broadcast_to(zero, (self.rows, gradient.shape[-1]))
        return None, [whole.at[saved].add(wide, mode="drop")]
