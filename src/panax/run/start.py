"""How a run begins: its folder, its lock, and the state it goes on from."""

import contextlib
import dataclasses
import fcntl
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint import Checkpointer, restore
from ..core import Position, TrainState
from ..core.errors import CheckpointError
from .description import describe, differences
from .prepare import Prepared, Say

SETTINGS = "experiment.json"
MODEL = "model.json"
TOKENIZER = "tokenizer.json"

FREE = ("directory", "log_every", "profile", "checkpoint", "evaluate", "mesh", "debug")
"""Settings that may change between two runs of one experiment without changing what is trained."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        step: Steps taken before.
        position: Of the data; None for its beginning.
    """

    state: TrainState
    step: int
    position: Position | None


@contextlib.contextmanager
def open_folder(prepared: Prepared) -> Iterator[Checkpointer]:
    """Make the run's folder, lock it against a second process, and hand out its checkpoints.

    Raises:
        CheckpointError: The folder can't be written, or another process trains in it.
    """
    folder = Path(prepared.experiment.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(
            f"can't write to the run's folder {folder}: {error}; choose another with --directory"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is training in {folder}; wait for it, stop it, or choose another folder with --directory"
            ) from error
        checkpointer = Checkpointer(folder / "checkpoints", prepared.experiment.checkpoint, attachments(prepared))
        checkpointer.remove_partial()
        try:
            yield checkpointer
        except BaseException:
            # What ended the run is the error to show; a save that failed besides is not.
            with contextlib.suppress(CheckpointError):
                checkpointer.wait()
            raise
        checkpointer.wait()


def attachments(prepared: Prepared) -> dict[str, str]:
    """What every checkpoint carries besides arrays, so that it can be used alone."""
    files = {
        SETTINGS: json.dumps(describe(prepared.experiment), indent=1),
        MODEL: json.dumps(describe(prepared.task), indent=1),
    }
    if prepared.data.tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            prepared.data.tokenizer.save(folder)
            files |= {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}
    return files


def begin(prepared: Prepared, checkpointer: Checkpointer, say: Say) -> Start:
    """Restore the newest checkpoint, or draw (or load) the first state.

    Raises:
        CheckpointError: The checkpoint is of another model, or damaged.
    """
    step, experiment = prepared.step, prepared.experiment
    latest = checkpointer.latest()
    if latest is None:
        state = step.init(experiment.seed)
        if experiment.init:
            from ..adapters.huggingface import load

            say(f"starting from the weights in {experiment.init.removeprefix('hf:')}")
            folder = experiment.init.removeprefix("hf:")
            params, model_state = load(folder, prepared.task, state.params, state.model_state)
            state = dataclasses.replace(state, params=params, model_state=model_state)
        return Start(state, 0, None)
    path = checkpointer.path(latest)
    state, manifest = restore(path, step.program.abstract, step.shardings)
    say(f"going on from step {latest} of {experiment.num_steps}: {path}")
    for line in changed_settings(prepared, path):
        say(f"changed since that checkpoint: {line}")
    return Start(state, latest, manifest.host["data"])


def changed_settings(prepared: Prepared, path: Path) -> list[str]:
    """The settings that decide what is trained, and are not those the checkpoint was saved with."""
    try:
        before = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / SETTINGS} can't be read: {error}") from error
    now = describe(prepared.experiment)
    for name in FREE:
        before.pop(name, None)
        now.pop(name, None)
    return list(differences(before, now))
