"""Adapters merged into their matrices, and how far the model's answers move by it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core.errors import RecipeError
from ..layers import Context
from ..spmd.composite.low_rank import is_low_rank, merge_low_rank
from .decoder.logits import compute_logits
from .decoder.model import Decoder

MAX_DIVERGENCE = 1e-3
"""Largest mean divergence, in nats for each token, with which a merged model is taken for the same."""

_ROWS, _LENGTH = 64, 32


class MergeDifference(NamedTuple):
    """How far a merged model's predictions are from those with the adapters beside the matrices.

    Attributes:
        mean: The mean Kullback-Leibler divergence over all positions, in nats.
        largest: The largest one of a position.
        changed: Share of positions at which another token is the likeliest.
    """

    mean: float
    largest: float
    changed: float

    def describe(self) -> str:
        """
        >>> MergeDifference(2e-7, 3e-6, 0.0).describe()
        'a mean divergence of 2e-07 nats (at most 3.0e-06), another likeliest token at 0.00% of positions'
        """
        return (
            f"a mean divergence of {self.mean:.0e} nats (at most {self.largest:.1e}), another likeliest token at "
            f"{self.changed:.2%} of positions"
        )


def has_adapters(params: Any) -> bool:
    """Return True if a weight has an adapter beside it."""
    return any(map(is_low_rank, jax.tree.leaves(params, is_leaf=is_low_rank)))


def merge_adapters(params: Any, dtype: str | None = None) -> Any:
    """Return a model with each adapter added to its matrix, in float32, and rounded once; without adapters, with its weights.

    Args:
        dtype: Dtype of all weights; None for that of each base.
    """
    merged = merge_low_rank(params)
    return merged if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), merged)


def compare_merged(params: Decoder, merged: Decoder, *, seed: int = 0) -> MergeDifference:
    """Compare the predictions of a decoder with adapters and of the merged one, computed in float32.

    The inputs are 64 rows of 32 drawn tokens.
    """
    config = params.config
    shape = (_ROWS, 1, min(_LENGTH, config.max_length))
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=shape, dtype=np.int32)
    values = np.array([jax.device_get(_divergences(params, merged, jnp.asarray(row))) for row in tokens])
    return MergeDifference(float(values[:, 0].mean()), float(values[:, 0].max()), float(values[:, 1].mean()))


@jax.jit
def _divergences(params: Decoder, merged: Decoder, tokens: Int[Array, "1 seq"]) -> Float[Array, "2 seq"]:
    """Return the divergence at each position, and 1 if another token is the likeliest."""
    before, after = (jax.nn.log_softmax(_logits(each, tokens)) for each in (params, merged))
    divergence = jnp.sum(jnp.exp(before) * (before - after), axis=-1)
    changed = before.argmax(-1) != after.argmax(-1)
    return jnp.stack([jnp.maximum(divergence[0], 0.0), changed[0].astype(jnp.float32)])


def _logits(params: Decoder, tokens: Int[Array, "1 seq"]) -> Float[Array, "1 seq vocab"]:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, _ = params(tokens, Context(positions), dtype=jnp.float32)
    return compute_logits(params, hidden)


def check_merged(difference: MergeDifference, *, accept: bool) -> None:
    """Raise a RecipeError if a merged model predicts other tokens than its adapters do, and that is not accepted."""
    if difference.mean > MAX_DIVERGENCE and not accept:
        raise RecipeError(
            f"the merged model differs from the adapters by {difference.describe()}; expected a mean of at most "
            f"{MAX_DIVERGENCE:g}. Its weights are rounded too much: merge with --dtype float32, or accept it with "
            f"--accept-difference"
        )
