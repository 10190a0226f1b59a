"""`TextClassifierTask`: the class of a text, from a decoder's pooled hidden states."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Axes, Batch, DataFacts, Loss
from ...core.batch_checks import MASK_LEAF, WEIGHT_RANGE, LeafRange, id_range
from ...core.errors import RecipeError
from ...core.measures import Losses, Metrics
from ...layers import router_weights
from ...spmd import split_cotangent
from ..vision.vit import ClassHead
from ..vision.vit_task import class_metrics, mixed_cross_entropy
from .headed_task import HeadedDecoder, HeadedTask
from .pooling import pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextClassifierTask(HeadedTask):
    """Train a decoder, and a linear layer on its pooled hidden states, to predict the `label` of each text.

    The decoder's weights can be those of a released model (`init="hf:DIR"`), also of one with a classification head,
    which is read too if it has as many classes.

    Attributes:
        classes: Number of classes; 0 takes the data's.
        label_smoothing: In training, the share of each target that is spread evenly over all classes.
    """

    classes: int = 0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 0:
            raise RecipeError(f"task.classes={self.classes}; expected a positive number, or 0 for the data's")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise RecipeError(f"task.label_smoothing={self.label_smoothing}; expected a share in [0, 1)")

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        classes = id_range(self.classes, counted_by=MASK_LEAF, advice="raise task.classes")
        return {**super().leaf_ranges, MASK_LEAF: WEIGHT_RANGE, "label": classes}

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().required_leaves | {"label"}

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {**super().batch_axes, "label": ("batch",)}

    def adapt_to_data(self, facts: DataFacts) -> "TextClassifierTask":
        classes = self.classes or facts.num_classes
        if not classes:
            raise RecipeError("task.classes=0 takes the data's, which does not state how many; set a number")
        if facts.num_classes is not None and classes < facts.num_classes:
            raise RecipeError(f"task.classes={classes} is less than the data's {facts.num_classes}; raise it")
        adapted = super().adapt_to_data(facts)
        return dataclasses.replace(self, model=adapted.model, classes=classes)

    def build_head(self, key: jax.Array) -> ClassHead:
        return ClassHead.create(key, {"embed": self.model.embed, "class": self.classes})

    def loss_weights(
        self, params: HeadedDecoder, state: object, micro_batches: Batch, key: jax.Array
    ) -> Mapping[str, jax.Array]:
        mask = micro_batches.get("loss_mask")
        weights = {"cross_entropy": jnp.float32(micro_batches["label"].size) if mask is None else mask.sum()}
        moe = self.model.feed_forward
        if moe is None or not self.model.mixture_layers:
            return weights
        return weights | router_weights(moe, jax.vmap(self.count_tokens)(micro_batches).sum())

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        return {**super().targets(batch), "label": batch["label"]}

    def scores(
        self, params: HeadedDecoder, items: Float[Array, "batch residual embed"], weights: Float[Array, "batch seq"]
    ) -> Float[Array, "batch class"]:
        """Return the score of each class, in float32."""
        assert params.head is not None
        return params.head(pool(params.decoder.final_norm(items), weights))

    def compute_metrics(
        self,
        params: HeadedDecoder,
        items: Float[Array, "batch residual embed"],
        targets: Mapping[str, Array],
        train: bool,
    ) -> tuple[Losses, Metrics]:
        scores, mask, label = self.scores(params, items, targets["pooling"]), targets["loss_mask"], targets["label"]
        losses = mixed_cross_entropy(split_cotangent(scores), label, smoothing=self.label_smoothing if train else 0.0)
        metrics = class_metrics(scores, label, mask, "texts")
        return {"cross_entropy": Loss((losses * mask).sum(), mask.sum())}, metrics
