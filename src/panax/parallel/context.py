"""Assignment of a row's tokens to devices if sequences are sharded over the "context" mesh axis.

In zigzag order, a row is cut into 2n equal chunks, and device i of n holds chunks i and 2n-1-i. Under a
causal mask, the cost of a chunk is proportional to the number of chunks before it, so every device's pair
costs the same. In contiguous order, for tasks that read neighboring positions (`Task.row_order`), device i
holds the i-th of n equal parts, and the last one's attention costs twice the mean.

Source: Llama 3 (arXiv:2407.21783), section 3.3.2. Striped attention (arXiv:2311.09431) balances by
distributing single tokens, which puts the diagonal into every block of scores; whole chunks leave full
blocks.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from panax.core.layout.layout import Layout, row_order
from panax.core.protocols import RowOrder


class ContextAxis(NamedTuple):
    """The mesh axis that shards rows.

    Attributes:
        size: Number of devices along it.
        order: Which part of a row a device holds.
    """

    name: str
    size: int
    order: RowOrder = "zigzag"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSizes:
    """Sizes on one device of a layer's attention, before any exchange.

    Attributes:
        itemsize: Bytes per element of q, k and v.
        packed: True if there are segments.
    """

    batch: int
    local_seq: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    packed: bool


class WireBytes(NamedTuple):
    """Bytes that one device sends for one layer's attention."""

    forward: int
    backward: int


def zigzag_parts(layout: Layout) -> int:
    """Return the number of devices over which a row's positions are interleaved; 1 if they are in order."""
    return layout.sizes["context"] if layout.row_order == "zigzag" else 1


def zigzag_order(length: int, n: int) -> np.ndarray:
    """Return the permutation of a row after which its n equal parts are those of the n devices.

    Raises:
        ValueError: The row cannot be cut into 2n equal chunks.

    >>> zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if n == 1:
        return np.arange(length)
    if length % (2 * n):
        raise ValueError(
            f"length={length} is not divisible by 2 * context={2 * n}, the chunks that a row is cut into; use a length "
            f"of {length // (2 * n) * 2 * n} or {-(-length // (2 * n)) * 2 * n}"
        )
    chunks = np.arange(length).reshape(2 * n, -1)
    return np.stack([chunks[:n], chunks[::-1][:n]], axis=1).reshape(-1)


def zigzag_inverse(length: int, n: int) -> np.ndarray:
    """Return the inverse permutation of `zigzag_order`.

    >>> zigzag_order(8, 2)[zigzag_inverse(8, 2)].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return np.argsort(zigzag_order(length, n))


def sequence_positions(
    local_length: int, *, context: int, tensor: int = 1, order: RowOrder | None = None
) -> Int[Array, " seq"]:
    """Return the index in the global row of each token that this device holds.

    Must be called with the mesh axes "context" and "tensor" manual; an axis of size 1 need not exist.

    Args:
        local_length: Tokens of a row on this device, after its part is split into `tensor` equal contiguous
            parts.
        context: Size of the mesh axis "context".
        tensor: Size of the mesh axis "tensor" if it shards the sequence, otherwise 1.
        order: By default that of the current layout.

    Raises:
        ValueError: The order is zigzag, and a device's part cannot be cut into two equal chunks.

    >>> sequence_positions(3, context=1).tolist()
    [0, 1, 2]
    """
    part = local_length * tensor
    place = jnp.arange(local_length, dtype=jnp.int32)
    if tensor > 1:
        place = place + jax.lax.axis_index("tensor") * local_length
    if context == 1:
        return place
    if (order or row_order()) == "contiguous":
        return place + jax.lax.axis_index("context") * part
    if part % 2:
        raise ValueError(
            f"a device's part of a row, {local_length=} * {tensor=} = {part} tokens, can't be cut into two equal chunks; "
            f"use a row length that is divisible by 2 * context={2 * context}"
        )
    chunk, device = part // 2, jax.lax.axis_index("context")
    early, late = device * chunk, (2 * context - 1 - device) * chunk
    return jnp.where(place < chunk, early + place, late + place - chunk)
