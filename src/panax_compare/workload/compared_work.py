"""`ComparedWork`: the task of every column, as files and numbers. Reading it imports no framework."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from panax.core.errors import DataError
from panax.system import json_reader

from .precision import Precision
from .settings import OptimizerName

Family = Literal["vit", "llama", "mixtral", "dlrm"]
Batch = dict[str, np.ndarray]

WORK, CONFIG, WEIGHTS, BATCHES, NUDGED = (
    "work.json",
    "config.json",
    "model.safetensors",
    "batches.safetensors",
    "nudged",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerNumbers:
    """Hyperparameters of the optimizer, for optax and for torch."""

    name: OptimizerName
    learning_rate: float
    weight_decay: float
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedWork:
    """A model's weights, batches and optimizer, the same for all columns.

    Attributes:
        title: Description of the model.
        folder: Contains config.json and model.safetensors in Hugging Face's layout, and the batches.
        family: Model family of that layout.
        unit: Unit that is counted per second: "images", "tokens" or "examples".
        flops_per_step: FLOPs of the model's matmuls, forward and backward, counted from its shapes.
        recipe: Name of the recipe that defines the work; empty for a built-in one.
        flaws: Flaws of a published comparison that a column must reproduce; empty otherwise.
    """

    title: str
    folder: str
    family: Family
    unit: Literal["images", "tokens", "examples"]
    units_per_step: int
    flops_per_step: float
    parameters: int
    optimizer: OptimizerNumbers
    precision: Precision
    attention: str
    seed: int = 0
    recipe: str = ""
    flaws: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        """Read the model's config.json."""
        return json_reader.read(Path(self.folder) / CONFIG, constants=True)

    def tensors(self) -> dict[str, np.ndarray]:
        """Read the model's weights in float32, by Hugging Face's names."""
        return load_file(Path(self.folder) / WEIGHTS)

    def batches(self) -> list[Batch]:
        """Read the batches.

        They are `image` [batch, height, width, channel] float32 and `label` [batch] int32; or `tokens` and
        `targets` [batch, seq]; or `numeric` [batch, 13], a leaf of ids [batch, capacity] for each table, and
        `label` [batch], float32.
        """
        batches: dict[int, Batch] = {}
        for name, array in load_file(Path(self.folder) / BATCHES).items():
            leaf, _, number = name.rpartition(".")
            batches.setdefault(int(number), {})[leaf] = array
        return [batches[number] for number in sorted(batches)]

    def nudged_tensors(self) -> "ComparedWork":
        """Return this work with weights that differ by a rounding: it shows how far rounding alone moves the
        losses."""
        return dataclasses.replace(self, folder=str(Path(self.folder) / NUDGED))

    def save(self) -> None:
        """Write the file that workers read."""
        path = Path(self.folder) / WORK
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def read_work(folder: str | Path) -> ComparedWork:
    """Read the work in a folder.

    Raises:
        DataError: The folder has no work.
    """
    try:
        raw = json_reader.read(Path(folder) / WORK, constants=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no work to compare: {error}; run `panax compare` again") from error
    numbers = OptimizerNumbers(**raw.pop("optimizer"))
    typed = {"optimizer": numbers, "precision": Precision(raw["precision"]), "flaws": tuple(raw["flaws"])}
    return ComparedWork(**{**raw, **typed, "folder": str(folder)})


def save_batches(folder: Path, batches: list[Batch]) -> None:
    """Write batches for `ComparedWork.batches`."""
    named = {
        f"{name}.{n}": np.ascontiguousarray(leaf) for n, batch in enumerate(batches) for name, leaf in batch.items()
    }
    save_file(named, folder / BATCHES)


def save_nudged(work: ComparedWork) -> None:
    """Write the same work again, with each weight moved by one rounding of its precision, up or down at
    random."""
    folder = Path(work.folder)
    (folder / NUDGED).mkdir(exist_ok=True)
    random = np.random.default_rng(work.seed + 1)
    step = np.float32(2 * work.precision.rounding)
    moved = {
        name: array * (1 + step * (random.integers(0, 2, array.shape, dtype=np.int8) * 2 - 1).astype(np.float32))
        for name, array in work.tensors().items()
    }
    save_file(moved, folder / NUDGED / WEIGHTS, metadata={"format": "pt"})
    for name in (CONFIG, BATCHES):
        (folder / NUDGED / name).write_bytes((folder / name).read_bytes())
    work.nudged_tensors().save()


def use_weight_decay(name: str) -> bool:
    """Return True if AdamW decays the tensor of this Hugging Face name: not norms, biases and the class
    token.

    >>> use_weight_decay("model.layers.0.mlp.up_proj.weight"), use_weight_decay("vit.layernorm.bias")
    (True, False)
    >>> use_weight_decay("model.norm.weight")
    False
    """
    return not (name.endswith(".bias") or "norm" in name or name.endswith("cls_token"))
