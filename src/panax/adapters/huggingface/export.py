"""Export of a model's weights to safetensors files and a config.json that `transformers` loads."""

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ...checkpoint.conversion import group_by_bytes
from ...core.errors import CheckpointError, RecipeError
from ...models import Decoder, Vit
from ...spmd.composite.low_rank import merge_low_rank
from ...system.files import apply_umask
from .config import CONFIG, read_decoder
from .families import FAMILIES
from .family import Family
from .family_choice import TOKEN_IDS, resolve_defaults, to_config_json_like
from .gguf import KINDS, write_gguf
from .gguf.writer import TensorPlan
from .loader import INDEX_FILE, WEIGHTS_FILE, open_tensors
from .tensor_map import ParameterMatch, StackIndex, index_ranges, match_parameters
from .towers import TowerNames, has_towers, text_config, whole_config
from .vision import PREPROCESSOR, VIT, vit_json

DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
"""Bits of the dtypes, by safetensors' names, that other towers' tensors may have."""

Sources = list[tuple[ParameterMatch, StackIndex]]
"""Sources of a tensor: parameters, and indices in them."""


def save(
    directory: str | Path,
    model: Decoder | Vit,
    state: Mapping[str, Any] | None = None,
    *,
    model_type: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    token_ids: Mapping[str, int | None] | None = None,
    classes: Sequence[str] = (),
    like: Mapping[str, Any] | None = None,
    towers: str | Path | None = None,
) -> None:
    """Write a model so that `transformers` computes the same logits.

    A decoder is for `AutoModelForCausalLM.from_pretrained(directory)`; a vision transformer, with its images'
    preprocessing, for `AutoModelForImageClassification`.

    Adapters are merged: added in float32, and rounded once. Weights keep their dtype. One file's tensors are in host
    memory at a time. The configuration is written last, so that an interrupted export is not taken for a model.

    Args:
        directory: Created if it does not exist; must not hold other weights.
        state: The task's model state, needed if routers select by a bias.
        model_type: The family; by default derived from the model's configuration.
        max_shard_bytes: Largest size of a file's tensors; a larger single tensor gets a separate file.
        token_ids: `bos_token_id`, `eos_token_id` and `pad_token_id` of a decoder's tokenizer, if it has them.
        classes: Class names of a vision transformer's labels, by index.
        like: The config.json of the release from which a decoder was trained: the decoder is written as the same family if
            possible, with the keys of that file that do not affect the decoder.
        towers: The release's folder, if `like` is of a model with other towers in addition to the text's, or the family carries
            tensors that are not computed: these are copied from the folder unchanged.

    Raises:
        RecipeError: No family can express the model; the message names the fields that prevent it.
        CheckpointError: The folder can't be written, or the weights are sharded over several processes.
    """
    if max_shard_bytes <= 0:
        raise RecipeError(f"max_shard_bytes={max_shard_bytes}; expected a positive number of bytes")
    folder, model = Path(directory), merge_low_rank(model)
    family, raw, beside = _describe(model, model_type, token_ids or {}, classes, like or {})
    if isinstance(model, Decoder):
        _check_state(model, state or {})
    tensors: dict[str, Sources] = _tensors(list(match_parameters(family, model, state or {})))
    for sources in tensors.values():
        for match, _ in sources:
            if not match.leaf.is_fully_addressable:
                raise CheckpointError(
                    f"{match.name} is placed on several processes; restore the checkpoint in a single one to export it"
                )
    if next(folder.glob("*.safetensors*"), None) is not None:
        raise CheckpointError(f"{folder} holds weights already; choose another folder, or empty it")
    with _open_towers(family, like or {}, towers) as (names, copied):
        renamed = {names.outer(name) if names else name: sources for name, sources in tensors.items()}
        _write_files(folder, renamed | copied, max_shard_bytes, {**beside, CONFIG: raw})


