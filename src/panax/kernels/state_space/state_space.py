"""The scan of a selective state-space model with a scalar decay for each head (Mamba-2), chunk by chunk.

Each head has a state matrix, which decays and is updated by one outer product at every position, and is read
by one vector:

    state[t] = exp(dt[t] * a) * state[t - 1] + dt[t] * x[t] b[t]^T        y[t] = state[t] c[t]

Within a chunk this is attention without a softmax: (c b^T, times the decay between the two positions) x,
computed by matmuls; only the state is passed between chunks. A loop walks the chunks, and its backward pass
recomputes each chunk from its inputs and the state before it, so at most one chunk's scores exist at a time.

If documents are packed in a row, the state is zero before each document's first token: a decay across a
boundary is zero.

The logarithm of a decay between two positions is summed by itself, not taken as a difference of sums from the
chunk's start: where strong and weak decays mix, that loses the weak ones' digits (of a tiny Bamba, the gradient of
the rates is as close to float64 as that of transformers instead of 2.4 times as far, for 3 % of the time).

Source: Transformers are SSMs (Mamba-2, arXiv:2405.21060), section 6. Differences: chunks are processed in
sequence, not all at once; the heads of a group share one matmul of c and b, and are columns of one matmul
with the state.

Chunks are short on CPU, which has no fast matrix units for the work that grows with them: 24 heads of 64 with
a state of 128, 2,048 positions, forward and backward on two busy cores, float32: 413 ms in chunks of 16, 310
of 32, 380 of 64, 933 of 128; in bfloat16 869, 320, 578, 712. Elsewhere they are as long as a tile of the
matrix units, which is not measured.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from panax.core.layout.target import Target
from panax.kernels.attention.mask import MASKED
from panax.kernels.precision import accumulation_dtype
from panax.kernels.varying_axes import vary_alike, vary_like


class ScanInputs(NamedTuple):
    """Inputs of a scan over rows, by the letters of the recurrence.

    Attributes:
        dt: Step size, positive; float32.
        a: Decay rate, negative; float32.
        b: Vectors written to the state; c reads it. Adjacent heads share a group.
    """

    x: Float[Array, "batch seq heads head_dim"]
    dt: Float[Array, "batch seq heads"]
    a: Float[Array, " heads"]
    b: Float[Array, "batch seq groups state"]
    c: Float[Array, "batch seq groups state"]


class ScanResult(NamedTuple):
    """Result of a scan over rows.

    Attributes:
        y: Output, in the dtype of x; zero at padding.
        state: State after the last position; float32.
        decay: Factor of a state before the first position at the last one; float32. It is zero if a document
            begins in between.
    """

    y: Float[Array, "batch seq heads head_dim"]
    state: Float[Array, "batch heads head_dim state"]
    decay: Float[Array, "batch heads"]


def default_chunk(target: Target) -> int:
    """Return the default number of positions in a chunk."""
    return 32 if target.platform == "cpu" else 128


def state_space_scan(
    inputs: ScanInputs,
    *,
    state: Float[Array, "batch heads head_dim state"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    target: Target,
    chunk: int | None = None,
) -> ScanResult:
    """Scan rows of any length; differentiable by everything but the segments.

    Matmuls are computed in the dtype of x, and summed in float32; decays and states are float32.

    Args:
        state: State before the first position, of the same document as that position; None: zero.
        segments: Document id of each position; 0 is padding.
        chunk: Positions in a chunk; by default `default_chunk(target)`.

    Raises:
        ValueError: The heads are not a multiple of the groups, or the chunk is below 1.
    """
    batch, seq, heads, head_dim = inputs.x.shape
    groups, width = inputs.b.shape[2:]
    if heads % groups:
        raise ValueError(f"{heads=} must be a multiple of {groups=}: adjacent heads share a group's b and c")
    chunk = default_chunk(target) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1")
    x, dt, a, b, c, state, segments = vary_alike(*inputs, state, segments)
    wide = accumulation_dtype(x.dtype)
    rows = _Rows.of(dt.astype(wide), a.astype(wide), segments)
    grouped = (batch, groups, heads // groups)
    # State as [batch, groups, state, heads of the group, head_dim]: the columns of one matmul.
    before = jnp.zeros((batch, groups, width, heads // groups, head_dim), wide)
    before = vary_like(before, x, dt, b)
    if state is not None:
        initial = state if segments is None else jnp.where((segments[:, 0] != 0)[:, None, None, None], state, 0.0)
        before = initial.astype(wide).reshape(*grouped, head_dim, width).transpose(0, 1, 4, 2, 3)

    size = min(chunk, seq)
    count = -(-seq // size)

    def chunked(array: Array, mode: str = "constant") -> Array:
        """Convert [batch, seq, ...] to [chunk, batch, position, ...]; a step of 0 in the padding preserves
        the state."""
        widths = [(0, 0), (0, count * size - seq)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, widths, mode=mode) if count * size > seq else array
        return jnp.moveaxis(padded.reshape(batch, count, size, *array.shape[2:]), 1, 0)

    split_heads = (batch, seq, groups, heads // groups)
    dt = chunked(rows.dt.reshape(split_heads))
    steps = dt * a.astype(wide).reshape(1, 1, 1, groups, -1)
    runs = None if rows.run is None else chunked(rows.run, "edge")
    pieces = (chunked(x.reshape(*split_heads, head_dim)), dt, steps, chunked(b), chunked(c), runs)
    step = jax.checkpoint(_step, prevent_cse=False)
    carry = (before, None if rows.run is None else rows.run[:, 0])
    if count == 1:
        (after, _), y = step(carry, jax.tree.map(lambda piece: piece[0], pieces))
    else:
        (after, _), y = lax.scan(step, carry, pieces)
        y = jnp.moveaxis(y, 0, 1)
    y = y.reshape(batch, count * size, heads, head_dim)[:, :seq]
    after = after.transpose(0, 1, 3, 4, 2).reshape(batch, heads, head_dim, width)
    return ScanResult(y, after, rows.decay_from_start()[:, -1])


def initial_state_output(
    dt: Float[Array, "batch seq heads"],
    a: Float[Array, " heads"],
    c: Float[Array, "batch seq groups state"],
    state: Float[Array, "batch heads head_dim state"],
    segments: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute the contribution of a state before the first position to the output of a scan that began with
    zeros; float32.

    Arguments as in `ScanInputs` and `state_space_scan`.
    """
    batch, heads, head_dim, width = state.shape
    groups = c.shape[2]
    wide = accumulation_dtype(c.dtype)
    decay_from_start = _Rows.of(dt.astype(wide), a.astype(wide), segments).decay_from_start()
    columns = state.astype(c.dtype).reshape(batch, groups, heads // groups, head_dim, width)
    # b batch, i position, g group, r head of the group, p head_dim, n state
    read = jnp.einsum("bign,bgrpn->bigrp", c, columns, preferred_element_type=wide)
    return decay_from_start[..., None] * read.reshape(batch, -1, heads, head_dim)


class _Rows(NamedTuple):
    """Steps and documents of complete rows.

    Attributes:
        dt: Step size; 0 at padding.
        step: dt times a: the logarithm of the decay at a position.
        run: Index of a position's run of equal segments, from 0; None if rows are one document.
        real: True if the first position is not padding.
    """

    dt: Float[Array, "batch seq heads"]
    step: Float[Array, "batch seq heads"]
    run: Int[Array, "batch seq"] | None
    real: Bool[Array, " batch"] | None

    @classmethod
    def of(cls, dt: Array, a: Array, segments: Array | None) -> "_Rows":
        a = a[None, None]
        if segments is None:
            return cls(dt, dt * a, None, None)
        dt = jnp.where((segments != 0)[..., None], dt, 0.0)
        changes = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        return cls(dt, dt * a, jnp.cumsum(changes, axis=1, dtype=jnp.int32), segments[:, 0] != 0)

    def decay_from_start(self) -> Float[Array, "batch seq heads"]:
        """Return the factor of a state before the first position at each position."""
        decay_from_start = jnp.exp(jnp.cumsum(self.step, axis=1))
        if self.run is None or self.real is None:
            return decay_from_start
        return jnp.where(((self.run == 0) & self.real[:, None])[..., None], decay_from_start, 0.0)


def _step(carry: tuple[Array, Array | None], piece: tuple) -> tuple[tuple[Array, Array | None], Array]:
    """Process one chunk: from the state and the run before it to those after it, and its output."""
    state, run_before = carry
    x, dt, log_decay, b, c, run = piece
    wide, size = state.dtype, x.shape[1]
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    # b batch, i reading position, j written position, g group, r head of the group, p head_dim, n state
    log_decay = jnp.moveaxis(log_decay, 1, -1)
    together = jnp.tril(jnp.ones((size, size), bool), -1)[None]
    # From each position to each later one, and from the chunk's start to each.
    between = jnp.cumsum(jnp.where(together[:, None, None], log_decay[..., None], 0.0), axis=-2)
    decay = jnp.moveaxis(jnp.cumsum(log_decay, axis=-1), -1, 1)
    to_end = jnp.moveaxis(between[..., -1, :], -1, 1)
    decay_applies = carries_over = is_last_run = None
    if run is not None and run_before is not None:
        last = run[:, -1]
        together = together & (run[:, :, None] == run[:, None, :])
        decay_applies, is_last_run = (
            (run == run_before[:, None])[..., None, None],
            (run == last[:, None])[..., None, None],
        )
        carries_over, run_before = (run_before == last)[:, None, None], last
    # A position's decay to itself is 1 by definition: computed from the difference it would have two
    # gradients that cancel, and with strong decays the result would be lost in their rounding.
    apart = jnp.where(jnp.eye(size, dtype=bool), jnp.zeros((), wide), MASKED)[None, None, None]
    between = jnp.where(together[:, None, None], between, apart)
    scores = product("bign,bjgn->bgij", c, b)[:, :, None] * jnp.exp(between) * jnp.moveaxis(dt, 1, -1)[..., None, :]
    y = product("bgrij,bjgrp->bigrp", scores.astype(x.dtype), x)
    read = _where(decay_applies, jnp.exp(decay))
    y = y + read[..., None] * product("bign,bgnrp->bigrp", c, state.astype(x.dtype))
    written = _where(is_last_run, jnp.exp(to_end) * dt)
    state_update = product("bjgn,bjgrp->bgnrp", b, (x.astype(wide) * written[..., None]).astype(x.dtype))
    state = _where(carries_over, jnp.exp(decay[:, -1]))[:, :, None, :, None] * state + state_update
    return (state, run_before), y.astype(x.dtype)


def _where(condition: Array | None, value: Array) -> Array:
    return value if condition is None else jnp.where(condition, value, 0.0)
