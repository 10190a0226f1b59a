"""A released decoder with its tokenizer, read without an experiment around it."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from ...core.errors import RecipeError
from ...data.text.tokenizer import PretrainedTokenizer, Tokenizer
from ...mesh import MeshShape, Placement
from ...mesh.model_places import choose_places, with_shardings
from ...models import DecoderConfig, DecoderTask
from .config import config_from
from .hub import find_model
from .loader import load


class ReleasedDecoder(NamedTuple):
    """A released decoder.

    Attributes:
        where: Text by which the model can be found again: the folder, or the name with the commit.
        state: The task's model state.
        placement: The mesh of the arrays; None for one device.
    """

    where: str
    task: DecoderTask
    params: Any
    state: Any
    tokenizer: Tokenizer
    placement: Placement | None = None


def read_released_decoder(where: str, mesh: MeshShape | None = None) -> ReleasedDecoder:
    """Read a decoder in float32.

    Args:
        where: A folder in Hugging Face's layout, or ORG/NAME[@REVISION] of a hub.
        mesh: Read each shard to its device, for generation on a mesh; None for one device.

    Raises:
        CheckpointError: There is no such model here, and it can't be downloaded; or a file is damaged.
        RecipeError: Models of this family can't be loaded, or the model is not a decoder.
        DataError: It has no readable tokenizer.
        LayoutError: A weight is not divisible over the mesh, or there are not enough devices.
    """
    model = find_model(where)
    task, tokenizer = _read_task(model.folder, where)
    abstract = jax.eval_shape(task.init, jax.random.key(0))
    places = choose_places(task, abstract[0], abstract[1], mesh)
    params, state = with_shardings(abstract, (places.params, places.state))
    params, state = load(model.folder, task, params, state)
    return ReleasedDecoder(model.where, task, params, state, tokenizer, places.placement)


def read_released_task(where: str) -> tuple[DecoderTask, Tokenizer]:
    """Read a released decoder's task and tokenizer, without its weights; arguments and errors as in `read_released_decoder`."""
    return _read_task(find_model(where).folder, where)


def _read_task(folder: Path, where: str) -> tuple[DecoderTask, Tokenizer]:
    config = config_from(folder)
    if not isinstance(config, DecoderConfig):
        raise RecipeError(f"{where} is a vision transformer, which does not generate; a decoder does")
    return DecoderTask(model=config), PretrainedTokenizer(path=str(folder)).load().add_generation_config(folder)
