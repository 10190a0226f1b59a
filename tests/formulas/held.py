"""Which layers a stage of a pipeline runs in one pass through a chunk of it."""

import functools
from typing import NamedTuple

from panax.models import DecoderConfig
from panax.models.decoder.config import LayerKind
from panax.parallel.schedules import layers_by_stage

from .units import runs


class HeldRun(NamedTuple):
    """A stage's part of adjacent units with parameters alike; see `units.py`.

    Attributes:
        stack: The decoder's stack that the first of them is in, by which the run's arrays are known.
        kinds: Of a unit's layers.
        slots: Units of one pass, of the stage that has most. All stages have as many; what one has no unit for stays empty.
    """

    stack: int
    kinds: tuple[LayerKind, ...]
    slots: int


@functools.lru_cache(maxsize=256)
def held_runs(model: DecoderConfig, stages: int, chunks: int) -> tuple[HeldRun, ...]:
    """The layers that a stage holds of each run.

    Raises:
        RecipeError: There are fewer units than parts of the pipeline.

    >>> from panax.layers import MoE
    >>> model = DecoderConfig(num_layers=5, feed_forward=MoE(first_dense=1))
    >>> [(run.stack, run.kinds[0].mixture, run.slots) for run in held_runs(model, 2, 1)]
    [(0, False, 1), (1, True, 2)]
    """
    groups = runs(model)
    held = layers_by_stage(sum(map(len, groups)), stages=stages, chunks=chunks)
    result, start = [], 0
    for group in groups:
        end = start + len(group)
        slots = max(sum(start <= unit < end for unit in chunk) for stage in held for chunk in stage)
        result.append(HeldRun(group[0].stack, group[0].kinds, slots))
        start = end
    return tuple(result)


@functools.lru_cache(maxsize=256)
def windows_of_chunks(model: DecoderConfig, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The windows of each chunk's layers; a slot that is left empty has those of the unit before it."""
    flat = [unit for group in runs(model) for unit in group]
    held = layers_by_stage(len(flat), stages=stages, chunks=chunks)
    most = max(len(chunk) for stage in held for chunk in stage)
    filled = ([*chunk, *[chunk[-1]] * (most - len(chunk))] for stage in held for chunk in stage)
    return tuple(tuple(kind.window for unit in chunk for kind in flat[unit].kinds) for chunk in filled)
