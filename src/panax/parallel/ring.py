"""Ring attention: queries stay on their device, keys and values travel around the "context" mesh axis.

Each device holds two chunks of a row in zigzag order (`context`). At step s it has the keys and values of the
device s positions before it. Under a causal mask, exactly two chunk-by-chunk products are then needed,
neither of them masked: this device's late chunk attends to the other's early one, and one of the two pairs of
equal chunks (early-early if the other device is before this one, late-late if it is behind). So every device
does the same work at every step, while the next keys travel. Partial results are merged by their logsumexp in
float32.

With contiguous rows, a device holds one chunk, which attends to those before it: work per step then differs
between devices, and a device without visible keys skips the step. The total time is that of the last device,
which attends to everything.

With a window, the mask between two chunks depends on their distance, which differs between devices. It takes
few forms (nothing, everything, and one or two cuts): each is a branch with a static mask, so that blocks
outside the window are not computed, and steps at which no device has visible keys are skipped.

Source: ring attention (arXiv:2310.01889); zigzag: `context`. Differs from Llama 3 (arXiv:2407.21783, section
3.3.2), which gathers all keys and values at once: the same bytes forward, memory for whole rows, and no
overlap of the transfer.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.errors import RecipeError
from panax.core.layout.target import Target
from panax.core.protocols import RowOrder
from panax.kernels.attention.attention import AttentionOptions, attention
from panax.kernels.attention.blockwise import output_delta
from panax.kernels.attention.mask import MASKED, MaskRule
from panax.kernels.attention.operands import ScoreRule
from panax.kernels.attention.sinks import add_sinks, sink_gradient
from panax.kernels.precision import accumulation_dtype
from panax.kernels.registry import KernelChoice, list_kernels, log_choice, named_kernel
from panax.parallel.context import ContextAxis, LocalSizes, WireBytes
from panax.parallel.ring_chunks import Ring, active_shifts, chunk_gradients, chunk_outputs, chunk_pairs
from panax.spmd.sharding_marks import ValueState, assert_sharding

_REASON = (
    "ring attention merges partial softmax sums, which only this kernel gives; "
    "ulysses attention runs the fast ones, where the context axis divides the heads"
)
_CAUSAL = MaskRule(causal=True, window=None)


def ring_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    *,
    axis: ContextAxis,
    options: AttentionOptions,
    target: Target,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute softmax attention over whole rows; this device holds its part of each; differentiable in q,
    k, v and the sinks.

    Must be called with the axis manual and variation unchecked: `jax.shard_map(..., check_vma=False)`.
    Saves (q, k, v, segments, out, logsumexp) for the
    backward pass.

    Sent by each device (`ring_bytes`), unless a window shortens the tour: forward, n-1 times k, v and
    segments; backward, n-1 times the same, and n-1 times the gradients of k and v in float32.

    Args:
        segments: Of the local tokens; 0 is padding.

    Raises:
        ValueError: The local sequence, in zigzag order, cannot be cut into two equal chunks, the heads are
            not a multiple of the kv heads, the window is less than 1, or the cap is not positive.
    """
    if axis.size == 1:
        return attention(q, k, v, segments=segments, target=target, **options._asdict())
    seq, heads, head_dim = q.shape[1:]
    chunks = _chunks(axis.order)
    if seq % chunks:
        raise ValueError(
            f"a device's part of a row, {seq} tokens, can't be cut into two equal chunks; use a row length that is "
            f"divisible by 2 * {axis.name}={2 * axis.size}"
        )
    if heads % k.shape[2]:
        raise ValueError(f"{heads=} must be a multiple of kv_heads={k.shape[2]}")
    soft_cap = options.soft_cap
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{soft_cap=} must be positive, or None for no cap")
    scores = ScoreRule(
        mask=MaskRule(causal=options.causal, window=options.window),
        scale=1.0 / math.sqrt(head_dim) if options.scale is None else options.scale,
        soft_cap=soft_cap,
    )
    _log_kernel(target)
    return _attention(
        q, k, v, segments, options.sinks, Ring(axis=axis, chunk=seq // chunks, scores=scores, target=target)
    )


def _log_kernel(target: Target) -> None:
    """Record that the portable kernel computes the chunks, even if a faster one exists.

    Raises:
        RecipeError: The recipe names another kernel.
    """
    named = named_kernel("attention")
    if named not in ("auto", "blockwise"):
        raise RecipeError(f"{named!r} can't do this attention: {_REASON}")
    blockwise = next(kernel for kernel in list_kernels("attention") if kernel.name == "blockwise")
    log_choice(KernelChoice(blockwise, _REASON), target)


def ring_bytes(sizes: LocalSizes, axis_size: int, *, mask: MaskRule = _CAUSAL, order: RowOrder = "zigzag") -> WireBytes:
    """Count the bytes that one device sends in `ring_attention`.

    Gradients of k and v take 4 bytes per element, or 8 if k and v do.

    >>> sizes = LocalSizes(batch=1, local_seq=1024, heads=32, kv_heads=8, head_dim=128, itemsize=2, packed=False)
    >>> ring_bytes(sizes, axis_size=4)
    WireBytes(forward=12582912, backward=37748736)
    """
    if axis_size == 1:
        return WireBytes(0, 0)
    steps = len(active_shifts(axis_size, sizes.local_seq // _chunks(order), mask, order))
    positions = sizes.batch * sizes.local_seq
    elements = 2 * positions * sizes.kv_heads * sizes.head_dim
    keys = elements * sizes.itemsize + (positions * 4 if sizes.packed else 0)
    return WireBytes(steps * keys, steps * (keys + elements * max(sizes.itemsize, 4)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q: Array, k: Array, v: Array, segments: Array | None, sinks: Array | None, ring: Ring) -> Array:
    return _forward(q, k, v, segments, sinks, ring)[0]


def _forward(q, k, v, segments, sinks, ring: Ring):
    wide = accumulation_dtype(q.dtype)
    home, shifts = (k, v, segments), _shifts(ring)

    # Attend to the keys held at a shift, and merge the results into the running output.
    def visit(merged, received, shift):
        pieces = chunk_pairs(ring, shift)
        for piece, part in zip(pieces, chunk_outputs(ring, pieces, (q, segments), received)):
            merged = _merge(merged, part, piece.query * ring.chunk)
        return merged

    def step(carry, shift, since, until):
        merged, received = carry
        following = _send(received, until, ring)
        return visit(merged, received, shift), following

    nothing = jnp.zeros(q.shape, wide), jnp.full(q.shape[:-1], MASKED, wide)
    received = _send(home, shifts[0] if shifts else None, ring)
    (out, logsumexp), _ = _tour(step, (visit(nothing, home, 0), received), shifts)
    out, logsumexp = add_sinks(out, logsumexp, sinks)
    out, logsumexp = assert_sharding((out.astype(q.dtype), logsumexp), {ring.axis.name: ValueState.SPLIT}, dim=1)
    return out, (q, k, v, segments, sinks, out, logsumexp)


def _backward(ring: Ring, saved, d_out):
    q, k, v, segments, sinks, out, logsumexp = saved
    wide = accumulation_dtype(q.dtype)
    # Without it, the compiler would save all keys of the forward pass of the same program instead of resending them.
    k, v, segments, d_out = lax.optimization_barrier((k, v, segments, d_out))
    delta = output_delta(out, d_out)
    queries = q, segments, logsumexp, delta, d_out
    home, shifts = (k, v, segments), _shifts(ring)

    def visit(gradients, received, shift):
        d_q, d_k, d_v = gradients
        pieces = chunk_pairs(ring, shift)
        for piece, parts in zip(pieces, chunk_gradients(ring, pieces, queries, received)):
            d_q = _add(d_q, parts[0], piece.query * ring.chunk)
            d_k, d_v = (_add(x, part, piece.key * ring.chunk) for x, part in zip((d_k, d_v), parts[1:]))
        return d_q, d_k, d_v

    def step(carry, shift, since, until):
        (d_q, *d_keys), received = carry
        following = _send(received, until, ring)
        # Key gradients follow one step behind their keys, so that their transfer overlaps with the computation too.
        d_keys = _send(d_keys, since, ring)
        return visit((d_q, *d_keys), received, shift), following

    no_keys = tuple(jnp.zeros(x.shape, wide) for x in (k, v))
    d_q, *d_home = visit((jnp.zeros(q.shape, wide), *no_keys), home, 0)
    received = _send(home, shifts[0] if shifts else None, ring)
    (d_q, *d_keys), _ = _tour(step, ((d_q, *no_keys), received), shifts)
    # Complete the tour: the key gradients return to the device that holds the keys.
    d_keys = _send(d_keys, ring.axis.size - shifts[-1] if shifts else None, ring)
    d_k, d_v = (here + back for here, back in zip(d_home, d_keys))
    gradients = (d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype))
    d_sinks = sink_gradient(sinks, logsumexp, delta)
    return *assert_sharding(gradients, {ring.axis.name: ValueState.SPLIT}, dim=1), None, d_sinks


_attention.defvjp(_forward, _backward)


def _chunks(order: RowOrder) -> int:
    """Return the number of chunks of a row on a device."""
    return 2 if order == "zigzag" else 1


def _shifts(ring: Ring) -> tuple[int, ...]:
    return active_shifts(ring.axis.size, ring.chunk, ring.scores.mask, ring.axis.order)


def _send(arrays, places: int | None, ring: Ring):
    """Send every array to the device `places` further on."""
    if places is None:
        return arrays
    n = ring.axis.size
    pairs = [(device, (device + places) % n) for device in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, ring.axis.name, pairs), arrays)


def _tour(step, carry, shifts: tuple[int, ...]):
    """Fold `step(carry, shift, since, until)` over the shifts, with one scan per run of equal moves.

    Args:
        step: `since` and `until` are the differences to the previous and next shift, None at the ends.
    """
    moves = [after - before for before, after in itertools.pairwise(shifts)]
    around = zip([None, *moves], [*moves, None])
    for between, run in itertools.groupby(zip(shifts, around), key=lambda pair: pair[1]):
        run = [shift for shift, _ in run]
        if len(run) == 1:
            carry = step(carry, run[0], *between)
            continue

        def body(carry, shift, between=between):
            return step(carry, shift, *between), None

        carry, _ = lax.scan(body, carry, jnp.asarray(run, jnp.int32))
    return carry


def _merge(accumulated: tuple[Array, Array], part: tuple[Array, ...], start: int | Array) -> tuple[Array, Array]:
    """Merge two softmax attention results, each (output, logsumexp), into attention over the keys of both.

    `part` covers the queries from `start` on.
    """
    size = part[0].shape[1]
    out, old = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in accumulated)
    part_out, new = part
    highest = jnp.maximum(old, new)
    weight, part_weight = jnp.exp(old - highest), jnp.exp(new - highest)
    total = weight + part_weight
    out = (weight / total)[..., None] * out + (part_weight / total)[..., None] * part_out
    merged = out, highest + jnp.log(total)
    out, logsumexp = (lax.dynamic_update_slice_in_dim(x, y, start, axis=1) for x, y in zip(accumulated, merged))
    return out, logsumexp


def _add(whole: Array, part: Array, start: int | Array) -> Array:
    """Add `part` to `whole` at the positions from `start` on."""
    old = lax.dynamic_slice_in_dim(whole, start, part.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(whole, old + part, start, axis=1)