def save_gguf(
    path: str | Path,
    model: Decoder,
    kind: str = "F16",
    *,
    tokenizer: str | Path | None = None,
    like: Mapping[str, Any] | None = None,
) -> None:
    """Write a decoder as one GGUF file, for llama.cpp and programs based on it.

    Args:
        path: The file; an existing one is replaced at the end.
        kind: Type of the matrices: "F16", or "Q8_0" with 8 bits and a scale for each 32 values. Vectors are in float32.
        tokenizer: Folder with `tokenizer.json`, and `tokenizer_config.json`, `generation_config.json` and
            `chat_template.jinja` if there are any; None to write no tokenizer.
        like: As in `save`.

    Raises:
        RecipeError: GGUF has no architecture for the model, can't express a setting (the file is read back and compared),
            or the tokenizer is not of bytes and merges.
        CheckpointError: The file can't be written, or a weight is out of range.
    """
    if kind not in KINDS:
        raise RecipeError(f"kind={kind!r}; expected one of {', '.join(KINDS)}")
    path, model = Path(path), merge_low_rank(model)
    if has_towers(like or {}):
        raise RecipeError(
            "a model with other towers in addition to the text's is not written as a GGUF file; export without --gguf"
        )
    family, raw = to_config_json_like(model.config, None, {})
    sources = _tensors(list(match_parameters(family, model, {})))
    plans = {
        name: TensorPlan(parts[0][0].tensor_shape, functools.partial(_tensor, parts)) for name, parts in sources.items()
    }
    expected = resolve_defaults(model.config)

    def difference(read_back: dict[str, Any]) -> str | None:
        resolved = resolve_defaults(read_decoder(read_back, path))
        differs = [
            f"{name}={resolved[name]!r} for {value!r}" for name, value in expected.items() if resolved[name] != value
        ]
        return "; ".join(differs) or None

    folder = None if tokenizer is None else Path(tokenizer)
    write_gguf(path, raw, plans, kind, tokenizer=folder, difference=difference)


@contextlib.contextmanager
def _open_towers(
    family: Family, like: Mapping[str, Any], towers: str | Path | None
) -> Iterator[tuple[TowerNames | None, dict[str, Any]]]:
    """Open the tensors of a release that are exported unchanged: those of other towers, and those that the family
    carries; yield the text tower's names, and these tensors by name."""
    if not has_towers(like):
        if towers is None or family.carried is None:
            yield None, {}
            return
        with open_tensors(Path(towers)) as tensors:
            yield None, {name: value for name, value in tensors.items() if family.is_carried(name)}
        return
    if towers is None:
        raise RecipeError(
            "the release has other towers in addition to the text's; pass its folder (--base DIR, or towers=) to copy them"
        )
    with open_tensors(Path(towers)) as tensors:
        names = TowerNames.of(family, tensors)
        yield names, {name: value for name, value in tensors.items() if names.inner(name) is None}


