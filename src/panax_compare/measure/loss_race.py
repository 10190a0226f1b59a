"""Columns that train to a held-out loss: the same batches of real data in each, in turns, each evaluated
equally often."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from panax.core.errors import RecipeError
from panax.core.finite_stats import min_finite
from panax.metrics.report.formats import format_duration, format_money
from panax.system import json_reader
from panax.system.replacement import replace_json
from panax.system.terminal_text import align_columns

from ..columns import Column
from ..workload.equality import compare_losses, tolerances
from ..workload.settings import Settings
from .crew import WorkerGroup
from .measurement import LogFn, Measurement

REACHED = "until.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopCondition:
    """Target of the training: a held-out loss.

    Attributes:
        loss: The mean cross-entropy of the recipe's held-out data, in nats.
        every: Steps between two evaluations.
        steps: Maximum number of steps; a column that has not reached the loss by then is not trained further.
    """

    loss: float
    every: int = 25
    steps: int = 2000

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise RecipeError(
                f"until_loss={self.loss}; expected a held-out loss: a finite number, as in --until-loss 3.2"
            )
        if not 1 <= self.every <= self.steps:
            raise RecipeError(
                f"evaluate_every={self.every}, max_steps={self.steps}; expected 1 step or more between evaluations, and at "
                f"least that number of steps in all"
            )


@dataclasses.dataclass
class RaceEntry:
    """Progress of a column toward the loss.

    Attributes:
        steps: Steps until its end, or so far.
        start_seconds: Time from the start of its process to its first loss: imports, tracing, compiling.
        train_seconds: Time of the steps, including the transfer of their batches.
        evaluate_seconds: Time of the evaluations.
        losses: Held-out losses, by the step after which they were measured.
        devices: Number of devices reserved for it.
        reached: True if the last held-out loss is at or below the target.
        reason: Reason why it ended without reaching the loss.
    """

    name: str
    title: str
    devices: int = 1
    steps: int = 0
    start_seconds: float = 0.0
    train_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    reached: bool = False
    reason: str = ""

    @property
    def seconds(self) -> float:
        """Return the time from the start of its process to the loss, without the turns of other columns."""
        return self.start_seconds + self.train_seconds + self.evaluate_seconds


class Race(Measurement):
    """A comparison in which the columns with equal first losses train to a held-out loss."""

    def __init__(self, settings: Settings, until: StopCondition, folder: Path, command: str, say: LogFn):
        if settings.kind == "vit":
            raise RecipeError(
                "--until-loss trains on data, and 'vit' has images of noise, which can't be learned from; pass a recipe of "
                "images, such as recipe:vit_digits, or folders of runs"
            )
        if settings.kind == "dlrm":
            raise RecipeError(
                "--until-loss trains on data, and 'dlrm' times batches of generated ids; train recipes of recommenders with "
                "`panax train`, and give folders of runs"
            )
        super().__init__(settings, folder, command, say, dataclasses.asdict(until))
        self.until = until

    def run_to_loss(self) -> list[RaceEntry]:
        """Train all columns with agreeing first losses. Finished columns are saved, and not trained again by
        the same command."""
        arrivals = self._read_finished()
        try:
            self._checked()
            waiting = [column for column in self._agreeing() if column.name not in arrivals]
            if self.comparison.one_at_a_time:
                for column in waiting:
                    self._train([column], arrivals)
                    self._close_all()
            else:
                self._train(waiting, arrivals)
        finally:
            for crew in self._alive.values():
                crew.close()
            if self.comparison.columns:
                self._save()
        order = list(self.comparison.columns)
        return [arrivals[name] for name in sorted(arrivals, key=order.index)]

    def _agreeing(self) -> list[Column]:
        """Return the columns with first losses that agree with the reference's; for the others, record the
        difference."""
        checked = [column for column in self._with_state("pending") if self.result(column).losses]
        if not checked:
            return []
        reference = self.comparison.columns[self.comparison.reference].losses
        allowed = tolerances(reference, self.comparison.nudged or None, self.settings.precision)
        columns = []
        for column in checked:
            judgement = compare_losses(self.result(column).losses, reference, allowed)
            if judgement.is_equal:
                columns.append(column)
            else:
                self.result(column).state, self.result(column).reason = "failed", judgement.reason
                self.say(f"{column.title} is left out, since its computation differs: {judgement.reason}")
        return columns

    def _train(self, columns: Sequence[Column], arrivals: dict[str, RaceEntry]) -> None:
        """Train in turns, so that all experience the same load of the machine."""
        under_way = {
            column.name: RaceEntry(column.name, column.title, column.processes * column.devices) for column in columns
        }
        waiting = list(columns)
        while waiting:
            for column in list(waiting):
                arrival = under_way[column.name]
                with self._recorded(column):
                    crew = self._crew(column, arrival)
                    self._advance(crew, arrival)
                if self.result(column).state == "failed":
                    arrival.reason = self.result(column).reason
                if arrival.reached or arrival.reason:
                    waiting.remove(column)
                    arrivals[column.name] = arrival
                    self._keep(arrivals)
                    if column.name in self._alive:
                        self._alive.pop(column.name).close()

    def _crew(self, column: Column, arrival: RaceEntry) -> WorkerGroup:
        """Return a column's processes, started and past the checked steps, unless they run already."""
        checked = self.settings.checked_steps
        if column.name not in self._alive:
            crew = self._alive[column.name] = self._start(column)
            entry = self.result(column)
            reply = crew.ask("losses", steps=checked)
            entry.first_step_seconds, entry.checked_seconds = reply["first_at"] - crew.started_at, reply["seconds"]
        if arrival.steps == 0:
            entry = self.result(column)
            arrival.steps, arrival.start_seconds = checked, entry.first_step_seconds or 0.0
            arrival.train_seconds = sum(entry.checked_seconds[1:])
        return self._alive[column.name]

    def _advance(self, crew: WorkerGroup, arrival: RaceEntry) -> None:
        """Train to the next evaluation, and evaluate."""
        steps = min(self.until.steps, (arrival.steps // self.until.every + 1) * self.until.every) - arrival.steps
        if steps > 0:
            arrival.train_seconds += crew.ask("advance", steps=steps)["seconds"]
            arrival.steps += steps
        reply = crew.ask("held_out")
        arrival.evaluate_seconds += reply["seconds"]
        loss = arrival.losses[arrival.steps] = reply["held_out"]
        self.say(f"{arrival.title}: step {arrival.steps}, held-out loss {loss:.4f}, {format_duration(arrival.seconds)}")
        arrival.reached = loss <= self.until.loss
        if not arrival.reached and not math.isfinite(loss):
            arrival.reason = f"its held-out loss is {loss} after step {arrival.steps}"
        elif not arrival.reached and arrival.steps >= self.until.steps:
            arrival.reason = f"not reached in {arrival.steps} steps: {min_finite(arrival.losses.values()):.4f} at best"

    def _keep(self, arrivals: dict[str, RaceEntry]) -> None:
        replace_json(self.folder / REACHED, [dataclasses.asdict(each) for each in arrivals.values()])

    def _read_finished(self) -> dict[str, RaceEntry]:
        """Read the columns that ended in an earlier run; failed ones are tried again."""
        with contextlib.suppress(FileNotFoundError):
            raw = json_reader.read(self.folder / REACHED, constants=True)
            rows = [RaceEntry(**{**each, "losses": {int(n): v for n, v in each["losses"].items()}}) for each in raw]
            return {each.name: each for each in rows if each.reached or each.steps >= self.until.steps}
        return {}


def format_race_table(
    arrivals: Sequence[RaceEntry], until: StopCondition, unit: str, per_step: int, price: float | None, currency: str
) -> str:
    """Format a row for each column, for a terminal, followed by remarks on columns.

    Args:
        unit: Unit that is counted.
        per_step: Number of units per step.
        price: Price of an hour of one device; None omits costs.
    """
    rows = [["column", f"steps to {until.loss:g}", unit, "start", "training", "evaluations", "in all"]]
    rows[0] += ["loss"] if price is None else ["cost", "loss"]
    for each in arrivals:
        times = [
            format_duration(value)
            for value in (each.start_seconds, each.train_seconds, each.evaluate_seconds, each.seconds)
        ]
        lowest = f"{min_finite(each.losses.values()):.4f}" if each.losses else "—"
        counted = [f"{each.steps:,}", f"{each.steps * per_step:,}", *times] if each.reached else ["—"] * 6
        cost = (
            []
            if price is None
            else [format_money(each.seconds / 3600 * each.devices * price, currency) if each.reached else "—"]
        )
        rows.append([each.title, *counted, *cost, lowest])
    lines = align_columns(rows)
    notes = [f"{each.title}: {each.reason}" for each in arrivals if each.reason]
    return "\n".join([*lines, *([""] if notes else []), *notes])
