"""`panax data show`: the data as a model sees it, before training."""

import argparse
from collections.abc import Sequence

from rich.text import Text

from ...core.errors import RecipeError
from ...data.loading.class_agreement import find_class_names
from ...data.loading.preview import MARKS, STYLE_MARKS, format_batch, grey_out
from ...data.text.token_source import PackedSource
from ...metrics.console import plain_console, wrap_line
from ...rollouts.prompts import PROMPT
from ...run.preparation import open_data
from ..overrides import experiment_from
from ..parser import Parser
from ..plugins import start_jax


def data(arguments: Sequence[str]) -> int:
    """Print the first batch of a recipe's data."""
    options, rest = parser().parse_known_args(arguments)
    if options.rows < 0:
        raise RecipeError(f"-n {options.rows}; expected how many rows to show, 0 or more")
    experiment = experiment_from([options.recipe, *rest], "data show")
    start_jax()
    console = plain_console()
    opened = open_data(experiment, lambda line: console.print(Text(wrap_line(line), style="dim")))
    batch, _ = next(iter(opened.train.batches()))
    if opened.rollouts is not None:
        for line in opened.rollouts.describe(batch[PROMPT].tolist(), options.rows):
            console.print(line)
        return 0
    if isinstance(opened.train, PackedSource):
        rows = opened.train.rows.num_rows
        print(f"{rows:,} rows in an epoch, {rows / opened.train.batch_size:,.1f} batches; the first one:")
    # A pipe or a file gets marks of characters; a terminal shows tokens without loss in gray.
    marks = STYLE_MARKS if console.is_terminal and not console.no_color else MARKS
    for line in grey_out(format_batch(batch, opened.tokenizer, options.rows, find_class_names(opened.train), marks)):
        console.print(line)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the subcommand and its flags; other flags are the recipe's."""
    parser = Parser(prog="panax data", description="Look at the data as a model sees it, before training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser(
        "show",
        help="the first batch: shapes, texts with the parts without loss, labels",
        description="Print the first batch: shapes, dtypes, ranges; rows as text, with the parts without loss; labels.",
        epilog="Takes `--data PATH...` and the recipe's own flags, as `panax train` does.",
        allow_abbrev=False,
    )
    show.add_argument("recipe", help="as `panax train` takes it")
    show.add_argument("-n", type=int, default=3, dest="rows", metavar="ROWS", help="how many rows of text (default: 3)")
    return parser
