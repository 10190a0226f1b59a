"""`Hook`: code that a run calls between its steps; `RunView`: the run as a hook sees it."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ..core import TrainState
from ..metrics import Histogram
from ..metrics.film import Frames
from ..metrics.heat_map import Picture


@runtime_checkable
class RunView(Protocol):
    """The run as a hook sees it: its progress, its measurements, and the actions that a hook may request.

    Attributes:
        experiment: The run's `Experiment`.
        step: Number of steps taken so far.
        state: The training state (parameters, optimizer state, ...) after that step. The next step overwrites
            its buffers: keep a copy, not a reference.
        values: The most recent scalars, by the names under which they are logged (`train/loss`,
            `evaluation/loss`). Those of a training step arrive one step late, so that the devices never wait
            for them; `read` waits.
    """

    @property
    def experiment(self) -> Any: ...
    @property
    def step(self) -> int: ...
    @property
    def state(self) -> TrainState: ...
    @property
    def values(self) -> Mapping[str, float]: ...

    def read(self) -> Mapping[str, float]:
        """Wait for this step's scalars and return `values` with them."""
        ...

    def log(self, values: Mapping[str, float]) -> None:
        """Log scalars of this step, in addition to the run's."""
        ...

    def text(self, name: str, text: str) -> None:
        """Log a text of this step."""
        ...

    def picture(self, name: str, image: Picture) -> None:
        """Log an image of this step; 8-bit RGB."""
        ...

    def film(self, name: str, frames: Frames, seconds_per_frame: float) -> None:
        """Log a video of this step; TensorBoard plays it, other trackers show its frames side by side."""
        ...

    def histogram(self, name: str, histogram: Histogram) -> None:
        """Log a histogram of this step."""
        ...

    def say(self, line: str, /) -> None:
        """Print a line to the run's output."""
        ...

    def generate(self, prompt: str, **settings: Any) -> str:
        """Generate a continuation of `prompt` with the current parameters.

        Settings are those of `Result.generate`. In a job of many processes, all of them must call it.
        """
        ...

    def histograms(self) -> Mapping[str, Histogram]:
        """Compute histograms of each parameter (`weights/NAME`) and of its gradient (`gradients/NAME`) on
        this step's batch.

        The gradients are evaluated at the parameters after the step, which costs one more forward and
        backward pass.
        """
        ...

    def evaluate(self) -> None:
        """Request an evaluation after this step."""
        ...

    def save(self) -> None:
        """Request a checkpoint after this step."""
        ...

    def stop(self, reason: str) -> None:
        """Request the end of the run after this step; it evaluates and saves, as after its last step."""
        ...

    @property
    def evaluates(self) -> bool:
        """Return True if the run evaluates on held-out data between its steps."""
        ...

    @property
    def stopping(self) -> bool:
        """Return True if a signal has requested the run to save and end, the same in all processes; a slow
        hook should return."""
        ...


class Hook:
    """Base class of hooks, which a run calls between its steps, in its main thread. Override what you need.

    All methods do nothing by default. In a job of many processes, every process calls its hooks at the same
    steps; a request by one process takes effect in all of them, at the next report (`log_every`). An
    exception in a hook ends the run, which saves first and names the hook.
    """

    def before_run(self, run: RunView) -> None:
        """Handle the start of a run, a resumption or a rollback; `restore` was called before."""

    def after_step(self, run: RunView) -> None:
        """Handle a dispatched step; the devices may still be computing it."""

    def after_evaluation(self, run: RunView, evaluation: Mapping[str, float]) -> None:
        """Handle an evaluation; `evaluation` has the held-out losses and metrics (`loss`, `accuracy`,
        ...)."""

    def before_save(self, run: RunView) -> None:
        """Handle an imminent checkpoint; `state` is called next."""

    def at_end(self, run: RunView) -> None:
        """Handle the end of the run for any reason; its last checkpoint has been written."""

    def state(self) -> Any:
        """Return the hook's state for a checkpoint: JSON values, or None."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the hook from the result of `state()`; None at a run's start or a rollback to it."""
