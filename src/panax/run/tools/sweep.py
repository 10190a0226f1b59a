"""Sweeps: the same experiment with several values of some settings, one table, one chart."""

import csv
import dataclasses
import gc
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import PanaxError, RecipeError, describe_type, suggest_name
from ...core.finite_stats import min_finite, sort_finite_first
from ...metrics.console import open_console
from ...metrics.page.lines import Chart, ChartStyle, Line, line_chart
from ...stores import join_url
from ..entry import fit
from ..experiment import Experiment
from ..opened_data import LogFn
from ..reporting.history import read_history, to_dataframe
from ..result import Result

TABLE, CHART = "sweep.csv", "sweep.svg"

CURVES = "curves.svg"
"""Chart of the losses over the steps, if the main chart has the final losses over the values."""


UNSPLIT_FLAGS = ("--data", "--directory", "--checkpoint.directory", "--name")
"""Flags with values that may contain commas."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        settings: Its settings that differ from the other runs, by dotted names.
        step: Steps taken.
        evaluation: Held-out losses and metrics at its end; empty without held-out data, or if it failed.
        error: Why it failed; empty if it did not.
    """

    settings: Mapping[str, Any]
    folder: str
    step: int = 0
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        """Return its settings in short form."""
        return ", ".join(f"{name.rpartition('.')[2]} {_short(value)}" for name, value in self.settings.items())

    @property
    def loss(self) -> float:
        """Return the held-out loss, or that of the last report; infinite if there is none."""
        if self.error:
            return float("inf")
        if "loss" in self.evaluation:
            return self.evaluation["loss"]
        losses = [row["train/loss"] for row in read_history(self.folder) if row.get("train/loss") is not None]
        return losses[-1] if losses else float("inf")


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep:
    """Result of a sweep.

    Attributes:
        trials: The trials in their order; those that were not started are missing.
        interrupted_by: The signal's name, if one ended the sweep early.
    """

    folder: str
    trials: tuple[Trial, ...]
    interrupted_by: str | None = None

    @property
    def best(self) -> Trial:
        """Return the trial with the lowest held-out loss, or training loss without held-out data.

        A loss that is not finite is never best.

        Raises:
            RecipeError: Every trial failed, or no loss is finite.
        """
        completed_trials = [trial for trial in self.trials if not trial.error]
        if not completed_trials:
            raise RecipeError(f"no trial of the sweep in {self.folder} ended well; its table gives the reasons")
        # A training loss is not compared with held-out ones; a trial without a held-out figure was not
        # evaluated.
        judged = [trial for trial in completed_trials if "loss" in trial.evaluation]
        best = min_finite(judged or completed_trials, key=lambda trial: trial.loss)
        if not math.isfinite(best.loss):
            raise RecipeError(f"no trial of the sweep in {self.folder} has a finite loss; its table shows them")
        return best

    @property
    def ranked(self) -> list[Trial]:
        """Return the trials by increasing loss; those without a finite one are last, in their order."""
        return sort_finite_first(self.trials, key=lambda trial: trial.loss)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table, one for each trial: settings, steps, loss, metrics, folder, error."""
        return [
            {
                **trial.settings,
                "step": trial.step,
                "loss": trial.loss,
                **trial.evaluation,
                "folder": trial.folder,
                "error": trial.error,
            }
            for trial in self.trials
        ]

    @property
    def table(self) -> Any:
        """Return the rows as a pandas DataFrame, if pandas is installed."""
        return to_dataframe(self.rows, index=None)

    def plot(self) -> Chart:
        """Plot the loss of each trial over its steps: held-out if evaluated, otherwise of training."""
        drawn = []
        for trial in self.trials:
            rows = read_history(trial.folder)
            name = "evaluation/loss" if any(row.get("evaluation/loss") is not None for row in rows) else "train/loss"
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            drawn.append(Line(trial.name, [x for x, _ in points], [y for _, y in points]))
        return line_chart(drawn, "step")

    def plot_values(self) -> Chart | None:
        """Plot the final loss over the value that was swept; None for several settings, or other values than
        numbers."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.settings)
        varied = [name for name in names if len({repr(trial.settings.get(name)) for trial in self.trials}) > 1]
        if len(varied) != 1:
            return None
        values = [_number(trial.settings.get(varied[0])) for trial in self.trials]
        # By the values of the setting.
        points = sort_finite_first(
            [(value, trial.loss) for value, trial in zip(values, self.trials) if math.isfinite(trial.loss)],
            key=lambda point: point[0],
        )
        if not all(map(math.isfinite, values)):
            return None
        if len(points) < 2:
            return None
        values = [value for value, _ in points]
        wide = values[0] > 0 and values[-1] > 5 * values[0]
        line = Line("loss at the end", values, [loss for _, loss in points])
        return line_chart([line], varied[0], ChartStyle(logarithmic_x=wide))

    def write(self) -> None:
        """Write the table and the charts into the sweep's folder."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        with open(folder / TABLE, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows(self.rows)
        by_value = self.plot_values()
        if by_value is not None:
            by_value.save(folder / CHART)
        self.plot().save(folder / (CURVES if by_value is not None else CHART))

    def __repr__(self) -> str:
        return f"Sweep({len(self.trials)} trials, {self.folder})"


def sweep(
    experiment: Experiment,
    settings: Mapping[str, Any],
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
    say: LogFn | None = None,
) -> Sweep:
    """Train the experiment with each combination of these settings, one after the other, each in its own
    folder.

    The same call again resumes: runs that are done are not trained again. A run that fails is a row with its
    error, and the sweep continues.

    Args:
        settings: Values by the dotted names of settings: `{"optimizer.schedule.peak": (1e-3, 3e-3)}`.
        say: Called with each message for the user, a line at a time; see `fit`.

    Raises:
        RecipeError: A setting does not exist, or a value is invalid.
    """
    for name, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise RecipeError(f"settings[{name!r}] is {values!r}; expected several values, as in ({values!r}, ...)")
    combinations = [dict(zip(settings, values)) for values in itertools.product(*settings.values())]
    trials = []
    for combination in combinations:
        changed = experiment
        for name, value in combination.items():
            changed = replace_setting(changed, name, value)
        trials.append((combination, changed))
    return run_trials(trials, fresh=fresh, accept_changes=accept_changes, quiet=quiet, say=say)


def run_trials(
    trials: Sequence[tuple[Mapping[str, Any], Experiment]],
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
    say: LogFn | None = None,
) -> Sweep:
    """Run a sweep over given experiments, each with the settings that distinguish it; see `sweep`."""
    if not trials:
        raise RecipeError("a sweep needs at least one setting with values to try")
    root = f"{trials[0][1].folder}-sweep"
    placed = [(settings, _placed(experiment, root, settings)) for settings, experiment in trials]
    folders = [experiment.folder for _, experiment in placed]
    if len(set(folders)) < len(folders):
        raise RecipeError("two runs of the sweep have the same settings; pass each value once")
    announce: LogFn = say or ((lambda line: None) if quiet else open_console()[0])
    done: list[Trial] = []
    for number, (settings, experiment) in enumerate(placed, start=1):
        trial = Trial(settings, experiment.folder)
        announce(f"run {number} of {len(placed)}: {trial.name}")
        signal = None
        try:
            result = fit(experiment, fresh=fresh, accept_changes=accept_changes, quiet=quiet, say=say)
        except PanaxError as error:
            done.append(dataclasses.replace(trial, error=str(error)))
            announce(f"warning: {trial.name}: {error}")
        else:
            done.append(_ended(trial, result))
            signal = result.interrupted_by
            # The next run needs the devices' memory.
            del result
        gc.collect()
        partial_sweep = Sweep(root, tuple(done), signal)
        partial_sweep.write()
        if signal is not None:
            return partial_sweep
    return Sweep(root, tuple(done))


def replace_setting(settings: Any, name: str, value: Any) -> Any:
    """Replace the value of one setting of a frozen dataclass, by its dotted name.

    Raises:
        RecipeError: The setting does not exist.
    """
    first, _, rest = name.partition(".")
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        raise RecipeError(f"{describe_type(settings)} has no settings, so none called {name!r}")
    known = [field.name for field in dataclasses.fields(settings)]
    if first not in known:
        raise RecipeError(f"{type(settings).__name__} has no setting {first!r}: {suggest_name(first, known)}")
    inner = replace_setting(getattr(settings, first), rest, value) if rest else value
    return dataclasses.replace(settings, **{first: inner})


def _ended(trial: Trial, result: Result) -> Trial:
    return dataclasses.replace(trial, step=result.step, evaluation=dict(result.evaluation))


def _placed(experiment: Experiment, root: str, settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment with a folder of the sweep, and its checkpoints next to those of the others."""
    label = re.sub(r"[^\w.=,+-]", "_", ",".join(f"{name}={_short(value)}" for name, value in settings.items()))[:200]
    checkpoint = experiment.checkpoint
    if checkpoint.directory:
        checkpoint = dataclasses.replace(checkpoint, directory=join_url(checkpoint.directory, label))
    return dataclasses.replace(experiment, directory=str(Path(root) / label), checkpoint=checkpoint)


