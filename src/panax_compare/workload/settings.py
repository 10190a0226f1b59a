"""Settings of a comparison: one frozen value, checked at construction."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from panax.core.errors import RecipeError, suggest_name

from .precision import Precision

PRECISIONS: dict[Precision, str] = {
    Precision.F32: "parameters, matmuls and their sums in float32 (no TF32 anywhere)",
    Precision.TF32: "parameters in float32, matmuls in TF32 on a GPU",
    Precision.BF16: "parameters, activations and matmuls in bfloat16, the loss in float32",
    Precision.MIXED: "parameters in float32, matmuls in bfloat16 (torch.autocast; compute_dtype of Panax)",
}

ATTENTIONS = ("eager", "fused")
OptimizerName = Literal["adamw", "sgd", "adagrad"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)

TABLE_OPTIMIZERS = ("sgd", "adagrad")
"""The optimizers of `dlrm`: PyTorch has no AdamW of sparse gradients."""

WorkKind = Literal["vit", "decoder", "moe", "dlrm", "recipe"]
WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)

SIZES: dict[str, tuple[str, ...]] = {
    "vit": ("tiny", "Ti", "S", "B", "L", "H"),
    "decoder": ("tiny", "60m", "160m", "1b", "8b"),
    "moe": ("tiny", "100m", "8x7b"),
    "dlrm": ("tiny", "100k", "1m", "1m-bags"),
}
"""The sizes of each named work; `tiny` is for experiments."""

DEFAULT_SIZES = {"vit": "B", "decoder": "60m", "moe": "100m", "dlrm": "1m"}

DEFAULTS = {"dlrm": ("adagrad", 2048)}
"""The optimizer and the batch size of works with different defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a comparison.

    Attributes:
        work: "vit", "decoder", "moe", "dlrm", or "recipe:NAME".
        precision: One of `PRECISIONS`.
        attention: "eager" for all scores in memory, "fused" for the fastest of each framework.
        optimizer: "adamw" or "sgd"; for `dlrm`, "adagrad" or "sgd".
        size: One of `SIZES`; empty for the work's default.
        batch_size: Images, or rows of tokens, per step.
        columns: Names of columns; empty for all.
        steps: Steps of a column's turn, dispatched one after the other, with a wait for the device before and
            after them.
        rounds: Turns of each column.
        checked_steps: Number of steps with losses that must agree before anything is timed.
        layers: Overrides the size's number of layers; 0 keeps it.
        sequence_length: Length of a decoder's rows; 0 for the default.
        image_size: Pixels of a side; 0 for the default.
        patch_size: Pixels of a patch's side; 0 for the default.
        classes: Number of classes of a ViT; 0 for the default.
        weight_decay: Weight decay of weights and embeddings; never of norms, biases and the class token.
        probes: True to try, after all timing, a batch of another shape and a wrong batch in every column.
    """

    work: str
    size: str = ""
    batch_size: int = 8
    precision: str = Precision.F32.value
    attention: str = "fused"
    columns: tuple[str, ...] = ()
    steps: int = 2
    rounds: int = 5
    checked_steps: int = 4
    layers: int = 0
    sequence_length: int = 0
    image_size: int = 0
    patch_size: int = 0
    classes: int = 0
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 0.0
    weight_decay: float = 0.1
    seed: int = 0
    probes: bool = True

    def __post_init__(self) -> None:
        kind = self.kind
        _one_of("precision", self.precision, tuple(PRECISIONS))
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        if kind != "dlrm" and self.optimizer == "adagrad":
            raise RecipeError("optimizer='adagrad' is of tables, for `panax compare dlrm`; use adamw or sgd")
        if kind == "dlrm":
            self._check_tables()
        if kind == "recipe":
            if not self.work.partition(":")[2]:
                raise RecipeError("work='recipe:' names no recipe; expected recipe:NAME, as `panax recipes` lists them")
            self._refuse(("size", "layers", "image_size", "patch_size", "classes"), "of a recipe: change the recipe")
        elif self.size:
            _one_of("size", self.size, SIZES[kind])
        if kind == "vit":
            self._refuse(("sequence_length",), "of images; use --image-size and --patch-size")
        if kind in ("decoder", "moe"):
            self._refuse(("image_size", "patch_size", "classes"), "of tokens; use --sequence-length")
        for name in ("batch_size", "steps", "rounds", "checked_steps"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name}={getattr(self, name)}; expected 1 or more")
        for name in (
            "layers",
            "sequence_length",
            "image_size",
            "patch_size",
            "classes",
            "learning_rate",
            "weight_decay",
        ):
            if getattr(self, name) < 0:
                raise RecipeError(f"{name}={getattr(self, name)}; expected 0 or more")

    def _check_tables(self) -> None:
        if self.optimizer not in TABLE_OPTIMIZERS:
            raise RecipeError(
                f"optimizer={self.optimizer!r}; tables are updated by {' or '.join(TABLE_OPTIMIZERS)} here"
            )
        if self.precision != Precision.F32:
            raise RecipeError(f"precision={self.precision!r}; tables and their matmuls are compared in f32")
        if self.attention != Settings.attention:
            raise RecipeError(f"attention={self.attention!r} has no effect with 'dlrm', which does not attend")
        shape = ("layers", "sequence_length", "image_size", "patch_size", "classes")
        self._refuse(shape, "of a table's shape; use --size and --batch-size")

    @property
    def kind(self) -> WorkKind:
        """Return the part before the colon.

        Raises:
            RecipeError: The work is unknown.
        """
        for kind in WORK_KINDS:
            if kind == self.work.partition(":")[0]:
                return kind
        raise RecipeError(
            f"work={self.work!r} can't be compared; {suggest_name(self.work, [*SIZES, 'recipe:NAME'])}. A recipe "
            "is recipe:NAME"
        )

    @property
    def name(self) -> str:
        """Return a folder name that is unique to these settings.

        >>> Settings(work="vit", size="S", batch_size=4).name
        'vit-S-f32-fused-adamw-batch4'
        """
        work = self.work.replace(":", "-").replace("/", "-")
        size = self.size or DEFAULT_SIZES.get(self.kind, "")
        shape = [f"{label}{value}" for label, value in self._shape().items() if value]
        attention = "" if self.kind == "dlrm" else self.attention
        parts = [work, size, *shape, self.precision, attention, self.optimizer, f"batch{self.batch_size}"]
        return "-".join(part for part in parts if part)

    def _shape(self) -> dict[str, int]:
        return {
            "layers": self.layers,
            "length": self.sequence_length,
            "pixels": self.image_size,
            "patch": self.patch_size,
            "classes": self.classes,
        }

    def _refuse(self, names: Sequence[str], why: str) -> None:
        for name in names:
            if getattr(self, name):
                flag = "--" + name.replace("_", "-")
                raise RecipeError(f"{flag} {getattr(self, name)} has no effect with {self.work!r}: it is not {why}")


def check_hardware(precision: str, has_gpu: bool) -> None:
    """Raise a RecipeError for a precision that this machine does not support."""
    if precision == Precision.TF32 and not has_gpu:
        raise RecipeError(
            "precision='tf32' is how NVIDIA's GPUs multiply float32 numbers, and no GPU is attached here; use --precision f32 "
            "on a CPU, or bf16 and bf16-mixed"
        )


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise RecipeError(f"{name}={value!r}; {suggest_name(value, known)}; expected one of {', '.join(known)}")
