"""The vision transformer as a `Task`: images, each of one class."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import Batch, DataFacts, Evaluation, Loss, Mean, Metrics, Sum, Task, logical_axes
from ..core.errors import RecipeError
from ..core.validated import Validated
from ..parallel import RematPolicy
from ..spmd import equal_shares
from .decoder_task import ComputeType
from .flops import training_flops_per_image
from .vit import Drawing, Vit
from .vit_config import VitConfig

MIXED_LABEL, MIX = "label_mixed", "mix"
"""What a batch of mixed images has besides: the other image's class, and the share of the first one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitTask(Validated, Task):
    """Train a vision transformer on batches with the leaves `image` and `label`.

    `image` is (batch, height, width, channel), of bytes or floats. `loss_mask` leaves rows out; of mixed images, `label_mixed` is
    the second class and `mix` the first one's share.

    Attributes:
        compute_dtype: What activations and products are in; parameters stay float32, sums accumulate in float32.
        label_smoothing: In training, this much of each image's target is spread over all classes alike.
    """

    model: VitConfig
    compute_dtype: ComputeType = "float32"
    remat: RematPolicy = "none"
    label_smoothing: float = 0.0

    mesh_axes = frozenset({"replica", "fsdp", "expert", "tensor"})
    names_axes = True
    remat_policies = get_args(RematPolicy)
    splits_residual = False
    unit = "images"

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise RecipeError(f"task.label_smoothing={self.label_smoothing}; expected a share in [0, 1)")

    @property
    def weight_dtype(self) -> Any:
        return jnp.dtype(self.compute_dtype)

    def adapted(self, facts: DataFacts) -> "VitTask":
        model, classes = self.model, facts.num_classes
        if classes is not None:
            if not model.num_classes:
                model = dataclasses.replace(model, num_classes=classes)
            elif model.num_classes < classes:
                raise RecipeError(
                    f"task.model.num_classes={model.num_classes} is less than the data's {classes}; raise it, or set it to 0 to "
                    f"take the data's"
                )
        if not model.num_classes:
            raise RecipeError("task.model.num_classes=0 takes the data's, which does not say how many; give a number")
        return dataclasses.replace(self, model=model)

    def flops_per_example(self) -> float:
        return training_flops_per_image(self.model)

    def rematerialised(self, policy: str) -> "VitTask":
        return dataclasses.replace(self, remat=policy)  # pyright: ignore[reportArgumentType]

    def for_debugging(self) -> "VitTask":
        return dataclasses.replace(self, remat="none")

    def init(self, key: jax.Array) -> tuple[Vit, dict[str, Any]]:
        return Vit.build(key, self.model), {}

    def parameter_axes(self, params: Vit) -> Any:
        return logical_axes(params)

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        mask = micro_batches.get("loss_mask")
        weight = jnp.float32(micro_batches["label"].size) if mask is None else mask.sum()
        return {"cross_entropy": weight}

    def loss(self, params: Vit, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        drawing = Drawing(key, batch["row"]) if train and self.model.dropout > 0 else None
        scores = params(batch["image"], dtype=self.weight_dtype, remat=self.remat if train else "none", drawing=drawing)
        label, mixed, share = batch["label"], batch.get(MIXED_LABEL), batch.get(MIX)
        mask = batch.get("loss_mask", jnp.ones(label.shape, jnp.float32))
        smoothing = self.label_smoothing if train else 0.0
        surprise = class_surprise(equal_shares(scores), label, mixed, share, smoothing)
        if mixed is not None and share is not None:
            # Of a mixed image, the class with the larger share is right.
            label = jnp.where(share < 0.5, mixed, label)
        losses = {"cross_entropy": Loss((surprise * mask).sum(), mask.sum())}
        return Evaluation(losses, state, _metrics(scores, label, mask))


def class_surprise(
    scores: Float[Array, "batch class"],
    label: Int[Array, " batch"],
    mixed: Int[Array, " batch"] | None = None,
    share: Float[Array, " batch"] | None = None,
    smoothing: float = 0.0,
) -> Float[Array, " batch"]:
    """Each row's cross-entropy with its target: one class, or two in shares, of which `smoothing` is spread over all classes.

    A label that is no class gives NaN: the step's guard then refuses the update.

    Args:
        mixed: The second class of a mixed image.
        share: The first one's share, in [0, 1].

    >>> class_surprise(jnp.zeros((1, 4)), jnp.array([2]), smoothing=0.1).tolist() == [jnp.log(4.0)]
    True
    """
    log_shares = jax.nn.log_softmax(scores, axis=-1)
    surprise = -_of_class(log_shares, label)
    if mixed is not None and share is not None:
        surprise = share * surprise - (1.0 - share) * _of_class(log_shares, mixed)
    return surprise if smoothing == 0.0 else (1.0 - smoothing) * surprise - smoothing * log_shares.mean(axis=-1)


def _of_class(log_shares: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_shares, label[:, None], axis=-1, mode="fill")[:, 0]


def _metrics(scores: jax.Array, label: jax.Array, mask: jax.Array) -> Metrics:
    # Of scores that tie none is the answer: a model that has collapsed is not right.
    own = _of_class(scores, label)
    at_least = (scores >= own[:, None]).sum(axis=-1)
    right = (at_least == 1).astype(jnp.float32)
    metrics: dict[str, Any] = {"accuracy": Mean((right * mask).sum(), mask.sum()), "images": Sum(mask.sum())}
    if scores.shape[-1] > 5:
        among = (at_least <= 5).astype(jnp.float32)
        metrics["accuracy_top5"] = Mean((among * mask).sum(), mask.sum())
    return metrics
