"""Embedding tables in a step: their part of the gradient's norm, and their update by rows."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...core.params.logical import batch_row_axes
from ..table_growth import GrowingTables
from ..tables import TableUpdates, replace_tables, scale_rows, table_norm
from .clipping import clip_factor
from .step_part import StepFacts, StepInputs, StepOutcome, StepPart, replace_state


@dataclasses.dataclass(frozen=True)
class TableRows(StepPart):
    """DenseUpdate the requested rows of tables, in place: selecting between two versions would read and write whole tables.

    Attributes:
        clip_norm: Maximum norm of the whole gradient, that of dense parameters included; None for no limit.
    """

    tables: TableUpdates
    clip_norm: float | None

    name: ClassVar[str] = "tables"

    def facts(self, facts: StepFacts) -> StepFacts:
        return facts._replace(norm=table_norm(facts.norm, facts.result.rows))

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        kept, rows = facts.state.tables, facts.result.rows
        if kept is None or rows is None:
            return outcome
        if self.clip_norm is not None:
            rows = scale_rows(rows, clip_factor(facts.norm, self.clip_norm))
        changed, kept = self.tables.update(
            outcome.state.params, kept, rows, updates=facts.updates, applied=facts.applied
        )
        return replace_state(outcome, params=replace_tables(outcome.state.params, changed), tables=kept)


@dataclasses.dataclass(frozen=True)
class GrowingRows(StepPart):
    """Assign rows of growing tables to the batch's new keys before the loss reads them; a skipped update takes them
    back."""

    growing: GrowingTables

    name: ClassVar[str] = "growing_tables"

    def view(self, inputs: StepInputs) -> StepInputs:
        assignment = self.growing.assign_rows(inputs.state, inputs.batch, inputs.axes or batch_row_axes(inputs.batch))
        inputs = inputs._replace(
            state=assignment.state, batch=assignment.batch, axes=assignment.axes, params=assignment.state.params
        )
        return inputs.remember(self, assignment)

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        assignment = facts.memos[self.name]
        skipped = outcome.state.guard.skipped > facts.state.guard.skipped
        counts = {name: jnp.where(skipped, 0, count) for name, count in assignment.counts.items()}
        state = self.growing.roll_back(outcome.state, assignment.before, skipped)
        return outcome._replace(state=state).report(**counts)
