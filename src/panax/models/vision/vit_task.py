"""The vision transformer as a `Task`: image classification."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Batch, DataFacts, Loss, Mean, Metrics, Sum
from ...core.batch_checks import MASK_LEAF, WEIGHT_RANGE, LeafRange, id_range
from ...core.errors import RecipeError
from ...core.measures import Losses
from ...core.task import MatmulPrecision
from ...core.validation import Validated
from ...layers import Context, Stack, StagedTask
from ...layers.stages.staged_task import ComputeType, FloatType
from ...parallel import Pipeline, RematPolicy
from ...spmd import split_cotangent
from ..leaf_names import LEAF_ALIASES
from ..task_metrics import TokenMetric, check_names, compute_token_metrics, metrics_field
from .vit import Vit, shared_context
from .vit_config import VitConfig

MIXED_LABEL, MIX = "label_mixed", "mix"
"""Additional leaves of a batch of mixed images: the second image's class, and the first one's share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitTask(Validated, StagedTask):
    """Train a vision transformer on batches with the leaves `image` and `label`.

    `image` is (batch, height, width, channel), of bytes or floats. `loss_mask` masks rows; for mixed images,
    `label_mixed` is the second class and `mix` the first one's share.

    Attributes:
        compute_dtype: Dtype of activations and matmuls, see `StagedTask`; sums accumulate in float32.
        parameter_dtype: Dtype of parameters, gradients and optimizer moments.
        matmul_precision: Precision of float32 matmuls; None for the platform's default (bfloat16 on TPUs,
            TF32 on GPUs that have it).
        label_smoothing: In training, the share of each image's target that is spread evenly over all classes.
        metrics: Additional evaluation metrics, by name; see `TokenMetric`: functions of class scores, labels
            and weights.
    """

    model: VitConfig
    compute_dtype: ComputeType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    parameter_dtype: FloatType = "float32"
    matmul_precision: MatmulPrecision | None = None
    remat: RematPolicy = "none"
    label_smoothing: float = 0.0
    metrics: Mapping[str, TokenMetric] = metrics_field()

    pipeline: Pipeline = Pipeline()  # noqa: RUF009

    mesh_axes = frozenset({"replica", "stage", "fsdp", "expert", "tensor"})
    splits_residual = False
    unit = "images"
    leaf_aliases = LEAF_ALIASES

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise RecipeError(f"task.label_smoothing={self.label_smoothing}; expected a share in [0, 1)")
        check_names(self.metrics)
        self.check_precision()

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        classes = id_range(self.model.num_classes, counted_by=MASK_LEAF, advice="raise task.model.num_classes")
        return {
            MASK_LEAF: WEIGHT_RANGE,
            "label": classes,
            MIXED_LABEL: classes,
            MIX: LeafRange(0.0, 1.0, counted_by=MASK_LEAF),
        }

    required_leaves = frozenset({"image", "label"})

    def adapt_to_data(self, facts: DataFacts) -> "VitTask":
        model, classes = self.model, facts.num_classes
        if classes is not None:
            if not model.num_classes:
                model = dataclasses.replace(model, num_classes=classes)
            elif model.num_classes < classes:
                raise RecipeError(
                    f"task.model.num_classes={model.num_classes} is less than the data's {classes}; raise it, or set it to 0 to "
                    f"use the data's"
                )
        if not model.num_classes:
            raise RecipeError("task.model.num_classes=0 takes the data's, which does not state how many; set a number")
        return dataclasses.replace(self, model=model)

    def flops_per_example(self) -> float:
        model = self.model
        patches = 2 * model.num_patches * model.patch**2 * model.channels * model.embed
        return 3 * (
            patches + model.num_tokens * self.layer_flops(model.num_tokens) + 2 * model.embed * model.num_classes
        )

    def init(self, key: jax.Array) -> tuple[Vit, dict[str, Any]]:
        return self.cast_to_storage(Vit.build(key, self.model)), {}

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        mask = micro_batches.get("loss_mask")
        weight = jnp.float32(micro_batches["label"].size) if mask is None else mask.sum()
        return {"cross_entropy": weight}

    def stacks(self, params: Vit) -> tuple[Stack, ...]:
        return params.stacks

    def with_stacks(self, params: Vit, stacks: tuple[Stack, ...]) -> Vit:
        return dataclasses.replace(params, blocks=stacks[0].blocks[0] if stacks else None)

    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        drawn = train and self.model.dropout > 0
        return shared_context(self.model, batch["row"].shape[0], batch["row"], key if drawn else None)

    def enter(self, params: Vit, batch: Batch, context: Context) -> Float[Array, "batch residual embed"]:
        return params.enter(batch["image"], context, self.weight_dtype)

    def leave(self, params: Vit, x: Float[Array, "batch residual embed"]) -> Float[Array, "batch embed"]:
        return params.pool(x)

    def targets(self, batch: Batch) -> Mapping[str, jax.Array]:
        given = {name: batch[name] for name in ("label", MIXED_LABEL, MIX, "loss_mask") if name in batch}
        return {"loss_mask": jnp.ones(given["label"].shape, jnp.float32), **given}

    def compute_metrics(
        self, params: Vit, items: Float[Array, "batch embed"], targets: Mapping[str, jax.Array], train: bool
    ) -> tuple[Losses, Metrics]:
        scores = params.head(items)
        label, mixed, share, mask = targets["label"], targets.get(MIXED_LABEL), targets.get(MIX), targets["loss_mask"]
        smoothing = self.label_smoothing if train else 0.0
        surprise = mixed_cross_entropy(split_cotangent(scores), label, mixed, share, smoothing)
        if mixed is not None and share is not None:
            # The class with the larger share counts as a mixed image's label.
            label = jnp.where(share < 0.5, mixed, label)
        metrics = class_metrics(scores, label, mask, "images")
        if not train:
            metrics |= compute_token_metrics(self.metrics, scores.astype(jnp.float32), label, mask)
        return {"cross_entropy": Loss((surprise * mask).sum(), mask.sum())}, metrics


