"""Compilation while the state is initialized or restored, for data with batch shapes that are known before a
batch is read."""

from collections.abc import Mapping
from typing import Any

from ..core import CollectingTask
from ..data import TextData
from ..plan.step import text_batch
from ..train import CompiledStep
from .preparation import PreparedRun, batch_shapes


def compile_ahead(prepared: PreparedRun, steps_left: int) -> None:
    """Start compiling the programs that the run will need, unless no step is left or shapes are unknown."""
    shapes = expected_shapes(prepared) if steps_left > 0 else None
    if shapes is None or not isinstance(prepared.step, CompiledStep):
        return
    train, held_out = shapes
    prepared.step.compile_ahead(train, held_out)


def expected_shapes(prepared: PreparedRun) -> tuple[Mapping[str, Any], Mapping[str, Any] | None] | None:
    """Return (shapes of a training batch, shapes of a held-out batch or None without evaluation).

    Returns None if the shapes are known only once data is read.
    """
    experiment, data = prepared.experiment, prepared.data
    several = data.shapes > 1 or experiment.batch_ramp.parts or experiment.comms.islands.count > 1
    if several or experiment.overfit_batches:
        return None
    evaluates = data.held_out is not None and experiment.evaluate.every > 0
    if isinstance(experiment.data, TextData):
        shapes = text_batch(experiment.data)
        # Other held-out data may have different shapes.
        return shapes, shapes if evaluates and experiment.held_out is None else None
    if isinstance(prepared.task, CollectingTask):
        # Row indices: no file is read for these.
        held_out = data.held_out if evaluates else None
        return batch_shapes(experiment, data.train), None if held_out is None else batch_shapes(experiment, held_out)
    return None
