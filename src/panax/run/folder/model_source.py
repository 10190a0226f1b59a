"""The task and the tokenizer of a trained or released model, before its weights are read."""

from typing import NamedTuple

from ...core import Task
from ...core.errors import RecipeError
from ...data import PretrainedTokenizer
from ...data.text.tokenizer import Tokenizer
from .addresses import ADAPTER_PREFIX, CHECKPOINT_PREFIX, PREFIXES, RELEASED_PREFIX
from .trained_model import find_checkpoints, read_task, read_tokenizer


class ModelSource(NamedTuple):
    """A model with weights that are not read yet.

    Attributes:
        init: Address of its weights, as `Experiment.init`.
        tokenizer: None if it has none.
    """

    task: Task
    init: str
    tokenizer: Tokenizer | None


def find_model_source(address: str) -> ModelSource:
    """Find a model.

    Args:
        address: `hf:DIR`, `hf:ORG/NAME[@REVISION]`, `peft:DIR`, `checkpoint:PLACE`, or a run's folder or a checkpoint without
            a prefix; of a run its best checkpoint.

    Raises:
        CheckpointError: There is no such model, or it can't be built from a file.
        RecipeError: The address is empty, or the model is not a decoder.
    """
    prefix = next((prefix for prefix in PREFIXES if address.startswith(prefix)), "")
    where = address.removeprefix(prefix)
    if not where:
        raise RecipeError(f"{address!r} names no model; expected a run's folder, a checkpoint, hf:DIR or peft:DIR")
    if prefix == RELEASED_PREFIX:
        from ...adapters.huggingface.released_decoder import read_released_task

        task, tokenizer = read_released_task(where)
        return ModelSource(task, address, tokenizer)
    if prefix == ADAPTER_PREFIX:
        from ...adapters.huggingface.low_rank.released_adapter import find_adapter

        adapter = find_adapter(where)
        return ModelSource(adapter.task, address, PretrainedTokenizer(path=str(adapter.base.folder)).load())
    checkpoint = next(find_checkpoints(where))
    return ModelSource(read_task(checkpoint), f"{CHECKPOINT_PREFIX}{where}", read_tokenizer(checkpoint))
