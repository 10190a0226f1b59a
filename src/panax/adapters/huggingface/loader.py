"""Loading of safetensors files into a model's own sharding: each device reads only its slice."""

import contextlib
import dataclasses
import operator
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from ...core import named_leaves
from ...core.errors import CheckpointError, RecipeError, describe_type
from ...core.protocols import ModelState
from ...models import Decoder, DecoderConfig, DecoderTask, HeadedDecoder, HeadedTask, Vit, VitConfig, VitTask
from ...spmd.composite.low_rank import base_weights, random_mask, with_base_weights
from ...spmd.composite.quantized_weight import is_quantized, weight_shapes
from ...system import json_reader
from ..wrappers import find_wrapper
from .config import CONFIG, read_config, read_json
from .family import Family, TensorSource
from .family_choice import check_same
from .gguf import find_gguf, open_gguf, read_config_json, read_tensors
from .parameter_reader import Tensors, read_array, read_quantized
from .pattern import Pattern
from .quantized import FLOAT8, KEY, dequantize, float8_slices
from .tensor_map import ParameterMatch, match_parameters
from .towers import TowerNames, has_towers
from .vision import HEAD_WEIGHTS, check_same_vit

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes, by safetensors' names, that a weight may have; others need scales to be read."""

SCORES = "score.weight"
"""The tensor of a classification head in the checkpoints of `transformers`."""

_ROWS_AT_ONCE = 4096


def load(directory: str | Path, task: Any, params: Any, state: ModelState) -> tuple[Any, ModelState]:
    """Read a model's weights from a folder in Hugging Face's layout.

    Every process reads the slices of its own devices, each part once. A vision transformer's head stays as it
    is in `params`, with a warning, if the files have none or one for another number of classes.

    Args:
        directory: A folder with config.json and model.safetensors, or several files and
            model.safetensors.index.json.
        task: A `DecoderTask` or a `VitTask` with the model in the folder; or a `HeadedTask` on the decoder in it: the head is
            read too if the folder has one for as many classes, else it stays as it is in `params`.
        params: The task's parameters, real or abstract: only each array's shape, dtype and sharding are used. Adapters
            among them are not changed.
        state: The task's model state, in the same form: the biases of a router's selection, if there are any.

    Returns:
        Parameters like `params`, holding the weights, and model state like `state`.

    Raises:
        CheckpointError: A file is missing or damaged, or a tensor is missing, left over or of another shape.
        RecipeError: The task has no such weights, the model's family is unknown, a field differs from the
            task's model, or a head declared as tied is not the embedding.
    """
    if isinstance(task, HeadedTask) and isinstance(params, HeadedDecoder):
        return _load_headed(Path(directory), task, params, state)
    if not (
        (isinstance(task, DecoderTask) and isinstance(params, Decoder))
        or (isinstance(task, VitTask) and isinstance(params, Vit))
    ):
        raise RecipeError(
            f"weights in Hugging Face's layout can be loaded into a DecoderTask, a VitTask, or a task with a head on a decoder, "
            f"not {describe_type(task)}"
        )
    if isinstance(params, Decoder) and params.value_head is not None:
        loaded, state = load(directory, task, dataclasses.replace(params, value_head=None), state)
        return dataclasses.replace(loaded, value_head=params.value_head), state
    if isinstance(task, DecoderTask) and task.adapter is not None:
        bases, state = load(directory, dataclasses.replace(task, adapter=None), base_weights(params), state)
        return with_base_weights(params, bases), state
    folder = Path(directory)
    family, config = read_config(folder)
    _check_model(config, task, folder)
    with _open(folder, family) as tensors:
        matches = list(match_parameters(family, weight_shapes(params), state))
        leaves_to_read = jax.tree.leaves((params, state), is_leaf=is_quantized)
        head_matches = _missing_head(matches, params, config, tensors, folder) if isinstance(params, Vit) else []
        names = {name for name in tensors if not head_matches or not name.startswith(HEAD_WEIGHTS)}
        _check_names(family, [match for match in matches if match not in head_matches], names, config, folder)
        if isinstance(params, Decoder) and params.config.tied and family.head in names:
            _check_tied(
                tensors, family.head, next(match for match in matches if match.name == "embedding.table"), folder
            )
        _check_tensors([match for match in matches if match not in head_matches], tensors, folder)
        leaves = [
            match.leaf if match in head_matches else _read_leaf(match, leaf, tensors)
            for match, leaf in zip(matches, leaves_to_read, strict=True)
        ]
    return _assemble(params, state, matches, leaves)


