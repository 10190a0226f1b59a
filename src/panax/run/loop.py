"""`Run`: the training loop. Short on purpose: everything it calls is a value, or a room of its own."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from ..core import TrainState
from ..core.errors import DataError, RecipeError
from ..core.heartbeat import heartbeat
from ..data.ramped import Ramped
from ..metrics import Histogram
from ..metrics.film import Frames
from ..metrics.heat_map import Picture
from ..train import Scalars, evaluate_sent
from .experiment import Experiment
from .feed import Fed, feed
from .hooked import Hooked, Wishes
from .interrupt import Interrupt
from .islands import Island
from .keeping import Keeper, due
from .prepare import Prepared, Say
from .probing import Probing
from .report import Report
from .result import Result
from .rewinding import Rewinding
from .smaller import write_smaller_layouts
from .spread import spread_of
from .start import Start
from .verifying import Verifying
from .writing import continue_text


class Run:
    """A run that goes on: its batches, and what is done after each step. `fit` is this, with the experiment's own step:

        for batch in run:
            run.after_step(run.take_step(batch))

    Attributes:
        state: Parameters, optimizer state and the rest. A loop that takes its own steps sets it.
        step: Steps taken.
        batch: The last one drawn, on the devices.
        result: How the run ended; None until it has.
    """  # fmt: skip

    def __init__(
        self,
        prepared: Prepared,
        start: Start,
        keeper: Keeper,
        report: Report,
        rewinding: Rewinding,
        verifying: Verifying,
        interrupt: Interrupt,
        say: Say,
        island: Island | None = None,
    ):
        self.prepared = prepared
        self.batch: dict[str, jax.Array] = {}
        self.result: Result | None = None
        self.say = say
        self._keeper, self._report, self._rewinding, self._interrupt = keeper, report, rewinding, interrupt
        self._verifying, self._island = verifying, island
        self._probing = Probing(prepared, report)
        self._stopped, self._failed = "", False
        self._hooked = Hooked(self.experiment.hooks)
        keeper.of_hooks = lambda: self._hooked.kept(self)
        self._begin(start)

    @property
    def experiment(self) -> Experiment:
        return self.prepared.experiment

    def _begin(self, start: Start) -> None:
        """Go on from a state, with the hooks as they were there."""
        self.state, self.step = start.state, start.step
        self._position = self._drawn = start.position
        self._number = start.drawn.drawn
        self._evaluation: Mapping[str, float] = {}
        self._goes_back = False
        self._hooked.begin(self, start.hooks)
        if self._hooked:
            self._take_wishes(self._hooked.wishes.agreed())

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """The batches of the steps that are left; `after_step` is to be called after each.

        Where updates can't be applied, the run may go back: `step` and `state` are then those of before.
        """
        while True:
            self._report.ledger.begin_steps(self.step)
            yield from self._batches()
            if self._is_behind:
                self._begin(self._caught_up())
                continue
            if self.step == self.experiment.num_steps and not (self._stopped or self._failed or self._goes_back):
                self._report.flush()
                self._goes_back = self._rewinding.is_due
            if not self._goes_back:
                return
            # Room for the state that is restored.
            del self.state
            self._begin(self._rewinding.go_back(self.step))

    def _batches(self) -> Iterator[dict[str, jax.Array]]:
        """Those up to the end, or to where the run goes back."""
        report, interrupt, sender, first = self._report, self._interrupt, self.prepared.step, self.step
        left_out = self._rewinding.left_out
        with contextlib.closing(
            feed(self.prepared.data.train, sender, self._position, drawn=self._number, left_out=left_out)
        ) as batches:
            batches.gives_up = interrupt.gives_up_waiting
            while not (self._ended or self._goes_back or self._is_behind or interrupt.due()):
                report.before_step(self.step)
                late = report.waiting_for_data() if batches.is_late else contextlib.nullcontext()
                with report.clock.measure("data_stall"), late:
                    drawn = next(batches, None)
                if drawn is None and interrupt.gives_up_waiting():
                    return
                if drawn is None:
                    raise DataError(
                        f"the data ended after {self.step} of {self.experiment.num_steps} steps"
                        + (f", and {len(left_out)} batches were left out" if left_out else "")
                        + "; give more, or fewer steps"
                    )
                self.batch, self._drawn, self._number = drawn
                if (before := self.step) == first:
                    train = self.prepared.data.train
                    parts = train.parts(self._position) if isinstance(train, Ramped) else 1
                    write_smaller_layouts(self.prepared, self.batch, parts)
                yield self.batch
                if self.step != before + 1:
                    raise RecipeError("call run.after_step(scalars) once for each batch of `for batch in run`")

    def take_step(self, batch: Mapping[str, jax.Array]) -> Scalars:
        """Take the experiment's own step; returns its scalars before the devices are done."""
        with self._report.clock.measure("dispatch"):
            self.state, scalars = self._verifying.take(self.state, batch, self.step + 1)
        self._report.compiled()
        return scalars

    def after_step(self, scalars: Scalars) -> None:
        """Count the step, and do what is due after it: report, call hooks, evaluate, save.

        Args:
            scalars: What the step yields, by name; they are read while the next step runs.
        """
        self.step += 1
        heartbeat().step(self.step)
        self._position, self._evaluation = self._drawn, {}
        self._rewinding.took(self.step, self._number)
        # Reads the scalars of the step before, while this one runs: the devices never wait for the loop.
        self._report.after_step(self.step, scalars, self.batch, self._position)
        # Asked here alone, where every process has read the same scalars: a hook may read more in one of them.
        self._goes_back = self._rewinding.is_due
        if self._goes_back:
            return
        if self._island is not None:
            self.state = self._island.after_step(self.state, self.step)
            if self._is_behind:
                return
        self._probing.after_step(self.step)
        wishes = self._called("after_step", due(self.experiment.log_every, self.step))
        if (due(self.experiment.evaluate.every, self.step) or wishes.evaluate) and not self._ended:
            wishes.save |= self._judge().save
        if not self._ended and self._keeper.is_due(self.step, asked=wishes.save) and self._rewinding.settle():
            with self._report.clock.measure("save"), self._report.ledger.during("checkpoint wait"):
                self._keeper.after_step(self.state, self.step, self._position, self._evaluation, asked=wishes.save)
            self._report.ledger.mark(self.step, saved=True)

    def finish(self) -> Result:
        """Evaluate, unless the run was cut off; save; tell how it ended."""
        if self._goes_back:
            # The caller has left the loop at a step that does not count.
            del self.state
            self._begin(self._rewinding.go_back(self.step))
        self._report.flush()
        if (self._stopped or self.step == self.experiment.num_steps) and not self._failed and not self._evaluation:
            self._judge()
        ledger = self._report.ledger
        ledger.mark(self.step)
        with ledger.during("checkpoint wait"):
            checkpoint = self._keeper.at_end(self.state, self.step, self._position, self._evaluation)
        ledger.switch("start")
        self._hooked.call("at_end", self)
        self._report.account(self.step, self._position)
        self._hooked.raise_failure(checkpoint, self._failed)
        # With all its steps a run is done, whatever came meanwhile.
        stopped, signal = "", None
        if self.step < self.experiment.num_steps:
            stopped = self._stopped
            signal = None if self._interrupt.signal is None else self._interrupt.signal.name
        left = f"stopped by {signal}" if signal else f"stopped: {stopped or 'the loop was left'}"
        self._report.end(self.step, "done" if self.step == self.experiment.num_steps else left)
        self.result = Result(self.prepared, self.state, self.step, self._evaluation, checkpoint, signal, stopped)
        return self.result

    @property
    def _is_behind(self) -> bool:
        """Whether the other islands have met without this one, which joins them at a later step."""
        return self._island is not None and self._island.ahead is not None

    def _caught_up(self) -> Start:
        assert self._island is not None
        self._report.flush()
        here = Start(
            self.state, self.step, self._position, self._keeper.stored, self._hooked.kept(self), self._rewinding.drawn
        )
        start = self._island.caught_up(self.state, here, self._rewinding.left_out)
        self._rewinding.drawn = start.drawn
        return start

    @property
    def _ended(self) -> bool:
        return self.step >= self.experiment.num_steps or bool(self._stopped) or self._failed

    def _called(self, method: str, agree: bool, *arguments: Any) -> Wishes:
        """Call the hooks, and take what they asked for; of many processes, where all of them agree on it."""
        if not self._hooked:
            return Wishes()
        with self._report.clock.measure("hooks"):
            self._hooked.call(method, self, *arguments)
            if jax.process_count() > 1 and not agree:
                return Wishes()
            return self._take_wishes(self._hooked.wishes.agreed())

    def _take_wishes(self, wishes: Wishes) -> Wishes:
        self._hooked.wishes = Wishes()
        self._stopped, self._failed = self._stopped or wishes.stop, self._failed or wishes.failed
        return wishes

    def _judge(self) -> Wishes:
        self._report.flush()
        with self._report.ledger.during("evaluation"):
            self._evaluation = judge(self.prepared, self.state, self.step, self._report)
            self._report.compiled()
            return self._called("after_evaluation", True, self._evaluation) if self._evaluation else Wishes()

    # What a hook sees and may ask for; see `panax.hooks.Running`.

    @property
    def values(self) -> Mapping[str, float]:
        return self._report.values

    @property
    def evaluates(self) -> bool:
        return self.prepared.data.held_out is not None and self.experiment.evaluate.every > 0

    def read(self) -> Mapping[str, float]:
        self._report.flush()
        return self._report.values

    def log(self, values: Mapping[str, float]) -> None:
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
        return continue_text(self.prepared.task, state.judged_params, state.model_state, tokenizer, prompt, **settings)

    def histograms(self) -> Mapping[str, Histogram]:
        return spread_of(self.prepared.step, self.state, self.batch)

    def evaluate(self) -> None:
        self._hooked.wishes.evaluate = True

    def save(self) -> None:
        self._hooked.wishes.save = True

    def stop(self, reason: str) -> None:
        self._hooked.wishes.stop = self._hooked.wishes.stop or reason or "a hook"


def judge(prepared: Prepared, state: TrainState, number: int, report: Report) -> Mapping[str, float]:
    """Evaluate on the held-out data; empty where there is none."""
    if prepared.data.held_out is None:
        return {}
    heartbeat().phase("evaluate")
    most = prepared.experiment.evaluate.batches or None
    with contextlib.closing(feed(prepared.data.held_out, prepared.step, most=most)) as batches:
        evaluation = prepared.data.judged(evaluate_sent(prepared.step, state, _followed(batches)))
    report.evaluation(number, evaluation)
    return evaluation


def _followed(batches: Iterable[Fed]) -> Iterator[dict[str, jax.Array]]:
    for batch, _, _ in batches:
        heartbeat().alive()
        yield batch
