"""`StepView`: a step of a run, opened: its batch, activations, gradients, updates, and what stands out."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ...metrics.page.html import page
from ...train.taps.module_outputs import ModuleOutput
from ...train.taps.origin import FaultOrigin
from ...train.taps.statistics import ArrayStatistics
from .findings import find_outliers
from .record import ScalarComparison
from .replay import ReplayedStep
from .row_shares import RowShares
from .step_page import step_sections
from .what_if import ChangedStep, take_what_if


@dataclasses.dataclass(frozen=True)
class ParameterFacts:
    """A parameter in a step.

    Attributes:
        value: Before the step.
        gradient: Before any clipping; None if the parameter is frozen, a table, or if the step makes several updates.
        update: The value after the step minus the value before.
        dead: Parts of a parameter of three dimensions and more that have a gradient of zero, by the indices of the first two.
    """

    name: str
    value: ArrayStatistics
    gradient: ArrayStatistics | None
    update: ArrayStatistics
    dead: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class StepView:
    """A step of a run, taken again and opened.

    Attributes:
        run: The run's folder.
        replay: The step with the states before and after it.
        batch: Its batch as text, in lines.
        modules: What left each module, forward then backward, in the order of the program.
        tapped_ulps: Number of float32 values between the loss of the step and the loss of the same step with taps: 0 if the
            statistics are of the very values of the run; None if one of the losses is not finite.
        parameters: Each parameter with its gradient and update.
        origin: Where the first value that is not finite came from; None if all are finite.
        rows: Each row's share of the gradient, or why there is none.
        notes: What could not be opened, and why.
    """

    run: str
    replay: ReplayedStep
    batch: tuple[str, ...]
    modules: tuple[ModuleOutput, ...]
    tapped_ulps: int | None
    parameters: tuple[ParameterFacts, ...]
    origin: FaultOrigin | None
    rows: RowShares | str
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """Return what stands out in the step, one sentence each; see `find_outliers`."""
        return find_outliers(self)

    @property
    def step(self) -> int:
        return self.replay.step

    @property
    def scalars(self) -> Mapping[str, float]:
        return self.replay.scalars

    @property
    def verdict(self) -> str:
        """Return in one sentence whether the replay equals the record."""
        return describe_comparisons(self.replay.comparisons, self.replay.conditions)

    def what_if(self, experiment: Any = None, *, without_rows: tuple[int, ...] = ()) -> ChangedStep:
        """Take the step again, from the same state, without some rows of its batch or with other settings.

        Args:
            experiment: The run's experiment with other settings of task, optimizer or step; None for the run's.
            without_rows: Rows to leave out, from 0.

        Raises:
            RecipeError: A setting can't change within a run, or a row does not exist or can't be left out.
        """
        return take_what_if(self.replay, experiment, without_rows)

    def __repr__(self) -> str:
        loss = self.scalars.get("loss", math.nan)
        return f"StepView({self.run}, step {self.step}, loss {loss:.6g}; {self.verdict})"

    def _repr_html_(self) -> str:
        return page(f"Step {self.step} of {self.run}", step_sections(self))

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values; a value that is not finite is a text."""
        replay = self.replay
        return plain(
            {
                "run": self.run,
                "step": self.step,
                "source": replay.source,
                "replayed_steps": replay.replayed,
                "verified": replay.is_verified,
                "verdict": self.verdict,
                "comparisons": [dataclasses.asdict(each) for each in replay.comparisons],
                "differing_conditions": replay.conditions,
                "scalars": dict(replay.scalars),
                "data": {"number": replay.number, "lines": self.batch},
                "modules": [_with_phase(each) for each in self.modules],
                "tapped_ulps": self.tapped_ulps,
                "parameters": [dataclasses.asdict(each) for each in self.parameters],
                "origin": None if self.origin is None else _with_phase(self.origin),
                "rows": self.rows if isinstance(self.rows, str) else dataclasses.asdict(self.rows),
                "findings": self.findings,
                "notes": self.notes,
            }
        )


def _with_phase(value: ModuleOutput | FaultOrigin) -> dict[str, Any]:
    fields = dataclasses.asdict(value)
    return {**fields, "phase": None if value.phase is None else value.phase.value}


def plain(value: Any) -> Any:
    """Return JSON values: tuples as lists, and numbers that are not finite as texts.

    >>> plain({"a": (1.0, math.inf)})
    {'a': [1.0, 'inf']}
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def describe_comparisons(comparisons: tuple[ScalarComparison, ...], conditions: tuple[str, ...]) -> str:
    """Describe in one sentence whether a replay equals a run's record, and if not, what may explain it."""
    if not comparisons:
        return "nothing is recorded of this step or of those after it, so there is nothing to compare the replay with"
    steps = sorted({each.step for each in comparisons})
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} recorded steps from {steps[0]} to {steps[-1]}"
    wrong = next((each for each in comparisons if not each.is_equal), None)
    if wrong is None:
        return f"the replay equals the record of {which} to the bit"
    distance = "one of them is not finite" if wrong.ulps is None else f"{wrong.ulps:,} ulp of float32 apart"
    values = f"{wrong.name} of step {wrong.step} is recorded as {wrong.recorded!r} and replayed as {wrong.replayed!r}, {distance}"
    if conditions:
        return f"the replay differs from the record: {values}. Conditions that differ: {'; '.join(conditions)}"
    return (
        f"the replay differs from the record: {values}. No recorded condition differs: the log was changed, a value was "
        f"corrupted when the run trained, or the program is not deterministic"
    )