def mixed_cross_entropy(
    scores: Float[Array, "batch class"],
    label: Int[Array, " batch"],
    mixed: Int[Array, " batch"] | None = None,
    share: Float[Array, " batch"] | None = None,
    smoothing: float = 0.0,
) -> Float[Array, " batch"]:
    """Compute each row's cross-entropy with its target: one class, or two mixed ones, with label smoothing.

    A label out of range yields NaN, so that the step's guard skips the update.

    Args:
        mixed: The second class of a mixed image.
        share: The first class's share, in [0, 1].
        smoothing: Share of the target that is spread evenly over all classes.

    >>> mixed_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]), smoothing=0.1).tolist() == [jnp.log(4.0)]
    True
    """
    log_shares = jax.nn.log_softmax(scores, axis=-1)
    surprise = -_of_class(log_shares, label)
    if mixed is not None and share is not None:
        surprise = share * surprise - (1.0 - share) * _of_class(log_shares, mixed)
    return surprise if smoothing == 0.0 else (1.0 - smoothing) * surprise - smoothing * log_shares.mean(axis=-1)


def _of_class(log_shares: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_shares, label[:, None], axis=-1, mode="fill")[:, 0]


def class_metrics(
    scores: Float[Array, "batch class"], label: Int[Array, " batch"], mask: Float[Array, " batch"], rows: str
) -> dict[str, Any]:
    """Return the accuracies of class scores, and the number of rows under the name `rows`."""
    # Ties count as wrong, so that a collapsed model scores no accuracy.
    label_score = _of_class(scores, label)
    at_least = (scores >= label_score[:, None]).sum(axis=-1)
    right = (at_least == 1).astype(jnp.float32)
    metrics: dict[str, Any] = {"accuracy": Mean((right * mask).sum(), mask.sum()), rows: Sum(mask.sum())}
    if scores.shape[-1] > 5:
        among = (at_least <= 5).astype(jnp.float32)
        metrics["accuracy_top5"] = Mean((among * mask).sum(), mask.sum())
    return metrics