def _number(value: Any) -> float:
    """Convert a setting's value, possibly the text of a flag, to a number; NaN if it is not one."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _short(value: Any) -> str:
    """Format a value in few characters.

    >>> _short(0.003), _short("adam"), _short((1, 2))
    ('0.003', 'adam', '[1, 2]')
    """
    if isinstance(value, str):
        return value
    try:
        return f"{value:g}" if isinstance(value, float) else json.dumps(value)
    except TypeError:
        return type(value).__name__


def expand_flags(flags: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield (the varied settings, the flags of that run) for command-line flags, some with values separated
    by commas.

    >>> [(varied, run) for varied, run in expand_flags(["--seed", "1,2", "--name", "x"])]
    [({'seed': '1'}, ['--seed', '1', '--name', 'x']), ({'seed': '2'}, ['--seed', '2', '--name', 'x'])]
    """
    flags = [part for flag in flags for part in (flag.split("=", 1) if re.match(r"--[\w.-]+=", flag) else [flag])]
    places = [
        at
        for at, flag in enumerate(flags)
        if "," in flag and at and flags[at - 1].startswith("--") and flags[at - 1] not in UNSPLIT_FLAGS
    ]
    for values in itertools.product(*(flags[at].split(",") for at in places)):
        run = list(flags)
        varied = {}
        for at, value in zip(places, values):
            run[at] = value
            varied[flags[at - 1].removeprefix("--").replace("-", "_")] = value
        yield varied, run
