"""An adapter in PEFT's layout with the released model that it belongs to, as one task."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
from safetensors import SafetensorError, safe_open

from ....core.errors import CheckpointError, RecipeError, describe_type
from ....core.params.axes import path_name
from ....models import Decoder, DecoderConfig, DecoderTask
from ....models.lora import LoRA, name_in_layer
from ....spmd.composite.low_rank import is_low_rank
from ....system import json_reader
from ....system.files import expand_user
from ..config import config_from, read_json
from ..hub import LocalModel, find_model
from ..loader import load
from ..quantized import is_nf4
from .peft import CONFIG, PREFIX, WEIGHTS, load_adapter, modules_of, read_adapter_config


class ReleasedAdapter(NamedTuple):
    """An adapter and its base.

    Attributes:
        folder: The adapter's folder.
        base: The released model.
        config: The base's settings.
        raw: The base's config.json.
        lora: The adapter's settings; its targets are the matrices that the files have.
    """

    folder: Path
    base: LocalModel
    config: DecoderConfig
    raw: dict[str, Any]
    lora: LoRA

    @property
    def task(self) -> DecoderTask:
        return DecoderTask(model=self.config, adapter=self.lora)

    def load(self, task: Any, params: Any, state: Any) -> tuple[Decoder, Any]:
        """Read base and adapter.

        Args:
            task: A task with the base's model and the adapter's settings.
            params: Its parameters, real or abstract, with shardings.
            state: The task's model state, likewise.

        Raises:
            CheckpointError: A file is damaged.
            RecipeError: The task's model or adapter is another.
        """
        if not isinstance(task, DecoderTask):
            raise RecipeError(f"{self.folder} is an adapter of a decoder, and the task is {describe_type(task)}")
        ours, theirs = task.adapter, self.lora
        if ours is None:
            raise RecipeError(f"{self.folder} is an adapter, and the task has none; set task.adapter={theirs}")
        sizes = {name: ours.size_of(name) for name in _matrices_with_adapters(params)}
        expected = {name: theirs.size_of(name) for name in theirs.targets}
        if sizes != expected or ours.dora != theirs.dora:
            different = sorted(name for name in {*sizes, *expected} if sizes.get(name) != expected.get(name))
            first = (
                f" (of {different[0]} {sizes.get(different[0])} and {expected.get(different[0])})" if different else ""
            )
            raise RecipeError(
                f"task.adapter is {ours}, and {self.folder} has another{first}; set task.adapter={theirs}"
            )
        params, state = load(self.base.folder, task, params, state)
        return load_adapter(self.folder, params, like=self.raw), state


def _matrices_with_adapters(params: Any) -> set[str]:
    """Return the names in a layer of the matrices that have adapters."""
    nodes = jax.tree.flatten_with_path(params, is_leaf=is_low_rank)[0]
    return {name_in_layer(path_name(path)) for path, node in nodes if is_low_rank(node)}


def find_base_address(directory: str | Path) -> str:
    """Return the folder or name of an adapter's base, as its adapter_config.json has it.

    Raises:
        CheckpointError: The file is missing or broken, or names no base.
    """
    path = expand_user(directory) / CONFIG
    try:
        base = json_reader.read(path)["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} can't be read: {error!r}; expected PEFT's, with base_model_name_or_path"
        ) from error
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{path} names no base: base_model_name_or_path={base!r}; pass --base DIR, or set it there"
        )
    return base


def find_adapter(directory: str | Path, base: str | Path | None = None) -> ReleasedAdapter:
    """Find an adapter and its base; no weight is read.

    Args:
        directory: A folder with adapter_config.json and adapter_model.safetensors.
        base: Folder or hub name of the base; None: what adapter_config.json names.

    Raises:
        CheckpointError: A file is missing or broken, or there is no such base here, and it can't be downloaded.
        RecipeError: The adapter has a key that changes the model and is not implemented, or the base is not a decoder, or
            has no place for the adapter.
    """
    folder = expand_user(directory)
    name = find_base_address(folder) if base is None else str(base)
    model = find_model(name)
    if not model.folder.is_dir():
        raise CheckpointError(
            f"{folder} is an adapter of {name}, which is not a folder here; name the model's folder: --base DIR (base=), or set "
            f"base_model_name_or_path in {CONFIG} to it"
        )
    config = config_from(model.folder)
    if not isinstance(config, DecoderConfig):
        raise RecipeError(f"{model.where}, the base of {folder}, is a vision transformer; expected a decoder")
    raw = read_json(model.folder)
    lora = read_adapter_config(folder, config, like=raw)
    targets = _adapted_matrices(folder, config, raw)
    kept = "nf4" if is_nf4(raw) else "same"
    return ReleasedAdapter(folder, model, config, raw, dataclasses.replace(lora, targets=targets, base=kept))


def check_all_layers(adapter: ReleasedAdapter) -> None:
    """Raise a RecipeError if the files have a matrix of some layers and not of others, which could not be trained on."""
    modules = _adapted_modules(adapter.folder)
    for name, places in modules_of(adapter.config, adapter.raw).items():
        missing = [place for place in places if place not in modules]
        if missing and len(missing) < len(places):
            raise RecipeError(
                f"{adapter.folder} has an adapter of {name} in some layers and none of {missing[0]}; layers of one stack are "
                f"trained together: merge it (panax merge), and train the result"
            )


def _adapted_matrices(folder: Path, config: DecoderConfig, raw: dict[str, Any]) -> tuple[str, ...]:
    """Return the names in a layer of the matrices that have adapters in the files."""
    modules, places = _adapted_modules(folder), modules_of(config, raw)
    known = {place for each in places.values() for place in each}
    if unknown := sorted(modules - known):
        raise CheckpointError(
            f"{folder / WEIGHTS} holds adapters that the model has no place for: {', '.join(unknown[:5])}; the base is another"
        )
    return tuple(name for name, each in places.items() if not modules.isdisjoint(each))


def _adapted_modules(folder: Path) -> set[str]:
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as file:
            return {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}; it is missing or incomplete: fetch it again") from error
