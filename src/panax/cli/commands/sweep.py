"""`panax sweep`: a recipe with several values of some settings, one table, one chart."""

import math
import signal
from collections.abc import Sequence

from ...core.errors import RecipeError
from ...job.join import check_single_process
from ...metrics.console import plain_console
from ...run.tools.reference import add_reference, needs_reference
from ...run.tools.sweep import CHART, TABLE, Sweep, expand_flags, run_trials
from ...system.terminal_text import align_columns
from ..overrides import experiment_from
from ..plugins import start_jax

HELP = """\
usage: panax sweep RECIPE --SETTING A,B[,C...] [--field.sub value ...]

Train a recipe with each combination of the values that commas separate, one
run after the other, each in its own folder of runs/NAME-sweep:

  panax sweep quickstart --optimizer.schedule.peak 1e-3,3e-3 --seed 0,1

It ends with a table (sweep.csv) and a chart of the losses (sweep.svg). The
same command again resumes; a run that fails is a row with its error.
--fresh and --accept-changes work as in `panax train`.
"""


def sweep(arguments: Sequence[str]) -> int:
    """Train each combination, then show the table."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise RecipeError("expected `panax sweep RECIPE --SETTING A,B`; `panax recipes` lists the recipes")
    fresh, accept = ("--fresh" in arguments, "--accept-changes" in arguments)
    name, *flags = [each for each in arguments if each not in ("--fresh", "--accept-changes")]
    runs = list(expand_flags(flags))
    if len(runs) < 2:
        raise RecipeError(
            "no setting has several values; separate them by commas, as in --optimizer.schedule.peak 1e-3,3e-3"
        )
    # All are read before the first is trained: a mistake in the last one is reported immediately.
    trials = [(varied, experiment_from([name, *run], "train")) for varied, run in runs]
    check_single_process("panax sweep")
    start_jax()
    trials = [(varied, add_reference(each) if needs_reference(each) else each) for varied, each in trials]
    console = plain_console()
    result = run_trials(trials, fresh=fresh, accept_changes=accept)
    for line in format_sweep(result):
        console.print(line)
    if result.interrupted_by is not None:
        return 128 + signal.Signals[result.interrupted_by]
    return 1 if all(trial.error for trial in result.trials) else 0


def format_sweep(result: Sweep) -> list[str]:
    """Format the table of a sweep, the best run first, in at most 80 columns if names allow it."""
    names = list(result.trials[0].settings)
    titles = [name.rpartition(".")[2] for name in names]
    accurate = any("accuracy" in trial.evaluation for trial in result.trials)
    rows = [[*titles, "steps", "loss", *(["accuracy"] if accurate else [])]]
    ranked = result.ranked
    for trial in ranked:
        loss = "failed" if trial.error else f"{trial.loss:.4f}"
        more = [f"{trial.evaluation['accuracy']:.1%}" if "accuracy" in trial.evaluation else ""] if accurate else []
        rows.append([*(str(trial.settings[name]) for name in names), str(trial.step), loss, *more])
    lines = align_columns(rows, left=0)
    if math.isfinite(ranked[0].loss):
        lines.append(f"best          {ranked[0].folder}")
    return ["", *lines, f"table         {result.folder}/{TABLE}", f"chart         {result.folder}/{CHART}"]