def _write_files(folder: Path, tensors: Mapping[str, Any], max_shard_bytes: int, json_files: Mapping[str, Any]) -> None:
    """Write tensors in shards, then the other JSON files in the order of `json_files`.

    Args:
        tensors: Name to sources in the model, or to a tensor of another file.
    """
    sizes = {name: _size(value) for name, value in tensors.items()}
    shards = list(group_by_bytes(sizes, max_shard_bytes))
    files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [WEIGHTS_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in zip(files, shards):
            partial = folder / f"{file}.partial"
            arrays = {
                name: _tensor(value) if isinstance(value := tensors[name], list) else value[...] for name in names
            }
            save_file(arrays, partial, metadata={"format": "pt"})
            apply_umask(partial)
            os.replace(partial, folder / file)
        if len(shards) > 1:
            file_by_name = {name: file for file, names in zip(files, shards) for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_by_name}
            _write_json(folder / INDEX_FILE, index)
        for file, content in json_files.items():
            _write_json(folder / file, content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't write to {folder}: {error}") from error


def _describe(
    model: Decoder | Vit,
    model_type: str | None,
    token_ids: Mapping[str, int | None],
    classes: Sequence[str],
    like: Mapping[str, Any],
) -> tuple[Family, dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the model's family, its config.json, and further files to write next to it, by name."""
    if isinstance(model, Vit):
        if model_type not in (None, VIT.model_type):
            raise RecipeError(
                f"model_type={model_type!r} is not a vision transformer; expected {VIT.model_type!r}, or None"
            )
        raw, processor = vit_json(model.config, classes)
        return VIT, raw | {"torch_dtype": model.patches.w.dtype.name}, {PREPROCESSOR: processor}
    with_towers = has_towers(like)
    family, raw = to_config_json_like(model.config, model_type, text_config(like) if with_towers else like)
    dtype = model.embedding.table.dtype.name
    tokenizer_ids = {name: value for name, value in token_ids.items() if value is not None}
    tokenizer_ids |= {name: like[name] for name in TOKEN_IDS if _includes(like.get(name), tokenizer_ids.get(name))}
    ends = {**dict.fromkeys(TOKEN_IDS), **family.token_ids, **tokenizer_ids}
    if with_towers:
        return family, whole_config(like, raw, dtype) | tokenizer_ids, {}
    return family, raw | {"torch_dtype": dtype} | ends, {}


def _includes(released: Any, token: int | None) -> bool:
    """Return True if a release's token id, or list of ids that end an answer, includes the tokenizer's id."""
    return released is not None and (token is None or token in (released if isinstance(released, list) else [released]))


def _check_state(model: Decoder, state: Mapping[str, Any]) -> None:
    moe = model.config.feed_forward
    biased = moe is not None and moe.selection_bias and bool(model.config.mixture_layers)
    if biased and "router_bias" not in state:
        raise RecipeError("the model's routers select by a bias, which is model state; pass the task's state to save")


def named_tensors(model: Decoder | Vit, model_type: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor as it would be saved, by name; of a model, or of its gradients."""
    family = VIT if model_type == VIT.model_type else FAMILIES[model_type]
    for name, sources in _tensors(list(match_parameters(family, model, {}))).items():
        yield name, _tensor(sources)


def _tensors(matches: list[ParameterMatch]) -> dict[str, Sources]:
    """Return tensor name to its sources: those outside of the layers first, then layer by layer."""
    sources = [(match.layer(index), match, index) for match in matches for index in match.places]
    tensors: dict[str, Sources] = {}
    for _, match, index in sorted(sources, key=lambda source: source[0]):
        tensors.setdefault(match.tensor(index), []).append((match, index))
    return tensors


def _tensor(sources: Sources) -> np.ndarray:
    """Assemble one tensor in host memory."""
    first = sources[0][0]
    out = np.empty(first.tensor_shape, first.leaf.dtype)
    for match, index in sources:
        pattern, sizes = match.source.pattern, match.sizes
        real = tuple(slice(sizes[axis]) for axis in match.axes)
        pattern.write(out, match.axes, sizes, _assemble_parameter(match, index)[real], match.source.part)
    return out


def _assemble_parameter(match: ParameterMatch, index: StackIndex) -> np.ndarray:
    """Assemble a parameter's values at an index (all, if nothing is stacked) from the devices' shards."""
    leaf: jax.Array = match.leaf
    skip = len(index)
    out = np.empty(leaf.shape[skip:], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        ranges = index_ranges(leaf.shape, shard.index)
        if all(low <= i < high for i, (low, high) in zip(index, ranges)):
            data: Any = shard.data[tuple(i - low for i, (low, _) in zip(index, ranges))]
            out[tuple(slice(*r) for r in ranges[skip:])] = np.asarray(data)
    return out


def _size(value: Any) -> int:
    """Return the bytes of a tensor: of sources in the model, or of another file."""
    if isinstance(value, list):
        return sum(_bytes(match) for match, _ in value)
    bits = DTYPE_BITS.get(value.get_dtype())
    if bits is None:
        raise CheckpointError(
            f"another tower's tensor holds {value.get_dtype()}; expected one of {', '.join(DTYPE_BITS)}"
        )
    return math.prod(value.get_shape()) * bits // 8


def _bytes(match: ParameterMatch) -> int:
    return math.prod(match.sizes[axis] for axis in match.axes) * match.leaf.dtype.itemsize


def _write_json(path: Path, content: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
