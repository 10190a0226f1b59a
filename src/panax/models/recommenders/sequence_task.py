"""Sequential recommendation as a `Task`: predict a user's next item (SASRec, HSTU)."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, DataFacts, Evaluation, Loss, Sum, name_key
from ...core.batch_checks import MASK_LEAF, WEIGHT_RANGE, LeafRange, id_range
from ...core.errors import RecipeError
from ...core.layout.layout import axis_size
from ...core.measures import Losses, Metrics
from ...core.task import MatmulPrecision
from ...core.validation import Validated
from ...kernels import CrossEntropySettings
from ...layers import Context, StagedTask, run_stacks, token_loss
from ...layers.stages.staged_task import ComputeType, FloatType
from ...layers.tables.ranking import ranking_metrics, target_ranks
from ...parallel import Pipeline, RematPolicy
from ...parallel.context import sequence_positions
from ...spmd import all_gather_sequence, split_cotangent
from ..decoder.config import DecoderConfig
from ..decoder.model import Decoder
from ..leaf_names import LEAF_ALIASES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceTask(Validated, StagedTask):
    """Next-item prediction on sequences of items.

    A batch has int32 (batch, seq) leaves: `items`, padded with -1 after the last; `targets`, the item that followed each;
    and optionally `times` and `target_times`, the times of events and targets. HSTU attends by the time between an event
    and the target, or the query's event if there are no `target_times`.

    The model is a decoder whose tokens are items: with attention a SASRec (arXiv:1808.09781), with `HstuConfig` an HSTU.
    Evaluations rank each row's last target among all items: `hit_rate@k`, which is the recall, `ndcg@k` and `mrr`.

    Attributes:
        model: Config of the decoder; its `vocab_size` is the number of items, 0 for the data's.
        negatives: Number of negatives of a sampled softmax, drawn once per step; 0 for the full softmax.
        ranked_at: The values of k in the metrics.
        compute_dtype: Dtype of activations and matmuls, see `StagedTask`; sums accumulate in float32.
        parameter_dtype: Dtype of parameters, gradients and optimizer moments.
        matmul_precision: Precision of float32 matmuls; None for the platform's default.
    """

    model: DecoderConfig
    negatives: int = 0
    ranked_at: tuple[int, ...] = (10,)
    compute_dtype: ComputeType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    parameter_dtype: FloatType = "float32"
    matmul_precision: MatmulPrecision | None = None
    remat: RematPolicy = "none"

    pipeline: Pipeline = Pipeline()  # noqa: RUF009

    mesh_axes = frozenset({"replica", "fsdp", "expert", "tensor"})
    leaf_aliases = LEAF_ALIASES
    batch_axes = MappingProxyType(
        {**dict.fromkeys(("items", "targets", "times"), ("batch", "seq")), "loss_mask": ("batch",)}
    )

    def __post_init__(self) -> None:
        if self.negatives < 0 or not self.ranked_at or min(self.ranked_at) < 1:
            raise RecipeError(
                f"task.negatives={self.negatives}, ranked_at={self.ranked_at}; expected 0 or more, and ranks of at least 1"
            )
        if not self.model.tied or self.model.feed_forward is not None:
            raise RecipeError(
                "a model of sequences reads its scores from the items' own vectors, and is dense; set tied=True"
            )
        self.check_precision()

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        items = id_range(self.model.vocab_size, least=-1, advice="raise task.model.vocab_size")
        return {
            MASK_LEAF: WEIGHT_RANGE,
            "items": items,
            "targets": items,
            **dict.fromkeys(("times", "target_times"), LeafRange(integral=True)),
        }

    required_leaves = frozenset({"items", "targets"})

    def adapt_to_data(self, facts: DataFacts) -> "SequenceTask":
        model, items = self.model, facts.num_ids.get("items")
        if items is not None:
            if not model.vocab_size:
                model = dataclasses.replace(model, vocab_size=items)
            elif model.vocab_size < items:
                raise RecipeError(
                    f"task.model.vocab_size={model.vocab_size} is less than the data's {items} items; raise it, or set it to 0 "
                    f"to use the data's"
                )
        if not model.vocab_size:
            raise RecipeError(
                "task.model.vocab_size=0 takes the data's items, but the data does not state how many; set a number"
            )
        if self.negatives >= model.vocab_size:
            raise RecipeError(
                f"task.negatives={self.negatives} of {model.vocab_size} items; use fewer, or 0 for the whole softmax"
            )
        return dataclasses.replace(self, model=model)

    def flops_per_token(self, length: int) -> float:
        scored = self.negatives + 1 if self.negatives else self.model.vocab_size
        return 3 * (2 * self.model.embed * scored + self.layer_flops(length))

    def init(self, key: jax.Array) -> tuple[Decoder, dict[str, Any]]:
        return self.cast_to_storage(Decoder.build(key, self.model)), {}

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        return {"cross_entropy": _weights(micro_batches).sum()}

    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        items = batch["items"]
        if items.shape[1] > self.model.max_length:
            raise RecipeError(
                f"the data's rows are {items.shape[1]} events long, the model is for at most {self.model.max_length}; raise "
                f"task.model.max_length, or read fewer events"
            )
        tensor = axis_size("tensor")
        position = jnp.broadcast_to(jnp.arange(items.shape[1])[None], items.shape)
        place = sequence_positions(items.shape[1] // tensor, context=1, tensor=tensor)
        drawn = key if train and self.model.dropout > 0 else None
        # Padding follows all events, so causal attention never sees it.
        times, following = batch.get("times"), batch.get("target_times")
        if times is None and following is not None:
            raise RecipeError("the batch has target_times without times; pass the events' own times too")
        return Context(
            position, None, batch["row"], drawn, place, train=train, times=times,
            target_times=times if following is None else following,
        )  # fmt: skip

    def enter(self, params: Decoder, batch: Batch, context: Context) -> Float[Array, "batch residual embed"]:
        return params.enter(jnp.maximum(batch["items"], 0), context, self.weight_dtype)

    def targets(self, batch: Batch) -> Mapping[str, jax.Array]:
        return {"targets": batch["targets"], "weights": _weights(batch)}

    def loss(self, params: Decoder, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        context, remat = self.context(batch, key, train), self.remat if train else "none"
        x, _ = run_stacks(self.stacks(params), self.enter(params, batch, context), context, remat)
        targets = dict(self.targets(batch))
        if train and self.negatives:
            # The same negatives for all rows of the step on every device, padded to a multiple of the tensor
            # axis.
            shape, rest = (1, self.negatives), -self.negatives % axis_size("tensor")
            drawn = jax.random.randint(name_key(key, "negatives"), shape, 0, self.model.vocab_size)
            targets["negatives"] = jnp.pad(drawn, ((0, 0), (0, rest)))
        losses, metrics = self.compute_metrics(params, x, targets, train)
        return Evaluation(losses, state, metrics)

    def compute_metrics(
        self,
        params: Decoder,
        items: Float[Array, "batch residual embed"],
        targets: Mapping[str, jax.Array],
        train: bool,
    ) -> tuple[Losses, Metrics]:
        following, weights = targets["targets"], targets["weights"]
        hidden = params.normalize(items)
        total = weights.sum()
        metrics: dict[str, Any] = {"tokens": Sum(total)}  # Events; throughput is reported under this name.
        if "negatives" in targets:
            loss = self._sampled(params, hidden, targets)
        else:
            model = self.model
            settings = CrossEntropySettings(
                vocab_size=None if model.vocab_size == model.vocab_rows else model.vocab_size
            )
            loss = token_loss(hidden, params.output_table, jnp.maximum(following, 0), weights, settings).loss
        if not train:
            last = jnp.where(weights > 0, jnp.arange(following.shape[1])[None], -1).max(axis=1)
            rows, at = jnp.arange(following.shape[0]), jnp.maximum(last, 0)
            ranks = target_ranks(
                all_gather_sequence(hidden)[rows, at], jnp.maximum(following[rows, at], 0), params.output_table,
                self.model.vocab_size,
            )  # fmt: skip
            metrics |= ranking_metrics(ranks, (last >= 0).astype(jnp.float32), self.ranked_at)
        return {"cross_entropy": Loss(loss, total)}, metrics

    def _sampled(
        self, params: Decoder, hidden: Float[Array, "batch residual embed"], targets: Mapping[str, jax.Array]
    ) -> Float[Array, ""]:
        """Return the sum of the targets' cross-entropies over a sampled softmax."""
        following, drawn = targets["targets"], targets["negatives"]
        right = params.embedding(jnp.maximum(following, 0), hidden.dtype)
        others = all_gather_sequence(params.embedding(drawn, hidden.dtype))[0, : self.negatives]
        drawn = drawn[:, : self.negatives]
        hidden, right = all_gather_sequence(hidden), all_gather_sequence(right)
        target_scores = jnp.einsum("bse,bse->bs", hidden, right, preferred_element_type=jnp.float32)
        scores = jnp.einsum("bse,ne->bsn", hidden, others, preferred_element_type=jnp.float32)
        # In expectation, the sum of exponentials is that over all other items: samples equal to the target
        # are masked below.
        scores = scores + math.log(self.model.vocab_size / self.negatives)
        scores = jnp.where(following[..., None] == drawn[0][None, None], -jnp.inf, scores)
        every = jnp.logaddexp(target_scores, jax.nn.logsumexp(scores, axis=-1))
        return (split_cotangent(every - target_scores) * targets["weights"]).sum()


def _weights(batch: Batch) -> Float[Array, "... batch seq"]:
    """Return 1 for each target that counts toward the loss, else 0."""
    there = (batch["targets"] >= 0).astype(jnp.float32)
    return there * batch["loss_mask"][..., None] if "loss_mask" in batch else there
