"""A compiled step with further results: what left each module, and the gradient of each parameter."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from ...core import TrainState, named_leaves
from ...core.jax_primitives import ClosedJaxpr
from ..compilation.abstract_arrays import abstract_state
from ..compiled_step import CompiledStep
from ..parts.step_part import StepFacts, StepOutcome, StepPart
from ..update import Scalars
from .module_outputs import ModuleOutput, read_module_outputs, tap_module_outputs
from .program_tree import MeasureArray, ProgramBlock, read_tree, run_block
from .statistics import measure_array

GRADIENTS, DEAD = "taps/gradients", "taps/dead"
"""Names of the gradients' statistics, and of their parts that are zero, among the scalars of a step with a `GradientTap`."""

MAX_PARTS = 4096
"""Maximum number of parts of one parameter that are looked at for a gradient of zero."""


@dataclasses.dataclass(frozen=True)
class GradientTap(StepPart):
    """Report the statistics of each parameter's gradient, as the update reads it before any clipping."""

    name: ClassVar[str] = "gradient_tap"

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        leaves = {name: leaf for name, leaf in named_leaves(facts.result.gradients).items() if leaf.size}
        parts = {name: leaf for name, leaf in leaves.items() if leaf.ndim > 2 and _has_few(leaf)}
        dead = {name: (leaf == 0).all(axis=tuple(range(2, leaf.ndim))) for name, leaf in parts.items()}
        return outcome.report(**{GRADIENTS: {name: measure_array(leaf) for name, leaf in leaves.items()}, DEAD: dead})


def _has_few(leaf: jax.Array) -> bool:
    return leaf.shape[0] * leaf.shape[1] <= MAX_PARTS


@dataclasses.dataclass(frozen=True)
class TappedResult:
    """Results of a step with taps.

    Attributes:
        state: The state after the step.
        scalars: As those of the step itself.
        outputs: What left each module, in the order of the program.
        gradients: Statistics of each parameter's gradient, as vectors; empty without a `GradientTap`.
        dead: For parameters of three dimensions and more, True where all of a gradient is zero, by the first two indices.
    """

    state: TrainState
    scalars: Scalars
    outputs: tuple[ModuleOutput, ...]
    gradients: Mapping[str, np.ndarray]
    dead: Mapping[str, np.ndarray]


def take_tapped_step(step: CompiledStep, state: TrainState, batch: Mapping[str, jax.Array]) -> TappedResult:
    """Take a step that also measures what leaves each module; the state is not donated."""
    traced = step.trace(batch)
    block = read_tree(traced.jaxpr)
    tap_module_outputs(block)
    (after, scalars), records = run_tapped(step, traced, block, measure_array)(state, batch)
    scalars = dict(scalars)
    gradients, dead = jax.device_get((scalars.pop(GRADIENTS, {}), scalars.pop(DEAD, {})))
    outputs = tuple(read_module_outputs(block, jax.device_get(records)))
    return TappedResult(after, scalars, outputs, gradients, dead)


def run_tapped(step: CompiledStep, traced: Any, block: ProgramBlock, measure: MeasureArray) -> Callable[..., Any]:
    """Compile a traced step with the taps of its tree, for (state, batch) to ((state, scalars), records).

    Args:
        traced: A trace of the step, as from `CompiledStep.trace`.
        block: The tree of its program.
    """
    assert isinstance(traced.jaxpr, ClosedJaxpr)
    structure = jax.tree.structure(traced.out_info)

    def tapped(state: TrainState, batch: Mapping[str, Any]) -> Any:
        outputs, records = run_block(block, jax.tree.leaves((state, dict(batch))), measure)
        return structure.unflatten(outputs), records

    def compiled(state: TrainState, batch: Mapping[str, jax.Array]) -> Any:
        results = ((step.shardings, step.placement.sharding()), None)
        with step.placement.activate():
            lowered = jax.jit(tapped, out_shardings=results).lower(
                abstract_state(step.program, step.shardings), step.abstract_batch(batch)
            )
            return lowered.compile()(state, dict(batch))

    return compiled
