"""A trained model out of a checkpoint alone: its task, its parameters, its tokenizer."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ..checkpoint import MANIFEST, Checkpoint, Checkpointer, open_checkpoint, restore
from ..core import Task
from ..core.errors import CheckpointError, DamagedError
from ..data.tokenizer import PretrainedTokenizer, Tokenizer
from ..stores import join, open_store
from .description import read_task
from .prepare import Say
from .start import MODEL, TOKENIZER


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a checkpoint holds besides optimizer state, on one device.

    Attributes:
        url: The checkpoint's address.
        state: The task's model state.
        tokenizer: None where the run had none.
    """

    url: str
    task: Task
    params: Any
    state: Any
    tokenizer: Tokenizer | None


def find_checkpoints(where: str) -> Iterator[Checkpoint]:
    """The checkpoint at an address of its own, or those of a run's folder, the best one first.

    Raises:
        CheckpointError: There is none, or its manifest is damaged.
    """
    if any(entry.path == MANIFEST for entry in open_store(where).list()):
        yield open_checkpoint(where)
        return
    found = False
    for folder in (join(where, "checkpoints"), where):
        for checkpoint in Checkpointer(folder).best_first():
            found = True
            yield checkpoint
    if not found:
        raise CheckpointError(
            f"{where} holds no checkpoint; name a folder like runs/quickstart, or runs/quickstart/checkpoints/step_00000100"
        )


def load_trained(where: str, say: Say = lambda line: None) -> Trained:
    """Read the model of a checkpoint, the best that is whole; optimizer state is not read.

    Args:
        say: Takes a line for each checkpoint that is damaged.

    Raises:
        CheckpointError: There is no checkpoint, all are damaged, or it is of a model that can't be built from a file.
    """
    damaged = None
    for checkpoint in find_checkpoints(where):
        try:
            return read_trained(checkpoint)
        except DamagedError as error:
            damaged = error
            say(f"warning: the checkpoint of step {checkpoint.manifest.step} is not used: {error}")
    assert damaged is not None
    raise damaged


def read_trained(checkpoint: Checkpoint) -> Trained:
    """Read the model of this checkpoint.

    Raises:
        CheckpointError: It is damaged, or of a model that can't be built from a file.
    """
    description = checkpoint.attachment(MODEL)
    if description is None:
        raise CheckpointError(f"{checkpoint.url} has no {MODEL}: it was not saved by a run, so its model is not known")
    task = read_task(description, f"{MODEL} of {checkpoint.url}")
    abstract = dict(zip(("params", "model_state"), jax.eval_shape(task.init, jax.random.key(0))))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = restore(checkpoint, abstract, jax.tree.map(lambda _: place, abstract), part=True)
    return Trained(checkpoint.url, task, tree["params"], tree["model_state"], _tokenizer(checkpoint))


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if TOKENIZER not in checkpoint.manifest.attachments:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name in checkpoint.manifest.attachments:
            Path(folder, name).write_text(checkpoint.attachment(name) or "", encoding="utf-8")
        return PretrainedTokenizer(path=folder).load()
