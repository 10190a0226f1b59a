"""Attention between chunks in a ring: which chunks meet, under which mask, and their results.

A chunk pair is one chunk of this device's queries against one chunk of the keys it currently holds. Which
chunks these are, and their distance in the row, differs between devices, so both may be traced. The mask of a
pair is static nevertheless: all possible distances are known when the program is built, and with them the few
masks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from panax.core.layout.target import Target
from panax.core.protocols import RowOrder
from panax.kernels.attention.blockwise import flash_backward, flash_forward
from panax.kernels.attention.layout import choose_blocks
from panax.kernels.attention.mask import MASKED, MaskRule
from panax.kernels.attention.operands import AttentionOperands, OutputGradient, ScoreRule
from panax.kernels.precision import accumulation_dtype
from panax.parallel.context import ContextAxis

_EVERYTHING = MaskRule(causal=False, window=None)


class ChunkPair(NamedTuple):
    """A chunk of queries against a chunk of keys.

    Attributes:
        query: 0 for the device's early chunk, 1 for its late one; always 0 for contiguous rows, which are one
            chunk.
        key: The same, on the device that owns the keys.
        distance: Number of chunks from the keys to the queries in the row; negative if the queries come
            first.
        distances: All values of `distance` on any device.
    """

    query: int | Array
    key: int | Array
    distance: int | Array
    distances: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Static configuration of a call to ring attention.

    Attributes:
        chunk: Tokens per chunk; a device has two chunks in zigzag order, and one if rows are contiguous.
    """

    axis: ContextAxis
    chunk: int
    scores: ScoreRule
    target: Target

    def between_chunks(self, q: Array, k: Array, mask: MaskRule) -> dict[str, Any]:
        """Return the static arguments of `flash_forward` and `flash_backward` for a pair of chunks under a mask: partial
        results are in the accumulation dtype."""
        return {
            "scores": dataclasses.replace(self.scores, mask=mask),
            "blocks": choose_blocks(q, k, window=mask.window, target=self.target),
            "result_dtype": accumulation_dtype(q.dtype),
        }


def active_shifts(axis_size: int, chunk: int, mask: MaskRule, order: RowOrder = "zigzag") -> tuple[int, ...]:
    """Return the nonzero shifts at which any device attends to the keys of the device `shift` positions
    before it.

    >>> active_shifts(8, 16, MaskRule(causal=True, window=None))
    (1, 2, 3, 4, 5, 6, 7)
    >>> active_shifts(8, 16, MaskRule(causal=True, window=16))
    (1, 7)
    >>> active_shifts(8, 16, MaskRule(causal=True, window=16), "contiguous")
    (1,)
    """
    return tuple(shift for shift in range(1, axis_size) if _pieces_at(axis_size, chunk, mask, order, shift))


def chunk_pairs(ring: Ring, shift: int | Array) -> list[ChunkPair]:
    """Return the chunk pairs of this device with the keys of the device `shift` positions before it; 0 for its
    own keys.

    Args:
        shift: If traced, one of `active_shifts`; the result then covers all of them.
    """
    (name, n, order), mask = ring.axis, ring.scores.mask
    shifts = (shift,) if isinstance(shift, int) else active_shifts(n, ring.chunk, mask, order)
    distances: dict[int, set[int]] = {}
    for each in shifts:
        for number, of_pair in _pieces_at(n, ring.chunk, mask, order, each).items():
            distances.setdefault(number, set()).update(of_pair)
    here = lax.axis_index(name)
    pairs = _chunk_pairs(here, (here - shift) % n, n, order, causal=mask.causal, at_home=shifts == (0,))
    return [ChunkPair(*pairs[number], tuple(sorted(of_pair))) for number, of_pair in sorted(distances.items())]


def _pieces_at(axis_size: int, chunk: int, mask: MaskRule, order: RowOrder, shift: int) -> dict[int, set[int]]:
    """Return the distances of each of the `_chunk_pairs` at a shift, without pairs that are masked on every device."""
    distances: dict[int, set[int]] = {}
    for here in range(axis_size):
        there = (here - shift) % axis_size
        pairs = _chunk_pairs(here, there, axis_size, order, causal=mask.causal, at_home=shift == 0)
        for number, (_, _, distance) in enumerate(pairs):
            distances.setdefault(number, set()).add(distance)
    return {
        number: of_pair
        for number, of_pair in distances.items()
        if any(_mask_at(distance, chunk, mask) is not None for distance in of_pair)
    }


