"""The flags of `panax compare`, and their execution."""

import argparse
import dataclasses
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from panax.cli.parser import Parser
from panax.core.errors import RecipeError
from panax.metrics.report.costs import Rate
from panax.metrics.report.until import format_time_to_loss, time_to_loss

from .columns import COLUMNS, DISTRIBUTED, EVERY
from .measure.loss_race import Race, StopCondition, format_race_table
from .measure.measurement import measure
from .report import write_report
from .results import read_comparison
from .workload.settings import ATTENTIONS, DEFAULTS, OPTIMIZERS, PRECISIONS, SIZES, Settings

DESCRIPTION = """\
The same model, weights, data, loss, optimizer, precision and batch in PyTorch, torch.compile, plain JAX, Flax, the PyTorch model
adapted, and Panax: each in a separate process, in turns. Losses must agree before anything is timed. The same command again
resumes after an interruption. With --until-loss: the time, steps and cost of each column, or of each of some existing runs, to
reach a held-out loss.
"""

RUN_SETTINGS = ("until_loss", "price_per_hour", "currency", "interpolate")
"""Flags for a loss to reach that also apply to runs that already exist."""
COLUMN_SETTINGS = ("evaluate_every", "max_steps")
"""Flags for a loss to reach that only apply to columns."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = Parser(prog="panax compare", description=DESCRIPTION)
    arguments.add_argument(
        "work", nargs="+", help="vit, decoder, moe, dlrm, or recipe:NAME; with --until-loss, folders of runs too"
    )
    names = "; ".join(f"{work}: {', '.join(sizes)}" for work, sizes in SIZES.items())
    arguments.add_argument("--size", default="", help=names)
    arguments.add_argument(
        "--batch-size",
        type=int,
        help=f"images, rows of tokens, or examples; by default {Settings.batch_size}, of dlrm 2048",
    )
    arguments.add_argument("--precision", default=Settings.precision, help=", ".join(PRECISIONS))
    arguments.add_argument("--attention", default=Settings.attention, help=", ".join(ATTENTIONS))
    columns = ", ".join(column.name for column in EVERY)
    arguments.add_argument("--columns", default="", help=f"some of {columns}; by default those of one process")
    arguments.add_argument(
        "--distributed",
        action="store_true",
        help="DDP, FSDP2 and tensor parallelism of PyTorch, and the same layouts here, on processes and simulated devices",
    )
    arguments.add_argument("--steps", type=int, help=f"of a column's turn; by default {Settings.steps}")
    arguments.add_argument("--rounds", type=int, help=f"turns of each column; by default {Settings.rounds}")
    arguments.add_argument(
        "--checked-steps", type=int, default=Settings.checked_steps, help="steps with losses that must agree"
    )
    arguments.add_argument("--optimizer", help=f"{', '.join(OPTIMIZERS)}; by default adamw, of dlrm adagrad")
    arguments.add_argument("--learning-rate", type=float, default=0.0)
    arguments.add_argument("--weight-decay", type=float, default=Settings.weight_decay)
    for name, help_text in (
        ("layers", "instead of the size's"),
        ("sequence-length", "of a row of tokens"),
        ("image-size", "pixels of a side"),
        ("patch-size", "pixels of a side"),
        ("classes", "of images"),
    ):
        arguments.add_argument(f"--{name}", type=int, default=0, help=help_text)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--no-probes", action="store_true", help="skip the probes after the timing: other batches")
    arguments.add_argument(
        "--directory", default="", help="of the results; by default comparisons/NAME-OF-THE-SETTINGS"
    )
    arguments.add_argument(
        "--as-published",
        action="store_true",
        help="vit: reproduce a published comparison with its flaws, and show what each does to the verdict",
    )
    runs = arguments.add_argument_group("a loss to reach: of recipe:NAME in each column, or of runs that are there")
    runs.add_argument(
        "--until-loss", type=float, metavar="X", help="steps, samples, time and cost of each to this held-out loss"
    )
    runs.add_argument(
        "--evaluate-every", type=int, metavar="N", help=f"steps of a column; by default {StopCondition.every}"
    )
    runs.add_argument(
        "--max-steps", type=int, metavar="N", help=f"maximum for a column; by default {StopCondition.steps}"
    )
    runs.add_argument("--price-per-hour", type=float, metavar="P", help="of one device; without it there are no costs")
    runs.add_argument("--currency", default="", help="of the price; by default USD")
    runs.add_argument(
        "--interpolate",
        action="store_true",
        help="of runs: let the loss fall linearly between two evaluations; by default the first one at or below it counts",
    )
    return arguments


def read_settings(options: argparse.Namespace) -> Settings:
    """Return the settings given by the flags.

    Raises:
        RecipeError: The flags are invalid, or contradict each other.
    """
    values = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Settings)
        if hasattr(options, field.name)
    }
    if len(options.work) > 1:
        raise RecipeError(
            f"{' and '.join(options.work)} can't be compared at once; pass one work, or folders of runs with --until-loss X"
        )
    if options.until_loss is None:
        for name in (*RUN_SETTINGS[1:], *COLUMN_SETTINGS):
            if getattr(options, name):
                raise RecipeError(f"{_flag(name)} has no effect without --until-loss")
    [values["work"]] = options.work
    values["columns"] = tuple(name for name in options.columns.replace(" ", "").split(",") if name)
    if options.distributed:
        if values["columns"]:
            raise RecipeError("--distributed chooses columns, and --columns names some; remove one of them")
        values["columns"] = (COLUMNS[0].name, *(column.name for column in DISTRIBUTED))
    usual: dict[str, str | int] = dict(zip(("optimizer", "batch_size"), DEFAULTS.get(values["work"], ())))
    if options.work[0] == "dlrm" and not values["columns"]:
        values["columns"] = tuple(column.name for column in EVERY if "dlrm" in column.families)
    for name in ("optimizer", "batch_size", "steps", "rounds"):
        values[name] = usual.get(name, getattr(Settings, name)) if values[name] is None else values[name]
    return Settings(**values, probes=not options.no_probes)


def run(arguments: Sequence[str]) -> int:
    """Compare, and write the report. Returns the exit code: 130 after Ctrl-C or SIGTERM, with a report of the
    finished part."""
    options = parser().parse_args(arguments)
    command = f"panax compare {shlex.join(arguments)}"
    if options.until_loss is not None:
        if options.currency and options.price_per_hour is None:
            raise RecipeError("--currency has no effect without a price; pass --price-per-hour too")
        works = [work for work in options.work if work in SIZES or work.startswith("recipe:")]
        return _columns_until_loss(options, command) if works else _until_loss(options)
    if options.as_published:
        from .published_command import run_published

        return run_published(options, command, _say)
    settings = read_settings(options)
    folder = Path(options.directory or f"comparisons/{settings.name}")
    code = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(settings, folder, command, _say)
    except KeyboardInterrupt:
        code = 130
    comparison = read_comparison(folder)
    if comparison is None or not comparison.columns:
        if code:
            _say("stopped before anything was measured")
        return code
    if code:
        _say("stopped; what was finished is kept, and the same command resumes from there")
    page, table = write_report(comparison, folder)
    print(table, end="")
    print(f"\nreport: {page}")
    return code


def _columns_until_loss(options: argparse.Namespace, command: str) -> int:
    """Train columns to a loss, and show the time of each. Returns 1 if none of them has reached it."""
    if options.interpolate:
        raise RecipeError(
            "--interpolate is for folders of runs; columns are evaluated at the interval of --evaluate-every"
        )
    overrides = {name: getattr(options, name) for name in ("evaluate_every", "max_steps")}
    names = {"evaluate_every": "every", "max_steps": "steps"}
    until = StopCondition(
        loss=options.until_loss, **{names[name]: value for name, value in overrides.items() if value is not None}
    )
    rate = Rate.of(options.price_per_hour, options.currency or "USD")
    for name in ("steps", "rounds"):
        if getattr(options, name) is not None:
            raise RecipeError(
                f"{_flag(name)} has no effect with --until-loss, which has no timed turns; set --max-steps"
            )
    settings = read_settings(options)
    folder = Path(options.directory or f"comparisons/{settings.name}-until-{until.loss:g}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    race = Race(settings, until, folder, command, _say)
    try:
        arrivals = race.run_to_loss()
    except KeyboardInterrupt:
        _say("stopped; columns that ended are kept, and the same command trains the others from their beginning")
        return 130
    work = race.comparison.work
    print(format_race_table(arrivals, until, work["unit"], work["units_per_step"], rate.per_hour, rate.currency))
    for entry in race.comparison.columns.values():
        if entry.state in ("failed", "absent", "impossible"):
            print(f"{entry.title}: {entry.state}: {entry.reason}")
    return 0 if any(each.reached for each in arrivals) else 1


def _until_loss(options: argparse.Namespace) -> int:
    """Show the time that runs took to reach a loss. Returns 1 if none of them has reached it."""
    usual = parser().parse_args(["runs"])
    for name, value in vars(usual).items():
        if name not in ("work", *RUN_SETTINGS) and getattr(options, name) != value:
            raise RecipeError(
                f"{_flag(name)} has no effect with --until-loss and folders of runs, which are read as they are"
            )
    rate = Rate.of(None, options.currency or "USD")
    times = time_to_loss(
        *options.work,
        loss=options.until_loss,
        price_per_hour=options.price_per_hour,
        interpolate=options.interpolate,
    )
    print("\n".join(format_time_to_loss(times, options.until_loss, rate.currency)))
    return 0 if any(each.step is not None for each in times) else 1


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _say(line: str) -> None:
    print(f"panax: {line}", file=sys.stderr, flush=True)
