"""`panax evaluate`: losses and metrics of a trained model."""

import argparse
from collections.abc import Sequence

from rich.text import Text

from ...core.errors import RecipeError
from ...job.join import check_single_process
from ...metrics.console import plain_console, wrap_line
from ...run.folder.trained_model import load_model
from ...run.reporting.evaluation import evaluate_loaded_model
from ..failures import warn
from ..parser import Parser
from ..plugins import start_jax


def evaluate(arguments: Sequence[str]) -> int:
    """Print losses and metrics of a checkpoint, on its run's held-out data or on other data."""
    options = parser().parse_args(arguments)
    check_single_process("panax evaluate")
    start_jax()
    trained = load_model(options.run, warn, newest=True)
    fields = {name: value for name in ("text", "prompt", "answer") if (value := getattr(options, name)) is not None}
    if fields and not options.data:
        raise RecipeError(
            f"{', '.join(f'--{name}' for name in fields)} names a field of the data in --data; pass that too"
        )
    console = plain_console()
    results = evaluate_loaded_model(
        trained,
        options.data,
        options.batches,
        fields=fields,
        say=lambda line: console.print(Text(wrap_line(line), style="dim")),
    )
    print(f"checkpoint  {trained.url}")
    averaged = " (averaged parameters)" if {"ema_decay", "averaged"} & results.keys() else ""
    print(f"data        {' '.join(options.data) if options.data else 'held out by the run'}{averaged}")
    width = max(map(len, results))
    for name, value in results.items():
        if name not in ("ema_decay", "averaged"):
            print(f"{name:{width}}  {value:.6g}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = Parser(
        prog="panax evaluate", description="Losses and metrics of a trained model, on its newest checkpoint."
    )
    parser.add_argument("run", help="a run's folder (its newest checkpoint is used), or a checkpoint's own")
    parser.add_argument(
        "--data", nargs="+", metavar="PATH", help="files, folders or globs (default: the data held out by the run)"
    )
    parser.add_argument(
        "--text", metavar="FIELD", help="the field of a record that holds the text (default: the run's)"
    )
    parser.add_argument("--prompt", metavar="FIELD", help="the field with the text before the answer")
    parser.add_argument("--answer", metavar="FIELD", help="the field with the text to learn")
    parser.add_argument("--batches", type=int, help="at most N batches (default: as in the run; for other data, all)")
    return parser