def _chunk_pairs(here, there, n: int, order: RowOrder, *, causal: bool, at_home: bool) -> list[tuple[Any, Any, Any]]:
    """Return (query chunk, key chunk, distance) for devices `here` and `there`, which may be traced."""
    if order == "contiguous":
        return [(0, 0, here - there)]
    if causal and not at_home:
        # 1 if `there` is behind, 0 if before; arithmetic that works for integers and traced values.
        same = (n + there - here) // n
        return [(1, 0, 2 * n - 1 - here - there), (same, same, abs(here - there))]
    queries, keys = (here, 2 * n - 1 - here), (there, 2 * n - 1 - there)
    names = [(0, 0), (1, 1), (1, 0)] if causal else [(0, 0), (1, 1), (1, 0), (0, 1)]
    return [(query, key, queries[query] - keys[key]) for query, key in names]


def _mask_at(distance: int, chunk: int, mask: MaskRule) -> MaskRule | None:
    """Return the mask between two chunks at a distance; None if nothing is visible."""
    moved, whole = dataclasses.replace(mask, offset=distance * chunk), (0, chunk)
    if not moved.block_allows(whole, whole):
        return None
    return _EVERYTHING if moved.block_allows_all(whole, whole) else moved


def chunk_outputs(
    ring: Ring,
    pieces: Sequence[ChunkPair],
    queries: tuple[Array, Array | None],
    keys: tuple[Array, Array, Array | None],
) -> list[tuple[Array, ...]]:
    """Compute the output and the logsumexp of each chunk pair, in float32.

    Args:
        queries: q and its segments.
        keys: k, v and their segments.
    """

    def compute(mask, queries, keys):
        (q, query_segments), (k, v, key_segments) = queries, keys
        if mask is None:
            wide = accumulation_dtype(q.dtype)
            return jnp.zeros(q.shape, wide), jnp.full(q.shape[:-1], MASKED, wide)
        operands = AttentionOperands(q, k, v, query_segments, key_segments)
        return flash_forward(operands, **ring.between_chunks(q, k, mask))

    return _compute_pairs(ring, pieces, compute, queries, keys)


def chunk_gradients(
    ring: Ring,
    pieces: Sequence[ChunkPair],
    queries: tuple[Array, Array | None, Array, Array, Array],
    keys: tuple[Array, Array, Array | None],
) -> list[tuple[Array, ...]]:
    """Compute the cotangents of each pair's q, k and v, in float32.

    Args:
        queries: q, its segments, and for the whole rows: logsumexp, `output_delta`, and the output's
            cotangent.
        keys: k, v and their segments.
    """

    def compute(mask, queries, keys):
        (q, query_segments, *output), (k, v, key_segments) = queries, keys
        if mask is None:
            wide = accumulation_dtype(q.dtype)
            return tuple(jnp.zeros(x.shape, wide) for x in (q, k, v))
        operands = AttentionOperands(q, k, v, query_segments, key_segments)
        return flash_backward(operands, OutputGradient(*output), **ring.between_chunks(q, k, mask))

    return _compute_pairs(ring, pieces, compute, queries, keys)


def _compute_pairs(
    ring: Ring, pieces: Sequence[ChunkPair], compute: Callable[..., tuple[Array, ...]], queries: tuple, keys: tuple
) -> list[tuple[Array, ...]]:
    """Run `compute(mask, chunks of queries, chunks of keys)` for every pair; consecutive pairs with the same single
    mask are stacked into one call."""
    number = len(queries)

    def chunks(piece: ChunkPair) -> list[Array | None]:
        named = [(x, piece.query) for x in queries] + [(x, piece.key) for x in keys]
        return [
            None if x is None else lax.dynamic_slice_in_dim(x, name * ring.chunk, ring.chunk, axis=1)
            for x, name in named
        ]

    def masks(piece: ChunkPair) -> tuple[MaskRule | None, ...]:
        return tuple(dict.fromkeys(_mask_at(distance, ring.chunk, ring.scores.mask) for distance in piece.distances))

    def visit(piece: ChunkPair, mask: MaskRule | None) -> tuple[Array, ...]:
        pair = chunks(piece)
        return compute(mask, pair[:number], pair[number:])

    results: list[tuple[Array, ...]] = []
    for known, alike in itertools.groupby(pieces, key=masks):
        alike = list(alike)
        if len(known) == 1:
            stacked = [None if parts[0] is None else jnp.concatenate(parts) for parts in zip(*map(chunks, alike))]
            outputs = compute(known[0], stacked[:number], stacked[number:])
            results += zip(*(jnp.split(x, len(alike)) for x in outputs))
            continue
        # The mask depends on the device: select it by the traced distance.
        for piece in alike:
            first, last = piece.distances[0], piece.distances[-1]
            which = [
                known.index(_mask_at(d, ring.chunk, ring.scores.mask)) if d in piece.distances else 0
                for d in range(first, last + 1)
            ]
            branches = [functools.partial(visit, piece, mask) for mask in known]
            results.append(lax.switch(jnp.asarray(which, jnp.int32)[piece.distance - first], branches))
    return results
