"""`panax at`: a step of a run, replayed to the bit and opened."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ....core.errors import RecipeError
from ....core.sanitize import make_printable
from ....job.join import check_single_process
from ....metrics.console import plain_console, wrap_line
from ....run import Experiment
from ....run.replay.opened_step import MAX_ROWS, at
from ....run.replay.replay import MAX_STEPS
from ....run.replay.step_page import write_step_page
from ....run.replay.step_tables import (
    describe_origin,
    describe_rows,
    describe_taps,
    module_rows,
    outcome_rows,
    parameter_rows,
    row_rows,
    scalar_rows,
)
from ....run.replay.step_view import StepView, plain
from ....run.replay.what_if import ChangedStep
from ....system.terminal_text import align_columns
from ....train.taps.program_tree import StepPhase
from ...overrides import change_settings, experiment_from
from ...parser import Parser
from ...plugins import start_jax

SHOWN_ROWS = 8


def open_step(arguments: Sequence[str]) -> int:
    """Replay a step, and show what happened in it."""
    options, rest = parser().parse_known_args(arguments)
    if rest and options.recipe is None:
        raise RecipeError(f"{rest[0]} is not a flag of `panax at`; flags of a recipe follow --recipe RECIPE")
    check_single_process("panax at")
    recipe = None if options.recipe is None else experiment_from([options.recipe, *rest], "at")
    start_jax()
    console = plain_console()
    # Only the result goes to standard output with --json.
    log = Console(stderr=True) if options.json else console
    view = at(
        options.run,
        options.step,
        recipe=recipe,
        max_steps=options.most,
        rows=options.rows,
        ahead=options.ahead,
        show_rows=options.show,
        say=lambda line: log.print(Text(wrap_line(make_printable(line)), style="dim")),
    )
    outcomes = _outcomes(view, options)
    if options.json:
        print(
            json.dumps({**view.to_json(), "what_if": [plain(dataclasses.asdict(each)) for each in outcomes]}, indent=1)
        )
    else:
        _show(console, view, outcomes)
    if options.output:
        page = write_step_page(Path(options.output), view, outcomes)
        log.print(f"page           {page}")
    sys.stdout.flush()
    return 0


def _outcomes(view: StepView, options: argparse.Namespace) -> list[ChangedStep]:
    """Take the changed steps that the flags request: one change of rows and settings together."""
    if not options.without_row and not options.set:
        return []
    experiment: Experiment | None = None
    if options.set:
        experiment = change_settings(view.replay.prepared.experiment, options.set, "panax at")
    return [view.what_if(experiment, without_rows=tuple(options.without_row))]


def _show(console: Console, view: StepView, outcomes: Sequence[ChangedStep]) -> None:
    def lines(title: str, *texts: str) -> None:
        console.print(Text(f"\n{title}", style="bold"))
        for text in texts:
            console.print(Text(wrap_line(make_printable(text))))

    def table(rows: Sequence[Sequence[str]], left: int = 1) -> None:
        for number, line in enumerate(align_columns(rows, left)):
            console.print(Text(make_printable(line), style="dim" if number == 0 else ""), soft_wrap=True)

    lines(f"Step {view.step} of {view.run}", view.verdict, *view.notes)
    table(scalar_rows(view))
    if view.origin is not None:
        lines("The first value that is not finite", *describe_origin(view.origin))
    if view.findings:
        lines("What stands out", *view.findings)
    for outcome in outcomes:
        lines("What if", outcome.change)
        table(outcome_rows(outcome))
    lines(f"Batch {view.replay.number}", *view.batch)
    lines("Rows", describe_rows(view.rows))
    if not isinstance(view.rows, str):
        table(row_rows(view.rows, SHOWN_ROWS))
    for phase, title in ((StepPhase.FORWARD, "Activations"), (StepPhase.BACKWARD, "Gradients of activations")):
        lines(title, describe_taps(view))
        table(module_rows(view.modules, phase), 2)
    lines("Parameters")
    table(parameter_rows(view.parameters))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    arguments = Parser(
        prog="panax at",
        description=(
            "Open a step of a run: restore the nearest checkpoint before it, replay to it with the run's own program, compare "
            "the loss with the recorded one to the bit, and show the batch, each row's share of the gradient, activations, "
            "gradients and updates, and where the first value that is not finite came from. The run's folder is only read."
        ),
        allow_abbrev=False,
    )
    arguments.add_argument("run", metavar="RUN", help="a run's folder: runs/NAME")
    arguments.add_argument("step", metavar="STEP", type=int, help="number of the step, from 1")
    arguments.add_argument(
        "--without-row",
        type=int,
        action="append",
        default=[],
        metavar="I",
        help="what if this row were left out (repeatable)",
    )
    arguments.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="what if this setting were another: step.clip_norm=0.5, task.compute_dtype=float32 (repeatable)",
    )
    arguments.add_argument(
        "--ahead", type=int, default=1, metavar="N", help="steps that follow a what-if (default: %(default)s)"
    )
    arguments.add_argument("--output", metavar="FILE", help="write a page (HTML) too")
    arguments.add_argument("--json", action="store_true", help="print all figures as JSON")
    arguments.add_argument(
        "--show", type=int, default=3, metavar="N", help="rows of text to show (default: %(default)s)"
    )
    arguments.add_argument(
        "--rows",
        type=int,
        default=MAX_ROWS,
        metavar="N",
        help="shares of at most N rows; 0 for none (default: %(default)s)",
    )
    arguments.add_argument(
        "--most", type=int, default=MAX_STEPS, metavar="N", help="replay at most N steps (default: %(default)s)"
    )
    arguments.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="the run's recipe, with its flags after it, if its settings hold classes of yours",
    )
    return arguments
