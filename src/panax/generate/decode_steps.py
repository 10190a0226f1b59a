"""The program that continues each row by several tokens: the host sees them together."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from ..core.protocols import IncrementalModel
from .draw import DrawnTokens, RowSettings
from .programs import EngineState, NextTokens, decode_rows, state_specs
from .shards import ProgramSettings, gather_rows, map_rows, model_specs, row_spec


class RowEnds(NamedTuple):
    """When rows end.

    Attributes:
        room: Number of tokens that may be drawn.
        ends: Tokens after which none is drawn; -1 for none.
    """

    room: Int[Array, " rows"]
    ends: Int[Array, "rows ends"]


@functools.partial(jax.jit, donate_argnums=1, static_argnums=(5, 6))
def run_decode_steps(
    model: IncrementalModel,
    state: EngineState,
    inputs: NextTokens,
    settings: RowSettings,
    ends: RowEnds,
    compiled_for: ProgramSettings,
    steps: int,
) -> tuple[EngineState, DrawnTokens, Int[Array, " rows"]]:
    """Draw up to `steps` tokens for each active row, each after the one before it.

    Returns:
        The state; the drawn tokens, [rows, steps, ...]; how many of each row are valid.
    """
    placement = compiled_for.placement
    rows, states = row_spec(placement), state_specs(model, placement)
    nexts = NextTokens._make([rows, rows, rows, PartitionSpec()])
    arguments = model_specs(placement, model), states, nexts, rows, rows
    results = states, PartitionSpec(), PartitionSpec()
    run = functools.partial(_run_decode_steps, steps=steps, kept=compiled_for.kept)
    return map_rows(run, compiled_for, arguments, results)(model, state, inputs, settings, ends)


class _Progress(NamedTuple):
    step: Int[Array, ""]
    state: EngineState
    inputs: NextTokens
    settings: RowSettings
    room: Int[Array, " rows"]
    drawn: DrawnTokens
    size: Int[Array, " rows"]


def _run_decode_steps(
    model: IncrementalModel,
    state: EngineState,
    inputs: NextTokens,
    settings: RowSettings,
    ends: RowEnds,
    *,
    steps: int,
    kept: int,
) -> tuple[EngineState, DrawnTokens, Int[Array, " rows"]]:
    shapes = jax.eval_shape(lambda: decode_rows(model, state, inputs, settings, kept=kept)[1])
    empty = jax.tree.map(lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), shapes)
    # Arrays that differ between devices from the first round on.
    empty = jax.tree.map(lambda leaf: leaf + (inputs.tokens * 0).sum().astype(leaf.dtype), empty)

    def continues(progress: _Progress) -> Bool[Array, ""]:
        # All devices take equally many rounds.
        return (progress.step < steps) & gather_rows(progress.inputs.active).any()

    def draw(progress: _Progress) -> _Progress:
        step, state, inputs, settings, room, drawn, size = progress
        active = inputs.active.astype(jnp.int32)
        state, new = decode_rows(model, state, inputs, settings, kept=kept)
        room = room - active
        is_end = (new.token[:, None] == ends.ends).any(axis=1)
        inputs = inputs._replace(
            tokens=new.token, start=inputs.start + active, active=inputs.active & ~is_end & (room > 0)
        )
        settings = settings._replace(drawn_before=settings.drawn_before + active)
        drawn = jax.tree.map(lambda all_, leaf: all_.at[step].set(leaf), drawn, new)
        return _Progress(step + 1, state, inputs, settings, room, drawn, size + active)

    begin = _Progress(jnp.int32(0), state, inputs, settings, ends.room, empty, jnp.zeros_like(ends.room))
    end = jax.lax.while_loop(continues, draw, begin)
    by_row = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), end.drawn)
    return end.state, *gather_rows((by_row, end.size))
