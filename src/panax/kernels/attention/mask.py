"""Static rule of the keys that a query may see, and the resulting blocks of the score matrix.

The rule is plain Python: the pairs of blocks with at least one visible key are known before tracing, so that
a kernel only works on those pairs. Causal attention then costs half of the full square, and a window costs
time linear in the length.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Stand-ins for minus infinity with finite differences, so that no row can become NaN: masked scores are so
# far below the lowest running maximum that their exponential is exactly 0, even if a row sees no key at all.
MASKED = -1e30
MIN_MAXIMUM = -1e20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskRule:
    """A mask that depends only on positions; positions count from the start of both sequences.

    Below, `i` is a query's position with the offset added to it.

    Attributes:
        causal: A query at `i` sees keys at `j <= i`.
        window: With `causal`, a query at `i` sees keys in `(i - window, i]`, `window` of them, including
            itself. Without `causal`, it sees keys with `|i - j| <= window`, `2 * window + 1` of them. The two
            meanings are those of `sliding_window` in Hugging Face's `transformers.masking_utils`.
        offset: Distance of the first query from the first key, if both are pieces of one longer sequence.
    """

    causal: bool
    window: int | None
    offset: int = 0

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1, or None for no window")

    @property
    def is_full(self) -> bool:
        """Return True if every query sees every key."""
        return not self.causal and self.window is None

    def allows(self, query: Int[Array, "..."], key: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Return True where the query at a position sees the key at a position; the two broadcast against
        each other."""
        query = query + self.offset
        allowed = (key <= query) if self.causal else (key == key) & (query == query)
        if self.window is not None:
            allowed &= key > query - self.window if self.causal else jnp.abs(query - key) <= self.window
        return allowed

    def block_allows(self, query: tuple[int, int], key: tuple[int, int]) -> bool:
        """Return True if any query in the half-open range sees any key in the half-open range."""
        (query_start, query_stop), (key_start, key_stop) = (query[0] + self.offset, query[1] + self.offset), key
        if self.causal and key_start > query_stop - 1:
            return False
        if self.window is None:
            return True
        reach_left = self.window - 1 if self.causal else self.window
        return key_stop - 1 >= query_start - reach_left and (self.causal or key_start <= query_stop - 1 + self.window)

    def block_allows_all(self, query: tuple[int, int], key: tuple[int, int]) -> bool:
        """Return True if every query in the half-open range sees every key in the half-open range.

        >>> MaskRule(causal=True, window=4, offset=2).block_allows_all((0, 2), (0, 2))
        True
        """
        # Minimum and maximum distance of a query behind a key.
        nearest, farthest = query[0] + self.offset - (key[1] - 1), query[1] - 1 + self.offset - key[0]
        if self.causal:
            return nearest >= 0 and (self.window is None or farthest < self.window)
        return self.window is None or max(-nearest, farthest) <= self.window

    def block_pairs(self, query_seq: int, key_seq: int, query_block: int, key_block: int) -> list[tuple[int, int]]:
        """List the (query block, key block) pairs with a visible key, ordered by query block.

        >>> MaskRule(causal=True, window=None).block_pairs(6, 6, 2, 2)
        [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
        >>> MaskRule(causal=True, window=2).block_pairs(6, 6, 2, 2)
        [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
        """
        return [
            (i // query_block, j // key_block)
            for i in range(0, query_seq, query_block)
            for j in range(0, key_seq, key_block)
            if self.block_allows((i, min(i + query_block, query_seq)), (j, min(j + key_block, key_seq)))
        ]
