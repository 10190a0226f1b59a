"""Earlier runs in a run's folder: comparison with this run, differences in settings, and archiving."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoint import Checkpoint, parse_step
from ...checkpoint.run_record import FOLDER as RECORD
from ...core import Position
from ...core.errors import CheckpointError, DataError
from ...core.former_names import with_present_names
from ...data.text.token_source import RESTORE_ADVICE
from ...metrics.goodput import FILE as LEDGER
from ...optim import Optimizer
from ...rollouts.journal import JOURNAL_FILE
from ...stores import is_remote
from ...system import json_reader
from ...system.files import expand_user
from ..experiment import Experiment
from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..recovery.skipped_batches import FORMER_LOG as FORMER_ROLLBACKS
from ..recovery.skipped_batches import LOG as ROLLBACKS
from ..reporting.document_counts import DATA_USAGE_FILE
from ..reporting.question_scores import QUESTIONS_FILE
from ..reporting.session import SESSIONS_FILE
from .description import diff_configs, serialize_config

SETTINGS = "experiment.json"
"""Name of the checkpoint attachment with the settings of the run."""

UNTRACKED_SETTINGS = (
    "name",
    "directory",
    "log_every",
    "profile",
    "checkpoint",
    "rollback",
    "verify",
    "probe",
    "evaluate",
    "questions",
    "mesh",
    "rules",
    "hooks",
    "trackers",
    "debug",
)
"""Settings that may change between two runs of one experiment without changing the training."""

RUN_FILES = (
    "metrics.jsonl",
    "metrics.csv",
    "log.txt",
    DATA_USAGE_FILE,
    QUESTIONS_FILE,
    JOURNAL_FILE,
    LEDGER,
    SESSIONS_FILE,
    ROLLBACKS,
    FORMER_ROLLBACKS,
)
"""Files that a run writes into its folder, apart from checkpoints and files of other trackers."""

CHANGEABLE_SETTINGS = ("num_steps: ", "step.micro_batches: ", "step.pad_rows: ")
"""Settings with changes that are reported but make no different run: it may grow, and a batch may be split
differently."""

RATE_RISE_FACTOR = 1.01
"""Factor above which a learning rate that grows when a run is given more steps is worth a hint."""

RESTART_ADVICE = (
    "To train from step 0, pass --fresh (fresh=True): the earlier run is set aside, not removed. To leave it in place, "
    "set another --name or --directory."
)
RESUME_ADVICE = (
    "To resume from its trained state all the same, pass --accept-changes (accept_changes=True){}; data that has changed then "
    "begins again."
)


def check_same_run(experiment: Experiment, checkpoint: Checkpoint, *, accept_changes: bool, say: LogFn) -> None:
    """Check that a checkpoint is of the run that the experiment describes, and report any changes.

    Raises:
        CheckpointError: The checkpoint is of another run, and changes are not accepted; or no step is left to
            train.
    """
    step = checkpoint.manifest.step
    changed = changed_settings(experiment, checkpoint)
    other = [line for line in changed if not line.startswith(CHANGEABLE_SETTINGS)]
    if step > experiment.num_steps:
        raise CheckpointError(
            f"{checkpoint.url} is of step {step}, beyond num_steps={experiment.num_steps}: nothing would be trained. To use its "
            f"model, name it (panax generate, panax export). {RESTART_ADVICE}"
        )
    if other and (not accept_changes or step == experiment.num_steps):
        raise CheckpointError(
            f"{checkpoint.url} is of a run with other settings ({step} of {experiment.num_steps} steps are done):\n"
            + "".join(f"  {line}\n" for line in other)
            + f"{RESTART_ADVICE} {RESUME_ADVICE.format('' if step < experiment.num_steps else ' and more --num-steps')}"
        )
    for line in changed:
        rates = _rates_words(experiment, checkpoint) if line.startswith("num_steps: ") else ""
        say(f"changed since that checkpoint: {line}{rates}")
    if step == experiment.num_steps:
        say(f"all {step} steps are done: nothing is trained; --fresh (fresh=True) trains from step 0 again")


def find_resume_position(
    prepared: PreparedRun, checkpoint: Checkpoint, *, accept_changes: bool, say: LogFn
) -> Position | None:
    """Return the data position after a checkpoint; None, with a message, if the data has changed and that is
    accepted.

    Raises:
        DataError: The data has changed, and that is not accepted.
    """
    position = checkpoint.manifest.host["data"]
    if position is None:
        return None
    try:
        closing = prepared.data.train.batches(position)
        getattr(closing, "close", lambda: None)()
    except DataError as error:
        if not accept_changes:
            raise DataError(
                f"{str(error).removesuffix(RESTORE_ADVICE)}. {RESTART_ADVICE} {RESUME_ADVICE.format('')}"
            ) from error
        say(f"the data begins again: {error}")
        return None
    return position


def changed_settings(experiment: Experiment, checkpoint: Checkpoint) -> list[str]:
    """List the settings that affect training and differ from those saved in the checkpoint, one line each."""
    text = checkpoint.attachment(SETTINGS)
    if text is None:
        return []
    try:
        before = json_reader.parse(text, constants=True)
    except ValueError as error:
        raise CheckpointError(f"{SETTINGS} of {checkpoint.url} is not JSON: {error}") from error
    if not isinstance(before, dict):
        raise CheckpointError(f"{SETTINGS} of {checkpoint.url} holds no settings")
    before, current_settings = fill_defaults(with_present_names(before), experiment), serialize_config(experiment)
    for name in UNTRACKED_SETTINGS:
        before.pop(name, None)
        current_settings.pop(name, None)
    return list(diff_configs(before, current_settings))


def _rates_words(experiment: Experiment, checkpoint: Checkpoint) -> str:
    """Format the learning rates before and after a change of `num_steps`: a schedule that decays over the run
    is recomputed."""
    step = checkpoint.manifest.step
    before = json_reader.parse(checkpoint.attachment(SETTINGS) or "{}", constants=True).get("num_steps")
    if not isinstance(before, int) or not 1 <= step < experiment.num_steps:
        return ""
    words = ""
    for name, scope in (("optimizer", ""), ("embedding_optimizer", " of tables")):
        optimizer = getattr(experiment, name)
        # An optimizer that brings its own learning rate has nothing to compare.
        if optimizer is None or (isinstance(optimizer, Optimizer) and optimizer.reported_rate(before) is None):
            continue
        with warnings.catch_warnings():
            # The warning that a run is too short for its warm-up belongs where the schedule is built.
            warnings.simplefilter("ignore")
            # A schedule is indexed by the steps taken before: the first step's rate is at 0.
            last = np.asarray(optimizer.learning_rate(before)(step - 1)).item()
            following = np.asarray(optimizer.learning_rate(experiment.num_steps)(step)).item()
        if last == following:
            words += f"; the learning rate{scope} stays at {last:.3g}"
            continue
        words += f"; the learning rate{scope} goes from {last:.3g} at step {step} to {following:.3g} at step {step + 1}"
        if following > last * RATE_RISE_FACTOR:
            words += (
                f", since its schedule is recomputed over {experiment.num_steps} steps; to continue from {last:.3g}, begin a run "
                f'of another name with init="checkpoint:{checkpoint.url}" and its own schedule'
            )
    return words


def fill_defaults(before: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return earlier settings, with defaults for settings that did not exist yet when they were saved."""
    filled = dict(before)
    for field in dataclasses.fields(value):
        if not field.metadata.get("saved", True):
            continue
        inner = getattr(value, field.name)
        if field.name not in before:
            if field.default is not dataclasses.MISSING:
                filled[field.name] = serialize_config(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                filled[field.name] = serialize_config(field.default_factory())
        elif _same_kind(before[field.name], inner):
            filled[field.name] = fill_defaults(before[field.name], inner)
    return filled


def _same_kind(before: Any, value: Any) -> bool:
    is_settings = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_settings and isinstance(before, dict) and before.get("type") == type(value).__name__


def archive_run(experiment: Experiment, say: LogFn) -> None:
    """Move the files of an earlier run into `before-1` (or the next free number) inside the same folder; other
    files stay.

    Raises:
        CheckpointError: The run is in an object store, where files can't be moved; or a file can't be moved.
    """
    folder = Path(experiment.folder)
    where = experiment.checkpoint.directory
    if where and is_remote(where):
        raise CheckpointError(
            f"--fresh can't set checkpoints in {where} aside: objects can't be moved. Give --checkpoint.directory another "
            f"address, or remove them with `panax checkpoint rm` and its folder {RECORD}/"
        )
    checkpoints = expand_user(where) if where else folder / "checkpoints"
    run_paths = [folder / name for name in (*RUN_FILES, "tensorboard")]
    try:
        _move(folder, [path for path in run_paths if path.exists()], say)
        _move(checkpoints, [*_of_checkpoints(checkpoints)], say)
    except OSError as error:
        raise CheckpointError(
            f"the files of an earlier run in {folder} can't be moved: {error}; choose another --directory"
        ) from error


def _of_checkpoints(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and (path.name == RECORD or parse_step(path.name) is not None):
                yield path


def _move(folder: Path, paths: list[Path], say: LogFn) -> None:
    if not paths:
        return
    number = 1
    while (folder / f"before-{number}").exists():
        number += 1
    aside = folder / f"before-{number}"
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    say(f"what was in {folder} is now in {aside}")
