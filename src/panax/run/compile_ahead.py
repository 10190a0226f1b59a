"""Compiling while the state is drawn or read: for data whose batches have shapes that are known before one is."""

from collections.abc import Mapping
from typing import Any

from ..core import CollectingTask
from ..data import TextData
from ..plan.step import text_batch
from ..train import CompiledStep
from .preparation import PreparedRun, batch_shapes


def compile_ahead(prepared: PreparedRun, steps_left: int) -> None:
    """Begin to compile what the run is to need, unless it has no step left or its shapes are not known."""
    shapes = expected_shapes(prepared) if steps_left > 0 else None
    if shapes is None or not isinstance(prepared.step, CompiledStep):
        return
    train, held_out = shapes
    prepared.step.compile_ahead(train, held_out)


def expected_shapes(prepared: PreparedRun) -> tuple[Mapping[str, Any], Mapping[str, Any] | None] | None:
    """Those of a training batch and of an evaluation's, None where there is no evaluation; None where only reading tells."""
    experiment, data = prepared.experiment, prepared.data
    several = data.shapes > 1 or experiment.batch_ramp.parts or experiment.comms.islands.count > 1
    if several or experiment.overfit_batches:
        return None
    evaluates = data.held_out is not None and experiment.evaluate.every > 0
    if isinstance(experiment.data, TextData):
        shapes = text_batch(experiment.data)
        # Other held-out data has shapes of its own.
        return shapes, shapes if evaluates and experiment.held_out is None else None
    if isinstance(prepared.task, CollectingTask):
        # Numbers of rows, which no file is read for.
        held_out = data.held_out if evaluates else None
        return batch_shapes(experiment, data.train), None if held_out is None else batch_shapes(experiment, held_out)
    return None
