"""Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ....core.errors import CheckpointError, RecipeError
from ....core.params.axes import path_name
from ....models import Decoder, DecoderConfig, DecoderTask
from ....models.lora import LoRA, name_in_layer
from ....spmd.composite.low_rank import LowRankWeight, base_weights, column_norms, is_low_rank
from ....spmd.composite.quantized_weight import weight_shapes
from ....system import json_reader
from ....system.replacement import replace_json, replacement
from ..family_choice import to_config_json_like
from ..tensor_map import ParameterMatch, match_parameters
from .module_patterns import read_patterns, values_in_layers

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAGNITUDE_VECTOR = "lora_magnitude_vector"

READ = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "rank_pattern", "alpha_pattern")
"""Keys that are read."""

WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "peft_version",
    "qalora_group_size", "revision", "task_type", "layers_pattern", "megatron_core", "runtime_config",
)  # fmt: skip
"""Keys without effect on the result of a trained adapter."""

NEUTRAL: Mapping[str, Any] = {"bias": "none", "lora_bias": False, "fan_in_fan_out": False}
"""Values that change nothing; of all other keys, these are null, false and empty."""


class _AdapterLocation(NamedTuple):
    """Location of an adapter: its module in the files, the stacked weight, and the index in its copies."""

    module: str
    name: str
    weight: LowRankWeight
    copy_index: tuple[int, ...]


def save_adapter(
    directory: str | Path, model: Decoder, lora: LoRA, *, base: str = "", like: Mapping[str, Any] | None = None
) -> None:
    """Write the adapters of a decoder so that `peft.PeftModel.from_pretrained(base_model, directory)` computes the same.

    Args:
        directory: Created if it does not exist; must not hold another adapter.
        lora: The task's settings.
        base: Name or folder of the model that the adapters belong to, recorded for readers.
        like: The base's config.json, as in `save`.

    Raises:
        RecipeError: The model has no adapters, or the family's files hold an adapted matrix together with others.
        CheckpointError: The folder can't be written, or holds an adapter.
    """
    folder = Path(directory)
    locations = list(_adapter_locations(model, like or {}))
    if not locations:
        raise RecipeError("the model has no adapters; train with task.adapter, or save the model itself")
    if (folder / WEIGHTS).exists():
        raise CheckpointError(f"{folder} holds an adapter already; choose another folder, or empty it")
    tensors = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for location in locations:
        size = lora.size_of(name_in_layer(location.name))
        if size.rank != lora.rank:
            ranks[location.module] = size.rank
        if size.alpha != lora.alpha:
            alphas[location.module] = size.alpha
        a, b = (np.asarray(part[location.copy_index]) for part in (location.weight.a, location.weight.b))
        rank = a.shape[-1]
        tensors[f"{PREFIX}{location.module}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
        tensors[f"{PREFIX}{location.module}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
        if location.weight.magnitude is not None:
            tensors[f"{PREFIX}{location.module}.{MAGNITUDE_VECTOR}"] = np.asarray(
                location.weight.magnitude[location.copy_index]
            ).ravel()
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "target_modules": sorted({location.module for location in locations}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacement(folder / WEIGHTS) as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
        replace_json(folder / CONFIG, raw, indent=2)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't write to {folder}: {error}") from error


def read_adapter_config(
    directory: str | Path, config: DecoderConfig | None = None, *, like: Mapping[str, Any] | None = None
) -> LoRA:
    """Return the settings of an adapter in PEFT's layout, with which `DecoderTask.adapter` has its shapes.

    Matrices are chosen by `load_adapter`, which fills those that the files have.

    Args:
        config: The base's settings, for an adapter with several ranks or alphas.
        like: The base's config.json, as in `save`.

    Raises:
        CheckpointError: The file is missing or broken.
        RecipeError: The file has a key that changes the forward pass and is not implemented; or it has several ranks or
            alphas, and there is no `config`, or layers of one stack have different ones.
    """
    path = Path(directory) / CONFIG
    try:
        raw = json_reader.read(path)
        rank, alpha = int(raw["r"]), float(raw["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}; expected PEFT's, with r and lora_alpha") from error
    if raw.get("peft_type") != "LORA":
        raise RecipeError(f"{path}: peft_type={raw.get('peft_type')!r}; expected 'LORA'")
    for key, value in raw.items():
        if key in (*READ, *WITHOUT_EFFECT):
            continue
        if value != NEUTRAL[key] if key in NEUTRAL else bool(value):
            raise RecipeError(
                f"{path}: {key}={value!r} changes the model, and is not implemented; merge the adapter by PEFT"
            )
    dora, rank_stabilized = bool(raw.get("use_dora")), bool(raw.get("use_rslora"))
    lora = LoRA(rank=rank, alpha=alpha, rank_stabilized=rank_stabilized, dora=dora)
    patterns = [read_patterns(raw.get(key), f"{path}: {key}") for key in ("rank_pattern", "alpha_pattern")]
    if not any(patterns):
        return lora
    if config is None:
        raise RecipeError(
            f"{path} has ranks or alphas by module; pass the base's settings as config=, to find its matrices"
        )
    modules = modules_of(config, like or {})
    ranks, alphas = (values_in_layers(each, modules, str(path)) for each in patterns)
    return dataclasses.replace(lora, ranks={name: int(rank) for name, rank in ranks.items()}, alphas=alphas)


def modules_of(config: DecoderConfig, like: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the modules of a family that each matrix of a layer is in the files, by its name in a layer."""
    model, _ = jax.eval_shape(DecoderTask(model=config).init, jax.random.key(0))
    family, _ = to_config_json_like(config, None, dict(like))
    modules: dict[str, list[str]] = {}
    for match in match_parameters(family, model, {}):
        if match.name.startswith("stacks."):
            tensors = (match.tensor(index).removesuffix(".weight") for index in match.places)
            modules.setdefault(name_in_layer(match.name), []).extend(tensors)
    return modules


