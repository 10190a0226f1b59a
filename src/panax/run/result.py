"""`Result`: the outcome of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..core import TrainState
from ..core.errors import RecipeError, suggest_name
from ..metrics.page.lines import Chart, Line, line_chart
from .preparation import PreparedRun
from .reporting.evaluation import evaluate_result
from .reporting.generation import TextModel, generate_text
from .reporting.history import read_history, to_dataframe


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run.

    Attributes:
        state: The state after the last step.
        step: Steps taken, earlier runs of the same command included.
        evaluation: Held-out losses and metrics after the last step; empty without held-out data, or if the run
            was cut off.
        checkpoint: Address of the last checkpoint.
        interrupted_by: The signal's name, if one ended the run early.
        stopped: Why a hook ended the run early; empty if none did.
    """

    prepared: PreparedRun
    state: TrainState
    step: int
    evaluation: Mapping[str, float]
    checkpoint: str
    interrupted_by: str | None = None
    stopped: str = ""

    @property
    def history(self) -> Any:
        """Return the run's metrics, earlier runs of the same command included: a pandas DataFrame, or rows
        without pandas."""
        return to_dataframe(read_history(self.prepared.folder))

    def plot(self, *names: str) -> Chart:
        """Plot metrics of the run, by default its training and held-out loss; a notebook shows the chart.

        Raises:
            RecipeError: The run has not logged anything of that name.
        """
        rows = read_history(self.prepared.folder)
        known = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
        lines = []
        for name in names or [name for name in ("train/loss", "evaluation/loss") if name in known]:
            if name not in known:
                raise RecipeError(f"the run has logged no {name!r}: {suggest_name(name, known)}")
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            lines.append(Line(name, [step for step, _ in points], [value for _, value in points]))
        return line_chart(lines, "step")

    def __repr__(self) -> str:
        held_out = f", held-out loss {self.evaluation['loss']:.4f}" if "loss" in self.evaluation else ""
        cut = f", stopped by {self.interrupted_by or self.stopped}" if self.interrupted_by or self.stopped else ""
        return f"Result(step {self.step}{held_out}{cut}, {self.checkpoint})"

    def generate(self, prompt: str, **settings: Any) -> str:
        """Generate text after `prompt` with the trained model; settings as for `panax.run.generate_text`.

        Raises:
            RecipeError: The task does not generate, or has no tokenizer; or a setting is out of range.
        """
        state, data = self.state, self.prepared.data
        model = TextModel(
            self.prepared.task,
            state.eval_params,
            state.model_state,
            data.tokenizer,
            self.prepared.placement,
            self.prepared.experiment.kernels,
        )
        return generate_text(model, prompt, **settings)

    def evaluate(self, data: Any = None, batches: int | None = None) -> dict[str, float]:
        """Evaluate the trained model on its held-out data, or on other data; see `panax.evaluate`."""
        return evaluate_result(self.prepared, self.state, data, batches)
