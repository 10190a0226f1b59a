"""`panax find lr|batch`: a learning rate by a range test; the largest micro-batch that fits, without running
a step."""

import argparse
import sys
from collections.abc import Sequence

from ...core.errors import RecipeError
from ...metrics.console import plain_console, wrap_line
from ...plan import parse_target, target_devices
from ...run.tools.batch_search import find_batch
from ...run.tools.batch_search import format_batch_result as lines_of_batch
from ...run.tools.lr_page import format_rate_curve as lines_of_rate
from ...run.tools.lr_search import RateRange, find_lr
from ...run.tools.reference import add_reference, needs_reference
from ..overrides import experiment_from
from ..parser import Parser
from ..plugins import start_jax, suppress_plugin_warnings

EPILOG = "Takes `--data PATH...` and the recipe's own flags, as `panax train` does."


def find(arguments: Sequence[str]) -> int:
    """Find a setting, and print the flag that sets it."""
    options, rest = parser().parse_known_args(arguments)
    try:
        return _find_rate(options, rest) if options.command == "lr" else _find_batch(options, rest)
    except KeyboardInterrupt:
        print("panax: stopped; nothing was written", file=sys.stderr)
        return 130


def _find_rate(options: argparse.Namespace, rest: list[str]) -> int:
    range_settings = {name: getattr(options, name) for name in ("lowest", "highest", "steps", "smoothing")}
    RateRange(**range_settings)
    experiment = experiment_from([options.recipe, *rest], "train")
    start_jax()
    console = plain_console()
    if needs_reference(experiment):
        experiment = add_reference(experiment)
    output = options.output or f"{experiment.folder}-rate.html"
    result = find_lr(
        experiment, **range_settings, output=output, say=lambda line: console.print(wrap_line(line), style="dim")
    )
    print("\n".join(map(wrap_line, lines_of_rate(result))))
    print(f"page           {output}")
    return 0 if result.recommended is not None else 1


def _find_batch(options: argparse.Namespace, rest: list[str]) -> int:
    memory, devices = options.memory_gib, None
    target = None if options.target is None else parse_target(options.target)
    if target is not None:
        if memory is not None:
            raise RecipeError("--memory-gib has no effect with --target, which has a known memory; remove one of them")
        with suppress_plugin_warnings():
            devices = target_devices(target)
        memory = target.memory_bytes / 2**30
    experiment = experiment_from([options.recipe, *rest], "inspect")
    if target is None:
        start_jax()
    console = plain_console()
    result = find_batch(
        experiment,
        memory_gib=memory,
        devices=devices,
        say=lambda line: console.print(wrap_line(line), style="dim"),
    )
    print("\n".join(map(wrap_line, lines_of_batch(result))))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommands and their flags; other flags are the recipe's."""
    parser = Parser(prog="panax find", description="Find a setting for a recipe.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    lr = commands.add_parser(
        "lr",
        help="a learning rate, by a short run in which it rises",
        description="Train for some steps while the learning rate rises; draw the loss, recommend a rate. Nothing is "
        "saved, and the run's own folder is not touched.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    lr.add_argument("recipe", metavar="RECIPE", help="as `panax train` takes it")
    lr.add_argument("--lowest", type=float, default=RateRange.lowest, help="the first step's rate (%(default)g)")
    lr.add_argument("--highest", type=float, default=RateRange.highest, help="the last step's rate (%(default)g)")
    lr.add_argument("--steps", type=int, default=RateRange.steps, help="from the one to the other (%(default)s)")
    lr.add_argument(
        "--smoothing", type=float, default=RateRange.smoothing, help="weight of earlier losses (%(default)s)"
    )
    lr.add_argument("--output", metavar="FILE", help="the page with the curve (the run's folder, with -rate.html)")
    batch = commands.add_parser(
        "batch",
        help="the largest micro-batch that fits the memory",
        description="Compile steps of more and more rows and read their memory, until they do not fit. None is run, "
        "so nothing can run out of memory.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    batch.add_argument("recipe", metavar="RECIPE", help="as `panax train` takes it")
    batch.add_argument("--memory-gib", type=float, metavar="GIB", help="of each device (as it reports)")
    batch.add_argument("--target", metavar="h100x8", help="for devices that you don't have")
    return parser
