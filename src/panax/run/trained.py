"""A trained model out of a checkpoint alone: its task, its parameters, its tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from ..checkpoint import Checkpointer, restore
from ..core import Task
from ..core.errors import CheckpointError
from ..data.tokenizer import PretrainedTokenizer, Tokenizer
from .description import read_task
from .start import MODEL, TOKENIZER


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a checkpoint holds besides optimizer state, on one device.

    Attributes:
        state: The task's model state.
        tokenizer: None where the run had none.
    """

    path: Path
    task: Task
    params: Any
    state: Any
    tokenizer: Tokenizer | None


def find_checkpoint(where: str) -> Path:
    """The checkpoint that a path means: its own folder, or the best one of a run's folder.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(where)
    if (path / MODEL).is_file():
        return path
    for folder in (path / "checkpoints", path):
        step = Checkpointer(folder).best()
        if step is not None:
            return Checkpointer(folder).path(step)
    raise CheckpointError(
        f"{where} holds no checkpoint; name a folder like runs/quickstart, or runs/quickstart/checkpoints/step_00000100"
    )


def load_trained(where: str) -> Trained:
    """Read the model of a checkpoint; optimizer state is not read.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, or of a model that can't be built from a file.
    """
    path = find_checkpoint(where)
    try:
        task = read_task((path / MODEL).read_text(encoding="utf-8"), str(path / MODEL))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MODEL} can't be read: {error}") from error
    abstract = dict(zip(("params", "model_state"), jax.eval_shape(task.init, jax.random.key(0))))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree, _ = restore(path, abstract, jax.tree.map(lambda _: place, abstract), part=True)
    tokenizer = PretrainedTokenizer(path=str(path)).load() if (path / TOKENIZER).is_file() else None
    return Trained(path, task, tree["params"], tree["model_state"], tokenizer)
