"""The gated delta rule (Gated DeltaNet), chunk by chunk.

Each value head has a state matrix that maps keys to values. At every position it decays, its
value for the position's key is moved towards the position's value by a share beta, and it is read by a query:

    state[t] = decay[t] * state[t - 1]
    u[t]     = beta[t] * (v[t] - state[t]^T k[t])
    state[t] = state[t] + k[t] u[t]^T                 y[t] = state[t]^T q[t]

Legend of the shapes within a chunk, as the einsums below name them:

    b batch    i reading position    j written position    g key head    r value head of the key head
    n key dim  p value dim
    q, k       [b i g n]             log_decay, beta  [b i g r]
    v, y       [b i g r p]           state            [b g r n p]

Within a chunk, the corrections u depend on each other: the correction of position i subtracts what earlier
positions wrote for its key. With `lower[i, j] = beta[i] * decay(j to i) * (k[i] . k[j])` for j < i, they solve

    (1 + lower) u = beta * (v - decay(start to i) * state^T k)

which is a unit lower triangular system: its inverse is independent of the values and the state (the UT form).
Given u, the chunk is attention without a softmax, as in `state_space`; only the state is passed between chunks.
A loop walks the chunks; its backward pass recomputes each from its inputs and the state before it, so at most
one chunk's scores exist at a time. All values are float32: in 16 bits, errors of the corrections would add up.
On an accelerator, the inverse is in full float32, and the other matmuls have the precision that the task
chooses for float32.

Only sums of log decays are exponentiated, from one position to a later one, which are at most 0; those of other
pairs are masked before, so that neither a value nor a gradient overflows. Each is summed by itself, not as a
difference of sums from the chunk's start: where strong and weak decays mix, that loses the weak ones' digits (of
tiny Qwen3.5 models, the worst gradient is 2e-6 off instead of 1e-5, for 7 % of the time).

If documents are packed in a row, the state is zero before each document's first position.

Source: Gated Delta Networks (arXiv:2412.06464), section 3.3; Parallelizing Linear Transformers with the Delta
Rule (arXiv:2406.06484), section 3. Differences: chunks are processed in sequence; the inverse is assembled from
blocks by matmuls, not by substitution row by row.

Chunks are short on CPU: 8 key heads and 16 value heads of 128, 2,048 positions, forward and backward on two busy
cores: 431 ms in chunks of 16, 460 of 32, 573 of 64, 1,532 of 128. Elsewhere they are a tile of the matrix units,
which is not measured.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.kernels.attention.mask import MASKED
from panax.kernels.delta_rule.triangular import invert_unit_lower
from panax.kernels.precision import accumulation_dtype
from panax.kernels.varying_axes import vary_alike, vary_like


class DeltaInputs(NamedTuple):
    """Inputs of the rule over rows.

    Attributes:
        q: Queries, scaled by the caller; adjacent value heads share a key head's.
        k: Keys of length at most 1; longer ones make the state diverge.
        log_decay: Logarithm of the decay at each position, at most 0; float32.
        beta: Share by which a position corrects the state, between 0 and 1; float32.
    """

    q: Float[Array, "batch seq key_heads key_dim"]
    k: Float[Array, "batch seq key_heads key_dim"]
    v: Float[Array, "batch seq heads value_dim"]
    log_decay: Float[Array, "batch seq heads"]
    beta: Float[Array, "batch seq heads"]


class DeltaResult(NamedTuple):
    """Result of the delta rule over rows.

    Attributes:
        y: Output, in the dtype of v; zero at padding.
        state: State after the last position; float32.
    """

    y: Float[Array, "batch seq heads value_dim"]
    state: Float[Array, "batch heads key_dim value_dim"]


class StateMap(NamedTuple):
    """The state after a part of a row as a function of the state before it: `transfer @ state + written`.

    Attributes:
        written: State after the part if it begins with zeros; float32.
        transfer: Zero if a document begins within the part; float32.
    """

    written: Float[Array, "batch heads key_dim value_dim"]
    transfer: Float[Array, "batch heads key_dim key_dim"]


def default_chunk(target: Target) -> int:
    """Return the default number of positions in a chunk."""
    return 32 if target.platform == "cpu" else 64


def delta_rule(
    inputs: DeltaInputs,
    *,
    state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    target: Target,
    chunk: int | None = None,
) -> DeltaResult:
    """Compute the rule over rows of any length, in float32; differentiable by everything but the segments.

    Args:
        state: State before the first position, of the same document as that position; None: zero.
        segments: Document id of each position; 0 is padding.
        chunk: Positions in a chunk; by default `default_chunk(target)`.

    Raises:
        ValueError: The heads are not a multiple of the key heads, or the chunk is below 1.
    """
    chunk = default_chunk(target) if chunk is None else chunk
    _check(inputs.k.shape[2], inputs.v.shape[2], chunk)
    y, after = _walk(_Operands(*inputs), state, segments, chunk, outputs=True)
    assert y is not None
    return DeltaResult(y, after)


def delta_rule_map(
    k: Float[Array, "batch seq key_heads key_dim"],
    v: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    *,
    segments: Int[Array, "batch seq"] | None = None,
    target: Target,
    chunk: int | None = None,
) -> StateMap:
    """Compute how rows change a state, without any output; arguments as in `DeltaInputs` and `delta_rule`.

    Maps of adjacent parts compose, so that parts of a row are computed on several devices.
    """
    chunk = default_chunk(target) if chunk is None else chunk
    _check(k.shape[2], v.shape[2], chunk)
    (batch, seq, heads, value_dim), key_dim = v.shape, k.shape[-1]
    # Further columns of the state begin as the identity, and nothing is written to them: they end as the transfer.
    columns = jnp.concatenate([v, jnp.zeros((batch, seq, heads, key_dim), v.dtype)], axis=-1)
    start = jnp.eye(key_dim, value_dim + key_dim, value_dim, dtype=accumulation_dtype(v.dtype))
    start = jnp.broadcast_to(start[None, None], (batch, heads, *start.shape))
    _, after = _walk(_Operands(k, k, columns, log_decay, beta), start, segments, chunk, outputs=False)
    return StateMap(after[..., :value_dim], after[..., value_dim:])


class _Operands(NamedTuple):
    """Operands of the rule: those of whole rows, or of one chunk."""

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array


class _Runs(NamedTuple):
    """Positions' runs of equal segments, counted from 0.

    Attributes:
        run: Index of a position's run.
        before: Run of the state before the first position.
    """

    run: Int[Array, "batch seq"]
    before: Int[Array, " batch"]


def _check(key_heads: int, heads: int, chunk: int) -> None:
    if heads % key_heads:
        raise ValueError(f"{heads=} must be a multiple of {key_heads=}: adjacent value heads share a key head")
    if chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1")


def _walk(
    operands: _Operands, state: Array | None, segments: Array | None, chunk: int, *, outputs: bool
) -> tuple[Array | None, Array]:
    """Walk the chunks of whole rows; return the output (None without `outputs`) and the state after the last
    position."""
    *varied, state, segments = vary_alike(*operands, state, segments)
    q, k, v, log_decay, beta = varied
    (batch, seq, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[2:]
    wide, grouped = accumulation_dtype(v.dtype), (key_heads, heads // key_heads)
    before = vary_like(jnp.zeros((batch, *grouped, key_dim, value_dim), wide), v)
    if state is not None:
        known = state if segments is None else jnp.where((segments[:, 0] != 0)[:, None, None, None], state, 0.0)
        before = known.astype(wide).reshape(before.shape)
    runs = None
    if segments is not None:
        real = (segments != 0)[..., None]
        # Padding writes nothing; it is a run of its own, so that it reads zeros.
        log_decay, beta = jnp.where(real, log_decay, 0.0), jnp.where(real, beta, 0.0)
        changes = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        runs = jnp.cumsum(changes, axis=1, dtype=jnp.int32)

    size = min(chunk, seq)
    count = -(-seq // size)

    def chunked(array: Array, mode: str = "constant") -> Array:
        """Convert [batch, seq, ...] to [chunk, batch, position, ...]; a beta and a log decay of 0 in the padding
        preserve the state."""
        widths = [(0, 0), (0, count * size - seq)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, widths, mode=mode) if count * size > seq else array
        return jnp.moveaxis(padded.reshape(batch, count, size, *array.shape[2:]), 1, 0)

    def by_group(array: Array) -> Array:
        return array.reshape(batch, seq, *grouped, *array.shape[3:])

    decays = chunked(by_group(log_decay.astype(wide)))
    pieces = _Operands(chunked(q), chunked(k), chunked(by_group(v)), decays, chunked(by_group(beta.astype(wide))))
    step = jax.checkpoint(functools.partial(_step, outputs=outputs), prevent_cse=False)
    carry = (before, None if runs is None else runs[:, 0])
    inputs = (pieces, None if runs is None else chunked(runs, "edge"))
    if count == 1:
        (after, _), y = step(carry, jax.tree.map(lambda piece: piece[0], inputs))
    else:
        (after, _), y = lax.scan(step, carry, inputs)
        y = None if y is None else jnp.moveaxis(y, 0, 1)
    y = None if y is None else y.reshape(batch, count * size, heads, value_dim)[:, :seq]
    return y, after.reshape(batch, heads, key_dim, value_dim)


def _step(
    carry: tuple[Array, Array | None], piece: tuple[_Operands, Array | None], *, outputs: bool
) -> tuple[tuple[Array, Array | None], Array | None]:
    """Process one chunk: from the state and the run before it to those after it, and its output. The letters of the
    einsums are in the legend above."""
    (state, run_before), (operands, run) = carry, piece
    dtype, wide, size = operands.v.dtype, state.dtype, operands.k.shape[1]
    q, k, v = (part.astype(wide) for part in operands[:3])
    values = v.transpose(0, 2, 3, 1, 4)
    log_decay, beta = (jnp.moveaxis(part, 1, -1) for part in operands[3:])
    earlier = jnp.tril(jnp.ones((size, size), bool), -1)[None]
    # From each position to each later one, and from the chunk's start to each.
    between = jnp.cumsum(jnp.where(earlier[:, None, None], log_decay[..., None], 0.0), axis=-2)
    from_start = jnp.cumsum(log_decay, axis=-1)
    decay_applies = carries_over = is_last_run = None
    if run is not None and run_before is not None:
        last = run[:, -1]
        earlier = earlier & (run[:, :, None] == run[:, None, :])
        decay_applies, is_last_run = (run == run_before[:, None])[:, None, None], (run == last[:, None])[:, None, None]
        carries_over, run_before = (run_before == last)[:, None, None], last
    weights = jnp.exp(jnp.where(earlier[:, None, None], between, MASKED))
    lower = jnp.einsum("bign,bjgn->bgij", k, k)[:, :, None] * weights * beta[..., None]
    read = _where(decay_applies, jnp.exp(from_start))[..., None]
    remembered = read * jnp.einsum("bign,bgrnp->bgrip", k, state)
    corrections = jnp.einsum("bgrij,bgrjp->bgrip", invert_unit_lower(lower), beta[..., None] * (values - remembered))
    y = None
    if outputs:
        # A position's decay to itself is 1 by definition, and has no gradient.
        scores = jnp.einsum("bign,bjgn->bgij", q, k)[:, :, None] * (
            weights + jnp.eye(size, dtype=wide)[None, None, None]
        )
        y = jnp.einsum("bgrij,bgrjp->bgrip", scores, corrections)
        y = (y + read * jnp.einsum("bign,bgrnp->bgrip", q, state)).transpose(0, 3, 1, 2, 4).astype(dtype)
    written = _where(is_last_run, jnp.exp(between[..., -1, :]))[..., None] * corrections
    state = _where(carries_over, jnp.exp(from_start[..., -1]))[..., None, None] * state
    return (state + jnp.einsum("bjgn,bgrjp->bgrnp", k, written), run_before), y


def _where(condition: Array | None, value: Array) -> Array:
    return value if condition is None else jnp.where(condition, value, 0.0)
