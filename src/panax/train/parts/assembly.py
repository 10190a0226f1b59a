"""The parts of a program's step, in their order."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...core import CollectingTask
from ...core.errors import RecipeError, describe_type, suggest_name
from .average import ExponentialAverage, OptimizerAverage
from .clipping import ClipLayers, ClipNorm
from .frozen_layers import FrozenLayers
from .gradient_delay import DelayedUpdate
from .guard import LossScale, SpikeGuard
from .optimizer_update import LearningRate, OptimizerUpdate
from .parameter_norm import ParameterNorm
from .step_part import StepPart
from .table_rows import GrowingRows, TableRows

if TYPE_CHECKING:
    from ..program import Program

BUILT_IN = (
    GrowingRows, DelayedUpdate, FrozenLayers, TableRows, SpikeGuard, LearningRate, ClipNorm, ClipLayers, OptimizerUpdate,
    ExponentialAverage, OptimizerAverage, ParameterNorm, LossScale,
)  # fmt: skip
"""Panax's own parts, in the order in which they act."""


def step_parts(program: "Program") -> tuple[StepPart, ...]:
    """Return the parts of a program's step in the order in which they act in each phase, a user's own before those that
    they name."""
    parts = sorted(_built_in(program), key=lambda part: BUILT_IN.index(type(part)))
    for part_of_user in program.own_parts:
        # One that names a part which this program lacks stands before the next one that it has.
        later = [kind.name for kind in BUILT_IN][_rank(part_of_user.before) :]
        place = next((i for i, part in enumerate(parts) if part.name in later), len(parts))
        parts.insert(place, part_of_user)
    return tuple(parts)


def check_own_parts(parts: Iterable[StepPart]) -> None:
    """Check a user's parts: their names, and those of the parts before which they stand.

    Raises:
        RecipeError: One is not a part, or a name is missing, used twice, or unknown.
    """
    names = [kind.name for kind in BUILT_IN]
    for part in parts:
        kind = type(part).__name__
        if not isinstance(part, StepPart):
            raise RecipeError(f"a step part is {describe_type(part)}; expected an object of a subclass of StepPart")
        if not part.name or part.name in names:
            raise RecipeError(f"{kind}.name={part.name!r}; expected a name that no other part of the step has")
        if part.before not in names:
            raise RecipeError(
                f"{kind}.before={part.before!r}; expected a part of Panax; {suggest_name(part.before, names)}"
            )
        names.append(part.name)


def _built_in(program: "Program") -> Iterator[StepPart]:
    """Yield the parts that a program needs, in any order."""
    config, transformation, frozen_rows = program.config, program.transformation, program.frozen_rows
    if program.growing is not None:
        yield GrowingRows(program.growing)
    if program.has_custom_reduction and program.abstract.delayed is not None:
        yield DelayedUpdate(program.trainable)
    if frozen_rows is not None:
        yield FrozenLayers(frozen_rows)
    if program.tables is not None:
        yield TableRows(program.tables, config.clip_norm)
    if config.spike_factor is not None:
        yield SpikeGuard(config.spike_factor)
    schedule = program.optimizer.reported_rate(program.num_steps * program.task.updates_per_step)
    if schedule is not None:
        yield LearningRate(schedule)
    if config.clip_norm is not None:
        yield ClipNorm(config.clip_norm)
    if config.clip_layer_norm is not None or config.clip_ratio is not None:
        yield ClipLayers(program.task, config.clip_layer_norm, config.clip_ratio)
    yield OptimizerUpdate(transformation, frozen_rows)
    if config.ema_decay is not None:
        yield ExponentialAverage(config.ema_decay)
    elif transformation.average is not None:
        yield OptimizerAverage(transformation, frozen_rows)
    if not isinstance(program.task, CollectingTask):
        yield ParameterNorm()
    if program.task.scales_loss:
        yield LossScale()


def _rank(name: str) -> int:
    return [kind.name for kind in BUILT_IN].index(name)
