"""`panax branch`: a new run that begins at a checkpoint of another one, with one thing changed."""

import argparse
import sys
from collections.abc import Sequence

from ....core.errors import RecipeError
from ....job.join import check_single_process
from ....run import branch, fit
from ....run.replay.opened_step import find_experiment
from ....run.replay.record import read_records
from ....run.replay.replay import run_folder
from ...overrides import change_settings, experiment_from
from ...parser import Parser
from ...plugins import start_jax


def make_branch(arguments: Sequence[str]) -> int:
    """Make a branch, or find it, and train it."""
    options, rest = parser().parse_known_args(arguments)
    if rest and options.recipe is None:
        raise RecipeError(f"{rest[0]} is not a flag of `panax branch`; flags of a recipe follow --recipe RECIPE")
    check_single_process("panax branch")
    start_jax()
    if options.recipe is None:
        recipe = find_experiment(read_records(run_folder(options.run)), options.at + 1, None)
    else:
        recipe = experiment_from([options.recipe, *rest], "branch")
    if options.set:
        recipe = change_settings(recipe, options.set, "panax branch")
    experiment = branch(options.run, options.at, options.name, recipe=recipe, directory=options.directory)
    print(f"branch         {experiment.folder}, from step {options.at} of {options.run}")
    sys.stdout.flush()
    if options.train:
        fit(experiment)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    arguments = Parser(
        prog="panax branch",
        description=(
            "Make a run that begins at a checkpoint of another one, on the same data in the same order with the same random "
            "bits, and train it. Its first checkpoint is the other run's, read by address and checksum, which that run keeps. "
            "The same command resumes the branch."
        ),
        allow_abbrev=False,
    )
    arguments.add_argument("run", metavar="RUN", help="a run's folder: runs/NAME")
    arguments.add_argument("--at", type=int, required=True, metavar="STEP", help="a step with a checkpoint")
    arguments.add_argument("--name", required=True, help="name of the branch, and of its folder beside the run's")
    arguments.add_argument("--directory", default="", metavar="DIR", help="another folder for the branch")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="SETTING=VALUE", help="a setting that differs (repeatable)"
    )
    arguments.add_argument("--no-train", dest="train", action="store_false", help="only make the branch")
    arguments.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="the run's recipe, with its flags after it, if its settings hold classes of yours",
    )
    return arguments
