"""`branch`: a new run that begins at a checkpoint of another one."""

import dataclasses
from pathlib import Path

from ...checkpoint import Checkpointer
from ...checkpoint.branches import make_branch, read_origin
from ...core.errors import CheckpointError, RecipeError
from ...stores import is_remote, join_url, open_store
from ...system.files import absolute_path
from ..experiment import Experiment
from ..folder.branch_settings import check_branch_settings
from ..start import checkpoint_location
from .opened_step import find_experiment
from .record import read_records
from .replay import run_folder


def branch(
    run: str | Path | Experiment,
    step: int,
    name: str,
    *,
    recipe: Experiment | None = None,
    directory: str = "",
) -> Experiment:
    """Make a branch of a run: a run of its own folder that begins with the checkpoint of a step, on the same data in the same
    order, with the same random bits. Train it with `fit`.

    The checkpoint's files are shared: the branch reads them by address and checksum, and the parent keeps them. If the branch
    exists already, it is returned.

    Args:
        run: A run's folder, or the run's experiment.
        step: A step of which the run has a checkpoint.
        name: Name of the branch, and of its folder beside the parent's.
        recipe: The branch's experiment, with changed settings; None for the parent's.
        directory: The branch's folder, in place of one beside the parent's.

    Raises:
        CheckpointError: The run has no checkpoint of that step, the branch's folder holds another run, or a setting differs
            that may not.
    """
    parent_recipe = run if isinstance(run, Experiment) else None
    folder = run_folder(run.folder if isinstance(run, Experiment) else run)
    parent = find_experiment(read_records(folder), step + 1, parent_recipe or recipe)
    where = checkpoint_location(parent)
    checkpointer = Checkpointer(where, say=lambda line: None)
    if step not in checkpointer.steps():
        steps = ", ".join(map(str, checkpointer.steps())) or "none"
        raise CheckpointError(
            f"{where} has no checkpoint of step {step}; a branch begins at one of its steps: {steps}. Checkpoints of more steps "
            f"are kept with checkpoint.keep_every"
        )
    experiment = branch_experiment(
        recipe or parent, parent, name, directory or str(absolute_path(folder).parent / name)
    )
    check_branch_settings(experiment, checkpointer.open(step))
    target = checkpoint_location(experiment)
    origin = read_origin(open_store(target)) if is_remote(target) or Path(target).is_dir() else None
    if origin is None:
        make_branch(where, step, target, name)
    elif origin.step != step or origin.url != _address(where):
        raise CheckpointError(
            f"{target} is a branch of {origin.url} at step {origin.step}, not of {where} at step {step}; choose another name"
        )
    return experiment


def branch_experiment(recipe: Experiment, parent: Experiment, name: str, directory: str) -> Experiment:
    """Return an experiment under a branch's name, with checkpoints in a location of its own."""
    if not name or name == parent.name:
        raise RecipeError(f"name={name!r}; expected a name that is not the parent's, {parent.name!r}")
    stored = parent.checkpoint.directory
    checkpoint = recipe.checkpoint
    if stored and checkpoint.directory == stored:
        beside = stored.rstrip("/").rpartition("/")[0]
        checkpoint = dataclasses.replace(checkpoint, directory=join_url(beside, name))
    return dataclasses.replace(recipe, name=name, directory=directory, checkpoint=checkpoint)


def _address(where: str) -> str:
    return where.rstrip("/") if is_remote(where) else str(absolute_path(where))
