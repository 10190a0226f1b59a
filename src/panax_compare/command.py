"""The flags of `panax compare`, and what it does with them."""

import argparse
import dataclasses
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from panax.core.errors import RecipeError

from .columns import COLUMNS, DISTRIBUTED
from .measuring import measure
from .report import write_report
from .results import read_comparison
from .settings import ATTENTIONS, OPTIMIZERS, PRECISIONS, SIZES, Settings

DESCRIPTION = """\
The same model, weights, data, loss, optimizer, precision and batch in PyTorch, torch.compile, plain JAX, Flax, the PyTorch model
adapted, and Panax: each in a process of its own, in turns. Losses must agree before anything is timed. The same command again
goes on from where it was interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="panax compare", description=DESCRIPTION)
    found.add_argument("work", help="vit, decoder, moe, or recipe:NAME")
    names = "; ".join(f"{work}: {', '.join(sizes)}" for work, sizes in SIZES.items())
    found.add_argument("--size", default="", help=names)
    found.add_argument("--batch-size", type=int, help=f"images, or rows of tokens; {Settings.batch_size} unless told")
    found.add_argument("--precision", default=Settings.precision, help=", ".join(PRECISIONS))
    found.add_argument("--attention", default=Settings.attention, help=", ".join(ATTENTIONS))
    columns = ", ".join(column.name for column in (*COLUMNS, *DISTRIBUTED))
    found.add_argument("--columns", default="", help=f"some of {columns}; those of one process unless told")
    found.add_argument(
        "--distributed",
        action="store_true",
        help="DDP, FSDP2 and tensor parallelism of PyTorch, and the same layouts here, on processes and simulated devices",
    )
    found.add_argument("--steps", type=int, help=f"of a column's turn; {Settings.steps} unless told")
    found.add_argument("--rounds", type=int, help=f"turns of each column; {Settings.rounds} unless told")
    found.add_argument("--checked-steps", type=int, default=Settings.checked_steps, help="whose losses must agree")
    found.add_argument("--optimizer", default=Settings.optimizer, help=", ".join(OPTIMIZERS))
    found.add_argument("--learning-rate", type=float, default=0.0)
    found.add_argument("--weight-decay", type=float, default=Settings.weight_decay)
    for name, what in (
        ("layers", "instead of the size's"),
        ("sequence-length", "of a row of tokens"),
        ("image-size", "pixels of a side"),
        ("patch-size", "pixels of a side"),
        ("classes", "of images"),
    ):
        found.add_argument(f"--{name}", type=int, default=0, help=what)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--no-probes", action="store_true", help="leave out what comes after the timing: other batches")
    found.add_argument("--directory", default="", help="of the results; comparisons/NAME-OF-THE-SETTINGS unless told")
    found.add_argument(
        "--as-published",
        action="store_true",
        help="vit: reproduce a published comparison with its flaws, and show what each does to the verdict",
    )
    return found


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that the flags say.

    Raises:
        RecipeError: They can't be, or don't go together.
    """
    values = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Settings)
        if hasattr(options, field.name)
    }
    values["columns"] = tuple(name for name in options.columns.replace(" ", "").split(",") if name)
    if options.distributed:
        if values["columns"]:
            raise RecipeError("--distributed chooses columns, and --columns names some; leave one of them out")
        values["columns"] = (COLUMNS[0].name, *(column.name for column in DISTRIBUTED))
    for name in ("batch_size", "steps", "rounds"):
        values[name] = getattr(Settings, name) if values[name] is None else values[name]
    return Settings(**values, probes=not options.no_probes)


def run(arguments: Sequence[str]) -> int:
    """Compare, and write the report. Returns the exit code: 130 after Ctrl-C or SIGTERM, with the report of what was finished."""
    options = parser().parse_args(arguments)
    command = f"panax compare {shlex.join(arguments)}"
    if options.as_published:
        from .published import run_published

        return run_published(options, command, _say)
    settings = settings_of(options)
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


def _say(line: str) -> None:
    print(f"panax: {line}", file=sys.stderr, flush=True)
