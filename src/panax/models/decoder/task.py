"""The decoder as a `Task`: next-token prediction on packed documents, or another objective."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...core import Axes, Batch, DataFacts, named_leaves
from ...core.batch_checks import EXPERTS_LEAF, MASK_LEAF, WEIGHT_RANGE, LeafRange, id_range
from ...core.errors import RecipeError
from ...core.layout.layout import axis_size
from ...core.measures import Losses, Metrics
from ...core.monitors import JointMonitor, MetricMonitor
from ...core.task import MatmulPrecision, RolloutNeeds
from ...core.validation import Validated
from ...kernels import CrossEntropySettings
from ...layers import Context, ExpertLoadMonitor, RouterTerms, StagedTask, router_metrics, router_weights
from ...layers.moe.routing import RouterState
from ...layers.stages.staged_task import STAGE, ComputeType, FloatType
from ...parallel import ContextAttention, Pipeline, RematPolicy
from ...parallel.context import sequence_positions
from ...spmd import ValueState, assert_sharding, local_sequence, psum_over_tokens
from ...spmd.composite.low_rank import low_rank_mask
from ..leaf_names import LEAF_ALIASES
from ..lora import LoRA, add_adapters
from ..objectives.likely_tokens import LikelyTokensOf
from ..objectives.log_probabilities import TargetLogProbabilities
from ..objectives.next_token import NextToken
from ..objectives.objective import DecoderObjective, VocabularyHead
from ..task_metrics import TokenMetric, check_names, compute_token_metrics, metrics_field
from ..value_head import NAME as VALUE_HEAD
from ..value_head import ValueHead
from .base_width import BaseWidth
from .config import DecoderConfig
from .incremental import IncrementalDecoder
from .logits import gather_logits
from .model import Decoder, layer_state
from .replay import check_draws_as_trained, check_replay, replay_experts, replay_ranges
from .transformers_batch import to_decoder_axes, to_decoder_batch

_BATCH_AXES: Mapping[str, Axes] = MappingProxyType(
    dict.fromkeys(("tokens", "targets", MASK_LEAF, "segment", "position"), ("batch", "seq"))
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderTask(Validated, StagedTask):
    """Train a decoder on batches with the leaves `tokens`, `targets`, `loss_mask` and, if packed, `segment` and `position`.

    Attributes:
        objective: Losses and metrics: of the next token by default, or for example of pairs of answers (`Preference`).
        compute_dtype: Dtype of activations and matmuls, see `StagedTask`; sums accumulate in float32.
        parameter_dtype: Dtype of parameters, gradients and optimizer moments.
        matmul_precision: Precision of float32 matmuls; None for the platform's default (bfloat16 on TPUs,
            TF32 on GPUs that have it).
        z_loss: Weight of the squared log-partition in the loss.
        label_smoothing: In training, the share of each target's probability that is spread over the whole
            vocabulary.
        metrics: Additional evaluation metrics, by name; see `TokenMetric`.
        adapter: Train adapters beside the layers' matrices, and freeze all parameters of the model.
        base: Widths of the narrower model on which the learning rate was tuned. Learning rates, weight decay
            and initial values of the wider weights then follow muP (`train.mup`), and the run logs them
            when it starts.
        pipeline: The pipeline schedule of a mesh with a stage axis.
        context_attention: How sequences sharded over the context axis attend: with a ring of keys and values,
            or with an all-to-all of heads for positions (Ulysses), which needs as many key-value heads on
            each device as the axis has devices. auto takes Ulysses if possible.
    """

    model: DecoderConfig
    compute_dtype: ComputeType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    parameter_dtype: FloatType = "float32"
    matmul_precision: MatmulPrecision | None = None
    remat: RematPolicy = "none"
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    metrics: Mapping[str, TokenMetric] = metrics_field()
    pipeline: Pipeline = Pipeline()  # noqa: RUF009
    context_attention: ContextAttention = "auto"
    base: BaseWidth | None = None
    adapter: LoRA | None = None
    objective: DecoderObjective = NextToken()  # noqa: RUF009

    generates = True
    leaf_aliases = LEAF_ALIASES

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise RecipeError(f"task.label_smoothing={self.label_smoothing}; expected a share in [0, 1)")
        if self.z_loss < 0.0:
            raise RecipeError(f"task.z_loss={self.z_loss}; expected 0 or more")
        for name in ("z_loss", "label_smoothing"):
            if getattr(self, name) and not self.objective.reads_cross_entropy_terms:
                raise RecipeError(
                    f"task.{name}={getattr(self, name)} has no effect with task.objective={type(self.objective).__name__}; "
                    f"remove it"
                )
        check_names(self.metrics)
        if self.objective.replays_experts:
            check_replay(self.model)
        self.check_precision()
        if self.base is not None:
            self.base.check(self.model)
            if self.adapter is not None:
                raise RecipeError("task.base has no rule for adapters; remove it, or task.adapter")

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.required_leaves

    @property
    def leaf_advice(self) -> Mapping[str, str]:
        return self.objective.leaf_advice

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _BATCH_AXES if not self.objective.leaf_axes else {**_BATCH_AXES, **self.objective.leaf_axes}

    @property
    def mesh_axes(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # A pipeline evaluates rows in parts.
        return StagedTask.mesh_axes if self.objective.sums_over_rows else StagedTask.mesh_axes - {STAGE}

    @property
    def reads_pairs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.reads_pairs

    @property
    def sums_over_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.sums_over_rows

    @property
    def mup_base_task(self) -> "DecoderTask | None":
        if self.base is None:
            return None
        return dataclasses.replace(self, model=self.base.of(self.model), base=None)

    @property
    def output_weights(self) -> tuple[str, ...]:
        return () if self.model.tied else ("head.table",)

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        words, length = "raise task.model.vocab_size", "raise task.model.max_length"
        counted = id_range(self.model.vocab_size, counted_by=MASK_LEAF, advice=words)
        return {
            MASK_LEAF: WEIGHT_RANGE,
            "tokens": id_range(self.model.vocab_size, advice=words),
            **dict.fromkeys(("targets", *self.objective.id_leaves), counted),
            "segment": LeafRange(0, integral=True),
            "position": id_range(self.model.max_length, advice=length),
            **self.objective.leaf_ranges,
            **replay_ranges(self.model, self.objective),
        }

    def convert_batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return to_decoder_batch(batch)

    def convert_axes(self, axes: Mapping[str, Axes]) -> Mapping[str, Axes]:
        return to_decoder_axes(axes, self.batch_axes)

    def adapt_to_data(self, facts: DataFacts) -> "DecoderTask":
        model, tokens = self.model, facts.vocab_size
        if tokens is not None:
            if not model.vocab_size:
                model = dataclasses.replace(model, vocab_size=tokens)
            elif model.vocab_size < tokens:
                raise RecipeError(
                    f"task.model.vocab_size={model.vocab_size} is less than the tokenizer's {tokens}; raise it, or set it to 0 "
                    f"to use the tokenizer's"
                )
        if not model.vocab_size:
            raise RecipeError("task.model.vocab_size=0 takes the tokenizer's, and the data has none; set a number")
        if facts.sequence_length is not None and facts.sequence_length > model.max_length:
            raise RecipeError(_too_long(facts.sequence_length, model.max_length))
        return dataclasses.replace(self, model=model)

    def create_monitor(self) -> MetricMonitor | None:
        mixtures = self.model.mixture_layers
        monitors = (ExpertLoadMonitor(mixtures) if mixtures else None, self.objective.create_monitor())
        return JointMonitor([monitor for monitor in monitors if monitor is not None]) if any(monitors) else None

    def flops_per_token(self, length: int) -> float:
        return 3 * (2 * self.model.embed * self.model.vocab_size + self.layer_flops(length))

    @property
    def rollout_needs(self) -> RolloutNeeds | None:
        needs, moe = self.objective.rollout_needs, self.model.feed_forward
        if needs is None:
            return None
        needs = needs._replace(max_length=self.model.max_length)
        if moe is None or not self.objective.replays_experts:
            return needs
        return needs._replace(experts=(len(self.model.mixture_layers), moe.active))

    def check_rollouts(self) -> None:
        check_draws_as_trained(self.model)

    def log_probability_task(
        self, rows: int, length: int, *, temperature: float = 1.0, kept: bool = False
    ) -> "DecoderTask":
        values = self.objective.estimates_values
        objective = TargetLogProbabilities(rows=rows, length=length, temperature=temperature, values=values, kept=kept)
        return dataclasses.replace(self, objective=objective)

    def top_log_probability_task(self, rows: int, length: int, *, top_k: int, temperature: float) -> "DecoderTask":
        objective = LikelyTokensOf(rows=rows, length=length, top_k=top_k, temperature=temperature)
        return dataclasses.replace(self, objective=objective, z_loss=0.0, label_smoothing=0.0)

    @property
    def vocabulary_size(self) -> int | None:
        return self.model.vocab_size or None

    @property
    def teacher_temperature(self) -> float | None:
        return self.objective.teacher_temperature

    def incremental_model(self, params: Decoder, state: Any, dtype: str = "float32") -> IncrementalDecoder:
        return IncrementalDecoder.create(params, state, dtype, records_experts=self.objective.replays_experts)

    def init(self, key: jax.Array) -> tuple[Decoder, dict[str, Any]]:
        model = Decoder.build(key, self.model)
        if self.objective.estimates_values:
            head = ValueHead.create(key, {"embed": self.model.embed, "class": 1})
            model = dataclasses.replace(model, value_head=head)
        model = self.cast_to_storage(model)
        return (model if self.adapter is None else add_adapters(key, model, self.adapter)), self._first_state()

    @property
    def frozen_parameters(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All parameters but those of adapters, if there are any, and of a value head."""
        if self.adapter is None:
            return ()
        params, _ = jax.eval_shape(self.init, jax.random.key(0))
        trained = named_leaves(low_rank_mask(params))
        return tuple(name for name in trained if not trained[name] and name not in self.added_parameters)

    @property
    def added_parameters(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (f"{VALUE_HEAD}.w", f"{VALUE_HEAD}.b") if self.objective.estimates_values else ()

    def _first_state(self) -> dict[str, Any]:
        """Return the selection biases of all mixture layers' routers, if the config uses them."""
        moe = self.model.feed_forward
        if moe is None or not moe.selection_bias or not self.model.mixture_layers:
            return {}
        return {"router_bias": jnp.zeros((len(self.model.mixture_layers), moe.experts), jnp.float32)}

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        weights = self.objective.loss_weights(micro_batches)
        moe = self.model.feed_forward
        if moe is None or not self.model.mixture_layers:
            return weights
        return {**weights, **router_weights(moe, self.count_tokens(micro_batches))}

    def enter(self, params: Decoder, batch: Batch, context: Context) -> Float[Array, "batch residual embed"]:
        return params.enter(batch["tokens"], context, self.weight_dtype)

    def targets(self, batch: Batch) -> Mapping[str, jax.Array]:
        return self.objective.targets(batch)

    def compute_metrics(
        self,
        params: Decoder,
        items: Float[Array, "batch residual embed"],
        targets: Mapping[str, jax.Array],
        train: bool,
    ) -> tuple[Losses, Metrics]:
        model = self.model
        settings = CrossEntropySettings(
            soft_cap=model.logit_soft_cap,
            z_loss=self.z_loss if train else 0.0,
            label_smoothing=self.label_smoothing if train else 0.0,
            vocab_size=None if model.vocab_size == model.vocab_rows else model.vocab_size,
        )
        hidden = params.normalize(items)
        head = VocabularyHead(hidden, params.output_table, settings, model.vocab_size, params.value_head)
        losses, metrics = self.objective.compute(head, targets, train)
        if self.metrics and not train:
            logits = gather_logits(params, hidden)
            metrics = {
                **metrics,
                **compute_token_metrics(self.metrics, logits, targets["targets"], targets[MASK_LEAF]),
            }
        return losses, metrics

    def layer_state(self, state: Any) -> RouterState | None:
        return layer_state(state)

    def layer_inputs(self, state: Any, batch: Batch) -> RouterState | None:
        inputs = layer_state(state)
        return inputs if EXPERTS_LEAF not in batch else replay_experts(self.model, inputs, batch[EXPERTS_LEAF])

    def update_state(self, state: Any, metrics: Metrics) -> Any:
        """Update the selection biases from the expert load of the whole step (arXiv:2408.15664)."""
        moe = self.model.feed_forward
        if moe is None or "router_bias" not in state:
            return state
        load: Any = psum_over_tokens(metrics["experts/load"])
        short = jnp.sign(load.value.mean(axis=-1, keepdims=True) - load.value)
        return state | {"router_bias": state["router_bias"] + moe.bias_rate * short}

    def count_tokens(self, batch: Batch) -> jax.Array:
        return contributing_positions(batch).sum(dtype=jnp.float32)

    def layer_metrics(self, reports: RouterTerms | None, count: jax.Array, train: bool) -> tuple[Losses, Metrics]:
        """Return the routers' losses (in training only) and metrics."""
        moe = self.model.feed_forward
        if moe is None or reports is None:
            return {}, {}
        losses, metrics = router_metrics(moe, reports, count)
        return (losses if train else {}), metrics

    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        tokens = batch["tokens"]
        length = tokens.shape[1] * axis_size("context")
        if length > self.model.max_length:
            raise RecipeError(_too_long(length, self.model.max_length))
        position = batch.get("position")
        if position is None:
            place = sequence_positions(tokens.shape[1], context=axis_size("context"))
            position = jnp.broadcast_to(place[None], tokens.shape)
        parts, tensor = axis_size("context"), axis_size("tensor")
        place = sequence_positions(tokens.shape[1] // tensor, context=parts, tensor=tensor)
        moe, segment = self.model.feed_forward, batch.get("segment")
        drawn = train and (self.model.dropout > 0 or (moe is not None and moe.jitter > 0))
        return Context(
            position,
            segment,
            batch["row"],
            key if drawn else None,
            place,
            self.context_attention,
            valid=None if moe is None else local_sequence(contributing_positions(batch)),
            train=train,
        )


def contributing_positions(batch: Batch) -> Bool[Array, "... batch seq"]:
    """Return True for the positions that can affect the loss: up to the last unmasked target, without
    padding.

    Attention is causal, so all positions after that target are padding, whether or not `segment` marks them;
    a row without unmasked targets is padding throughout. Routers skip padding.
    """
    mask, segment = batch[MASK_LEAF], batch.get("segment")
    parts = axis_size("context")
    place = jnp.broadcast_to(sequence_positions(mask.shape[-1], context=parts), mask.shape)
    last = jnp.where(mask > 0, place, -1).max(axis=-1, keepdims=True)
    last = jax.lax.pmax(last, "context") if parts > 1 else last
    # Each device of the context axis has only its local positions.
    teaches = (
        assert_sharding(place <= last, {"context": ValueState.SPLIT}, dim=mask.ndim - 1) if parts > 1 else place <= last
    )
    return teaches if segment is None else teaches & (segment != 0)


def _too_long(length: int, most: int) -> str:
    return (
        f"the data's rows are {length} tokens long, the model is for at most {most}; shorten data.sequence_length, or raise "
        f"task.model.max_length"
    )
