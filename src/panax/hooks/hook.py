"""`Hook`: code that a run calls between its steps; `RunView`: the run as a hook sees it."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ..core import TrainState
from ..metrics import Histogram
from ..metrics.film import Frames
from ..metrics.heat_map import Picture


@runtime_checkable
class RunView(Protocol):
    """The run as a hook sees it: where it is, what it has measured, and what a hook may ask of it.

    Attributes:
        experiment: The run's `Experiment`.
        step: Steps taken so far.
        state: Parameters, optimizer state and the rest after that step. The next step overwrites it: keep a copy, not the state.
        values: The scalars read last, by the names under which they are logged (`train/loss`, `evaluation/loss`). Those of a
            training step are read one step late, so that the devices never wait for them; `read` waits.
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
        """Log scalars of this step, beside the run's own."""
        ...

    def text(self, name: str, text: str) -> None:
        """Log a text of this step."""
        ...

    def picture(self, name: str, image: Picture) -> None:
        """Log a picture of this step; 8 bits for each of red, green and blue."""
        ...

    def film(self, name: str, frames: Frames, seconds_per_frame: float) -> None:
        """Log a film of this step; TensorBoard plays it, other trackers show its frames side by side."""
        ...

    def histogram(self, name: str, histogram: Histogram) -> None:
        """Log a histogram of this step."""
        ...

    def say(self, line: str, /) -> None:
        """Show a line to whoever watches the run."""
        ...

    def generate(self, prompt: str, **settings: Any) -> str:
        """What the model writes after `prompt` now; settings as of `Result.generate`. Of many processes, all must call it."""
        ...

    def histograms(self) -> Mapping[str, Histogram]:
        """How each parameter and each gradient of this step's batch is spread, by `weights/NAME` and `gradients/NAME`.

        The gradients are those at the parameters after the step; they cost one more forward and backward pass.
        """
        ...

    def evaluate(self) -> None:
        """Ask for an evaluation after this step."""
        ...

    def save(self) -> None:
        """Ask for a checkpoint after this step."""
        ...

    def stop(self, reason: str) -> None:
        """Ask the run to end after this step: it evaluates and saves, as at its last step."""
        ...

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates on held-out data between its steps."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether a signal asks the run to save and end, in all processes alike: a hook that takes long leaves what it does."""
        ...


class Hook:
    """Called by a run between its steps, in the run's own thread. Override what you need; each method does nothing here.

    In a job of many processes, every process calls its hooks at the same steps, and what one of them asks for, all of them do,
    at the next report (`log_every`). An exception in a hook ends the run, which saves first and names the hook.
    """

    def before_run(self, run: RunView) -> None:
        """Before the first step of this run, of its resumption, or after it went back. `restore` was called before."""

    def after_step(self, run: RunView) -> None:
        """After each step was dispatched: the devices may still be computing it."""

    def after_evaluation(self, run: RunView, evaluation: Mapping[str, float]) -> None:
        """After an evaluation: `evaluation` has the held-out losses and metrics, such as `loss` and `accuracy`."""

    def before_save(self, run: RunView) -> None:
        """Before a checkpoint is written; `state` is asked for next."""

    def at_end(self, run: RunView) -> None:
        """After the last step of this run, whatever ended it; the last checkpoint has been written."""

    def state(self) -> Any:
        """What a checkpoint should keep of this hook: JSON values, or None."""
        return None

    def restore(self, state: Any) -> None:
        """Begin where `state` was kept: what `state()` gave, or None in a run that begins, or goes back to its beginning."""