def load_adapter(directory: str | Path, model: Decoder, *, like: Mapping[str, Any] | None = None) -> Decoder:
    """Return a decoder with the adapters of a folder in PEFT's layout; those that the files lack are zero.

    Args:
        model: A decoder with adapters of the same rank, as `DecoderTask(adapter=read_adapter_config(directory))` builds it.
        like: The base's config.json, as in `save`.

    Raises:
        CheckpointError: The files are damaged, or have an adapter that the model lacks, or one of another shape.
    """
    path = Path(directory) / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            adapted = frozenset(tensors)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; it is missing or incomplete: fetch it again") from error
    filled: dict[str, LowRankWeight] = {}
    for location in _adapter_locations(model, like or {}):
        if location.name not in filled:
            filled[location.name] = _without_correction(location.weight)
        for part, target in _parts_at(filled[location.name], location.copy_index):
            name = f"{PREFIX}{location.module}.{part}"
            if name in tensors:
                _fill(target, tensors.pop(name), part, f"{path}: {name}")
            elif part == MAGNITUDE_VECTOR and f"{PREFIX}{location.module}.lora_A.weight" in adapted:
                raise CheckpointError(
                    f"{path} lacks {name}: it was trained without magnitudes; load it with LoRA(dora=False)"
                )
    if tensors:
        raise CheckpointError(
            f"{path} holds adapters that the model has no place for: {', '.join(sorted(tensors)[:5])}"
        )
    return _replace_adapters(model, filled)


def _without_correction(weight: LowRankWeight) -> LowRankWeight:
    """Return a weight with host arrays as parts: zeros, and magnitudes that are the base's norms."""
    a, b = (np.zeros(part.shape, part.dtype) for part in (weight.a, weight.b))
    if weight.magnitude is None:
        return dataclasses.replace(weight, a=a, b=b)
    norms = jax.jit(column_norms, static_argnums=(1, 2))(weight.base, weight.num_inputs, weight.num_outputs)
    return dataclasses.replace(weight, a=a, b=b, magnitude=np.array(norms))


def _parts_at(weight: LowRankWeight, copy_index: tuple[int, ...]) -> list[tuple[str, np.ndarray]]:
    """Return each part of a weight at an index of its copies, by its name in PEFT's files."""
    parts = [("lora_A.weight", weight.a[copy_index]), ("lora_B.weight", weight.b[copy_index])]
    return parts if weight.magnitude is None else [*parts, (MAGNITUDE_VECTOR, weight.magnitude[copy_index])]


def _fill(target: np.ndarray, tensor: np.ndarray, part: str, where: str) -> None:
    """Copy a tensor of PEFT's files into a part of a weight, of the axes (*inputs, rank) or (rank, *outputs)."""
    shape = (target.size,)
    if part != MAGNITUDE_VECTOR:
        rank = target.shape[-1] if part == "lora_A.weight" else target.shape[0]
        shape = (rank, target.size // rank) if part == "lora_A.weight" else (target.size // rank, rank)
    if tensor.shape != shape:
        raise CheckpointError(f"{where} has the shape {tensor.shape}; expected {shape}")
    target[...] = tensor.T.reshape(target.shape)


def _replace_adapters(model: Decoder, filled: Mapping[str, LowRankWeight]) -> Decoder:
    """Return the model with these parts beside its bases, in the sharding of the present ones."""
    leaves, structure = jax.tree.flatten_with_path(model, is_leaf=is_low_rank)

    def one(name: str, node: Any) -> Any:
        if name not in filled:
            return node
        a, b, magnitude = (
            None if old is None else jax.device_put(new, old.sharding)
            for new, old in ((getattr(filled[name], part), getattr(node, part)) for part in ("a", "b", "magnitude"))
        )
        return dataclasses.replace(node, a=a, b=b, magnitude=magnitude)

    return structure.unflatten([one(path_name(path), node) for path, node in leaves])


def _adapter_locations(model: Decoder, like: Mapping[str, Any]) -> Iterator[_AdapterLocation]:
    """Yield each adapter of a model, layer by layer, with the module of the family that it belongs to.

    Raises:
        RecipeError: The family's files hold an adapted matrix together with others, or transposed.
    """
    nodes = jax.tree.flatten_with_path(model, is_leaf=is_low_rank)[0]
    adapted = {path_name(path): node for path, node in nodes if is_low_rank(node)}
    family, _ = to_config_json_like(model.config, None, dict(like))
    for match in match_parameters(family, weight_shapes(base_weights(model)), {}):
        if (weight := adapted.get(match.name)) is None:
            continue
        _check_alone(match, weight)
        for index in match.places:
            yield _AdapterLocation(match.tensor(index).removesuffix(".weight"), match.name, weight, index)


def _check_alone(match: ParameterMatch, weight: LowRankWeight) -> None:
    outputs, inputs = match.axes[-weight.num_outputs :], match.axes[: -weight.num_outputs]
    if match.source.pattern.matrix != (outputs, inputs):
        raise RecipeError(
            f"{match.name} is a part of {match.source.name}, or stored transposed; adapters of it have no place in PEFT's "
            f"files: export the merged model, or leave it out of adapter.targets"
        )