def parameters_left(task: Any, params: Any) -> Any:
    """Return bools with the structure of a task's parameters: True for those that `load` may leave unchanged, which are
    adapters, a value head, and the head of a model other than a decoder."""
    if isinstance(task, DecoderTask):
        added = jax.tree.unflatten(
            jax.tree.structure(params), [name in task.added_parameters for name in named_leaves(params)]
        )
        return jax.tree.map(operator.or_, random_mask(params), added)
    return jax.tree.unflatten(jax.tree.structure(params), [name.startswith("head.") for name in named_leaves(params)])


def _read_leaf(match: ParameterMatch, leaf: Any, tensors: Tensors) -> Any:
    return read_quantized(match, leaf, tensors) if is_quantized(leaf) else read_array(match, tensors)


def _load_headed(
    folder: Path, task: HeadedTask, params: HeadedDecoder, state: ModelState
) -> tuple[HeadedDecoder, ModelState]:
    """Read a decoder without its output head, and the head of a classifier if the folder has one."""
    family, config = read_config(folder)
    bare = task.decoder_task
    _check_model(dataclasses.replace(config, tied=True) if isinstance(config, DecoderConfig) else config, bare, folder)
    with _open(folder, family) as tensors:
        matches = list(match_parameters(family, params.decoder, state))
        _check_names(family, matches, tensors.keys() - {family.head, SCORES}, bare.model, folder)
        scores = _score_match(params, tensors)
        _check_tensors([*matches, *scores], tensors, folder)
        decoder, state = _assemble(params.decoder, state, matches, [read_array(match, tensors) for match in matches])
        head = params.head
        for match in scores:
            # A classifier of `transformers` has no bias.
            assert head is not None
            head = dataclasses.replace(head, w=read_array(match, tensors), b=jax.tree.map(jnp.zeros_like, head.b))
    return HeadedDecoder(decoder, head), state


def _assemble(
    params: Any, state: ModelState, matches: list[ParameterMatch], leaves: list[Any]
) -> tuple[Any, ModelState]:
    """Return parameters like `params`, and model state like `state`, from the arrays of all matches in order."""
    structure = jax.tree.structure(params, is_leaf=is_quantized)
    loaded = dict(zip([match.name for match in matches[structure.num_leaves :]], leaves[structure.num_leaves :]))
    return structure.unflatten(leaves[: structure.num_leaves]), {**state, **loaded}


def _score_match(params: HeadedDecoder, tensors: Tensors) -> list[ParameterMatch]:
    """Return the match of a classifier's head, if the files have one for the same number of classes; warn if the number
    differs."""
    if params.head is None or SCORES not in tensors:
        return []
    leaf, rows = params.head.w, tensors[SCORES].get_shape()[0]
    if rows != leaf.shape[1]:
        warnings.warn(
            f"the files' head is for {rows} classes, not {leaf.shape[1]}: the head keeps its random initial values",
            stacklevel=4,
        )
        return []
    return [ParameterMatch("head.w", leaf, ("embed", "class"), (), TensorSource(SCORES, Pattern("class embed")), 0, {})]


def _check_model(config: DecoderConfig | VitConfig, task: DecoderTask | VitTask, folder: Path) -> None:
    if isinstance(config, DecoderConfig) and isinstance(task, DecoderTask):
        check_same(config, task.model, folder)
    elif isinstance(config, VitConfig) and isinstance(task, VitTask):
        check_same_vit(config, task.model, folder)
    else:
        kind = "decoder" if isinstance(config, DecoderConfig) else "vision transformer"
        raise RecipeError(f"the model in {folder} is a {kind}, the task {describe_type(task)}; choose another of them")


def _missing_head(
    matches: list[ParameterMatch], params: Vit, config: Any, tensors: Tensors, folder: Path
) -> list[ParameterMatch]:
    """Return the parameters that the files lack: the head, if the files have none for these classes."""
    classes = params.config.num_classes
    has_head = f"{HEAD_WEIGHTS}weight" in tensors
    if has_head and config.num_classes == classes:
        return []
    head_matches = [match for match in matches if match.name.startswith("head.")]
    if any(isinstance(match.leaf, jax.ShapeDtypeStruct) for match in head_matches):
        raise RecipeError(
            f"{folder} has no head for {classes} classes, and the parameters given are abstract; draw them first"
        )
    description = f"one for {config.num_classes} classes" if has_head else "none"
    warnings.warn(
        f"{folder} has no head for {classes} classes ({description}): the head keeps its random initial values",
        stacklevel=3,
    )
    return head_matches


