"""`TextEmbedderTask`: vectors of texts, near each other for a text and its positive example, from a decoder's hidden states."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, Loss, Mean, Sum
from ...core.errors import RecipeError
from ...core.measures import Losses, Metrics
from ...spmd import split_cotangent
from ..in_batch_softmax import InBatchResult, in_batch_softmax
from .headed_task import HeadedDecoder, HeadedTask
from .pooling import pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEmbedderTask(HeadedTask):
    """Contrastive training of text embeddings by a decoder: a text's positive should have the nearest vector
    among all positive texts of the global batch.

    Batches have `tokens` and `positive_tokens`, each with `segment` and `positive_segment` (0 for padding). On a mesh the
    softmax is over the texts of all devices, so the loss equals that of one device; micro-batches raise an
    error.

    Source: in-batch negatives as in dense passage retrieval (arXiv:2004.04906), section 3.2; Matryoshka representation
    learning (arXiv:2205.13147).

    Attributes:
        dims: Lengths of prefixes of the vector that are also trained as embeddings (Matryoshka); the loss is the mean over
            them and the full vector. (): the full vector only.
        temperature: Cosines are divided by this.
        both_ways: Also find the text of each positive text among all texts; the loss is the mean of both
            directions.
    """

    dims: tuple[int, ...] = ()
    temperature: float = 0.05
    both_ways: bool = False

    sums_over_rows = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.temperature < math.inf:
            raise RecipeError(f"task.temperature={self.temperature}; expected a positive number")
        if any(not 0 < dim < self.model.embed for dim in self.dims):
            raise RecipeError(
                f"task.dims={self.dims}; expected lengths below the vector's, task.model.embed={self.model.embed}"
            )
        if self.model.feed_forward is not None and self.model.mixture_layers:
            raise RecipeError(
                "task.model.feed_forward has experts, which text vectors are not trained with here; choose a dense decoder"
            )

    @property
    def text_leaves(self) -> tuple[tuple[str, str], ...]:
        return (("tokens", "segment"), ("positive_tokens", "positive_segment"))

    def build_head(self, key: jax.Array) -> None:
        return None

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        mask = micro_batches.get("loss_mask")
        return {"in_batch": jnp.float32(micro_batches["row"].size) if mask is None else mask.sum()}

    def vectors(
        self, params: HeadedDecoder, items: Float[Array, "texts residual embed"], weights: Float[Array, "texts seq"]
    ) -> Float[Array, "texts embed"]:
        """Return the embeddings of texts, in float32, before they are normalized."""
        return pool(params.decoder.final_norm(items), weights)

    def compute_metrics(
        self,
        params: HeadedDecoder,
        items: Float[Array, "texts residual embed"],
        targets: Mapping[str, Array],
        train: bool,
    ) -> tuple[Losses, Metrics]:
        mask = targets["loss_mask"]
        texts, positives = jnp.split(self.vectors(params, items, targets["pooling"]), 2)
        losses = [self._loss(texts[:, :dim], positives[:, :dim], mask) for dim in (*self.dims, self.model.embed)]
        full_loss, right = losses[-1]
        mean = sum((loss for loss, _ in losses[:-1]), full_loss) / len(losses)
        metrics: Metrics = {"in_batch_accuracy": Mean((right * mask).sum(), mask.sum()), "texts": Sum(mask.sum())}
        return {"in_batch": Loss((split_cotangent(mean) * mask).sum(), mask.sum())}, metrics

    def _loss(
        self, texts: Float[Array, "batch dim"], positives: Float[Array, "batch dim"], mask: Float[Array, " batch"]
    ) -> InBatchResult:
        """Compare each text with all positive ones."""
        ours, theirs = _unit(texts), _unit(positives)
        forth = in_batch_softmax(ours, theirs, mask, self.temperature)
        if not self.both_ways:
            return forth
        back = in_batch_softmax(theirs, ours, mask, self.temperature)
        return forth._replace(loss=0.5 * (forth.loss + back.loss))


def _unit(x: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)
