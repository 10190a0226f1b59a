"""`RunActions`: the interface of a run for hooks and custom loops: values to read, to log, and requests."""

from collections.abc import Mapping
from typing import Any

import jax

from ...core import TrainState
from ...core.errors import RecipeError
from ...metrics import Histogram
from ...metrics.film import Frames
from ...metrics.heat_map import Picture
from ..experiment import Experiment
from ..preparation import PreparedRun
from ..recovery.interrupt import SignalHandler
from ..reporting.generation import TextModel, generate_text
from ..reporting.histograms import weight_histograms
from ..reporting.report import RunReporter
from .hook_runner import HookRunner
from .run_part import RunProgress

RESERVED_NAMES = frozenset({"step", "run"})
"""Names that every line of a log has already."""


class RunActions:
    """The run as hooks and custom loops see it; `panax.hooks.RunView` describes each method."""

    prepared: PreparedRun
    _progress: RunProgress
    _report: RunReporter
    _interrupt: SignalHandler
    _hooks: HookRunner

    @property
    def experiment(self) -> Experiment:
        return self.prepared.experiment

    @property
    def state(self) -> TrainState:
        return self._progress.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._progress.state = state

    @property
    def step(self) -> int:
        return self._progress.step

    @property
    def batch(self) -> dict[str, jax.Array]:
        return self._progress.batch

    @property
    def values(self) -> Mapping[str, float]:
        return self._report.values

    @property
    def evaluates(self) -> bool:
        return self.prepared.data.held_out is not None and self.experiment.evaluate.every > 0

    @property
    def stopping(self) -> bool:
        # With many processes it is set once they have agreed on a step.
        return self._interrupt.signal is not None

    def read(self) -> Mapping[str, float]:
        self._report.flush()
        return self._report.values

    def log(self, values: Mapping[str, float]) -> None:
        if reserved := RESERVED_NAMES & values.keys():
            raise RecipeError(
                f"run.log: {', '.join(sorted(reserved))} is reserved for the log's step; use another "
                f"name, such as mine/{min(reserved)}"
            )
        self._report.trackers.record(self.step, {name: float(value) for name, value in values.items()})

    def text(self, name: str, text: str) -> None:
        self._report.trackers.text(self.step, name, text)

    def picture(self, name: str, image: Picture) -> None:
        self._report.trackers.picture(self.step, name, image)

    def film(self, name: str, frames: Frames, seconds_per_frame: float) -> None:
        self._report.trackers.film(self.step, name, frames, seconds_per_frame)

    def histogram(self, name: str, histogram: Histogram) -> None:
        self._report.trackers.histogram(self.step, name, histogram)

    def generate(self, prompt: str, **settings: Any) -> str:
        state, tokenizer = self.state, self.prepared.data.tokenizer
        model = TextModel(
            self.prepared.task,
            state.eval_params,
            state.model_state,
            tokenizer,
            self.prepared.placement,
            self.prepared.experiment.kernels,
        )
        return generate_text(model, prompt, **settings)

    def histograms(self) -> Mapping[str, Histogram]:
        return weight_histograms(self.prepared.step, self.state, self.batch)

    def evaluate(self) -> None:
        self._hooks.requests.evaluate = True

    def save(self) -> None:
        self._hooks.requests.save = True

    def stop(self, reason: str) -> None:
        self._hooks.requests.stop = self._hooks.requests.stop or reason or "a hook"