def _check_names(
    family: Family, matches: list[ParameterMatch], names: set[str], config: DecoderConfig | VitConfig, folder: Path
) -> None:
    expected = {match.tensor(place) for match in matches for place in match.places}
    missing = sorted(expected - names)
    unexpected = {name for name in names - expected if not family.buffers.search(name) and not family.is_carried(name)}
    if family.predicts_more and isinstance(config, DecoderConfig):
        unexpected = {name for name in unexpected if _layer(name) < config.num_layers}
    if isinstance(config, DecoderConfig) and config.tied:
        unexpected.discard(family.head)
    for relation, affected in (("lacks weights that its", missing), ("holds weights that no", sorted(unexpected))):
        if affected:
            more = f" and {len(affected) - 5} more" if len(affected) > 5 else ""
            raise CheckpointError(f"{folder} {relation} {family.model_type} model has: {', '.join(affected[:5])}{more}")


def _check_tied(tensors: Tensors, head_name: str, embedding: ParameterMatch, folder: Path) -> None:
    """Raise a RecipeError if the head in the files is not the embedding to which it is declared tied."""
    name = embedding.tensor(())
    ours, head = tensors[name], tensors[head_name]
    rows, *_ = shape = tuple(ours.get_shape())
    same = shape == tuple(head.get_shape()) and all(
        np.array_equal(ours[low : min(low + _ROWS_AT_ONCE, rows)], head[low : min(low + _ROWS_AT_ONCE, rows)])
        for low in range(0, rows, _ROWS_AT_ONCE)
    )
    if not same:
        raise RecipeError(
            f"{folder / CONFIG}: tie_word_embeddings=True, but {head_name} in the files differs from {name}, and `transformers` "
            f"computes with both; set tie_word_embeddings to false there, or remove {head_name} if the head is to be "
            "the embedding"
        )


def _layer(name: str) -> int:
    """Return the number of the layer in a tensor's name; -1 outside of the layers."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    return int(number[1]) if number else -1


def _check_tensors(matches: list[ParameterMatch], tensors: Tensors, folder: Path) -> None:
    for match in matches:
        for place in match.places:
            _check_tensor(match, match.tensor(place), tensors[match.tensor(place)], folder)


def _check_tensor(match: ParameterMatch, name: str, tensor: Any, folder: Path) -> None:
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"{folder}: {name} holds {dtype}; expected one of {', '.join(FLOAT_DTYPES)}")
    if shape != match.tensor_shape:
        raise CheckpointError(
            f"{folder}: {name} has the shape {shape}; {match.name} needs {match.tensor_shape}, which is "
            f"{match.source.pattern.text!r} with {match.sizes}"
        )


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Open all tensors of a folder's files, which are mapped into memory, under their names there."""
    tensors: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if (packed := find_gguf(folder)) is not None:
            file = stack.enter_context(open_gguf(packed))
            yield read_tensors(file, read_config_json(file, packed), packed)
            return
        for path in _weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} can't be read: {error}; it is missing or incomplete: fetch or save it again"
                ) from error
            opened = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            narrow = any(tensor.get_dtype() in FLOAT8 for tensor in opened.values())
            tensors |= opened | (float8_slices(path) if narrow else {})
        yield tensors


@contextlib.contextmanager
def _open(folder: Path, family: Family) -> Iterator[Tensors]:
    """Open the tensors of the family's model, under the family's names."""
    raw = read_json(folder)
    with open_tensors(folder) as files:
        tensors = dequantize(files, raw.get(KEY))
        if (wrapper := find_wrapper(set(tensors))) is not None:
            example = next(name for name in tensors if wrapper in name)
            raise CheckpointError(
                f"{folder}: names in the files hold {wrapper!r} ({example}), as those of a module in a wrapper do "
                "(torch.compile, "
                f"DataParallel); save the module inside it (model.{wrapper.rstrip('.')}.save_pretrained(...)), or "
                "rename the tensors"
            )
        if has_towers(raw):
            names = TowerNames.of(family, tensors)
            renamed = {names.inner(name): value for name, value in tensors.items()}
            tensors = {name: value for name, value in renamed.items() if name is not None}
        if not any(name.startswith(family.prefix) for name in tensors):
            # The model without its head, like the releases of GPT-2.
            tensors = {name if name == family.head else family.prefix + name: value for name, value in tensors.items()}
        yield tensors


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        if any(folder.glob("*.bin")):
            raise CheckpointError(
                f"{folder} holds pickled weights (*.bin) only, and unpickling runs whatever code is in them. If you "
                f'trust them, convert them once: python -c "from transformers import AutoModelForCausalLM as M; '
                f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
            )
        raise CheckpointError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    try:
        names = set(json_reader.read(folder / INDEX_FILE)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE} can't be read: {error!r}; expected a weight_map") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{folder / INDEX_FILE} points outside of its folder: {outside[0]!r}")
    return [folder / name for name in sorted(names)]
