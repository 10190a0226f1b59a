"""`RecordedCache`: a layer's cache in generation, with the experts that its router chose for each position."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from ..attention.attention import write_positions
from .moe_config import MoE
from .routing import Assignments


class RecordedCache(NamedTuple):
    """A mixture layer's cache, and the choices of its router.

    Rows that copy a cache copy the choices for its positions, so that each row has those of its whole prompt.

    Attributes:
        layer: The cache of the layer itself.
        experts: Of each position that was run, in the router's order; the number of experts for padding.
    """

    layer: Any
    experts: Int[Array, "rows length active"]

    @classmethod
    def create(cls, layer: Any, moe: MoE, rows: int, length: int) -> "RecordedCache":
        """Return a cache without choices."""
        return cls(layer, jnp.zeros((rows, length, moe.active), jnp.int32))

    @classmethod
    def axes(cls, layer: Any) -> "RecordedCache":
        """Return the logical axes of the arrays, given those of the layer's own."""
        return cls(layer, ("batch", None, None))  # pyright: ignore[reportArgumentType]

    def write(self, layer: Any, assigned: Assignments, start: Int[Array, " rows"]) -> "RecordedCache":
        """Return the cache after each row's next positions.

        Args:
            layer: The layer's own cache after them.
            assigned: Of a router in which each token chooses.
            start: Index of each row's first new position.
        """
        rows, _, active = self.experts.shape
        chosen = assigned.expert.reshape(rows, -1, active)
        return RecordedCache(layer, write_positions(self.experts, chosen, start))


def split_cache(cache: Any) -> tuple[RecordedCache | None, Any]:
    """Return the record of a layer's cache, if it has one, and the cache of the layer itself."""
    return (cache, cache.layer) if isinstance(cache, RecordedCache) else (None, cache)
