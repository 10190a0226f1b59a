"""Shapes of the rows into which a run packs the answers of its rollouts."""

from ...mesh.topology import data_parallel_size
from ...rollouts.packing import PackedShapes
from ...train import CompiledStep
from ..preparation import PreparedRun


def choose_shapes(prepared: PreparedRun, answers: int) -> PackedShapes | None:
    """Return the shapes of packed rows of this many answers; None if each has a row of its own."""
    rollouts, needs, step = prepared.data.rollouts, prepared.task.rollout_needs, prepared.step
    assert rollouts is not None and needs is not None and isinstance(step, CompiledStep)
    if not rollouts.settings.packing:
        return None
    return PackedShapes.choose(
        answers,
        rollouts.settings.length,
        max_length=needs.max_length,
        multiple=data_parallel_size(step.placement.sizes) * step.program.config.micro_batches,
    )
