"""The decoder as a `Task`: next-token prediction on packed documents."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from ..core import Batch, DataFacts, Evaluation, Gradients, Loss, Mean, Sum, Task, logical_axes
from ..core.errors import RecipeError
from ..core.layout import axis_size
from ..core.measures import Losses, Metrics
from ..core.validated import Validated
from ..layers import ExpertWatch, RouterTerms, router_measures, router_weights, token_loss
from ..mesh import MESH_AXES
from ..parallel import ContextAttention, Pipeline, RematPolicy
from ..parallel.context import sequence_places
from ..spmd import accumulated, over_tokens, own_sequence
from . import decoder_pipeline
from .decoder import Context, Decoder
from .decoder_config import DecoderConfig
from .decoder_stages import layers_rest_on_stages
from .decoder_units import units
from .flops import training_flops_per_token

ComputeType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderTask(Validated, Task):
    """Train a decoder on batches with the leaves `tokens`, `targets`, `loss_mask` and, if packed, `segment` and `position`.

    Attributes:
        compute_dtype: What activations and products are in; parameters stay float32, sums accumulate in float32.
        z_loss: Weight of the squared log-partition in the loss.
        pipeline: How a stage axis of the mesh is used.
        context_attention: How rows that are split over the context axis attend: by a ring of keys and values, or by exchanging
            heads for positions (Ulysses), which needs as many key-value heads on each device as the axis has devices. auto takes
            the latter where it can.
    """

    model: DecoderConfig
    compute_dtype: ComputeType = "float32"
    remat: RematPolicy = "none"
    z_loss: float = 0.0
    pipeline: Pipeline = Pipeline()  # noqa: RUF009
    context_attention: ContextAttention = "auto"

    mesh_axes = frozenset(MESH_AXES)
    names_axes = True
    remat_policies = get_args(RematPolicy)

    @property
    def weight_dtype(self) -> Any:
        return jnp.dtype(self.compute_dtype)

    def adapted(self, facts: DataFacts) -> "DecoderTask":
        model, tokens = self.model, facts.vocab_size
        if tokens is not None:
            if not model.vocab_size:
                model = dataclasses.replace(model, vocab_size=tokens)
            elif model.vocab_size < tokens:
                raise RecipeError(
                    f"task.model.vocab_size={model.vocab_size} is less than the tokenizer's {tokens}; raise it, or set it to 0 "
                    f"to take the tokenizer's"
                )
        if not model.vocab_size:
            raise RecipeError("task.model.vocab_size=0 takes the tokenizer's, and the data has none; give a number")
        if facts.sequence_length is not None and facts.sequence_length > model.max_length:
            raise RecipeError(_too_long(facts.sequence_length, model.max_length))
        return dataclasses.replace(self, model=model)

    def layers_rest_on_stages(self, stages: int) -> bool:
        return layers_rest_on_stages(self.model, self.pipeline.chunks, stages)

    @property
    def pipeline_layers(self) -> tuple[int, int]:
        return len(units(self.model)), self.pipeline.chunks

    @property
    def exchanged_heads(self) -> int | None:
        return self.model.heads if self.context_attention == "ulysses" else None

    def watch(self) -> ExpertWatch | None:
        return ExpertWatch(self.model.mixture_layers) if self.model.mixture_layers else None

    def flops_per_token(self, length: int) -> float:
        return training_flops_per_token(self.model, length)

    def rematerialised(self, policy: str) -> "DecoderTask":
        return dataclasses.replace(self, remat=policy)  # pyright: ignore[reportArgumentType]

    def for_debugging(self) -> "DecoderTask":
        return dataclasses.replace(self, remat="none")

    def init(self, key: jax.Array) -> tuple[Decoder, dict[str, Any]]:
        return Decoder.build(key, self.model), self._first_state()

    def _first_state(self) -> dict[str, Any]:
        """Of the routers of all mixture layers, where experts are chosen by a bias besides their scores."""
        moe = self.model.feed_forward
        if moe is None or not moe.selection_bias or not self.model.mixture_layers:
            return {}
        return {"router_bias": jnp.zeros((len(self.model.mixture_layers), moe.experts), jnp.float32)}

    def parameter_axes(self, params: Decoder) -> Any:
        return logical_axes(params)

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        weights = {"cross_entropy": micro_batches["loss_mask"].sum()}
        moe = self.model.feed_forward
        if moe is None or not self.model.mixture_layers:
            return weights
        return weights | router_weights(moe, self.count(micro_batches))

    def loss(self, params: Decoder, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        if axis_size("stage") > 1:
            return decoder_pipeline.evaluation(self, params, state, batch, key, train)
        remat = self.remat if train else "none"
        context, bias = self.context(batch, key, train), state.get("router_bias")
        hidden, terms = params(batch["tokens"], context, dtype=self.weight_dtype, remat=remat, router_bias=bias)
        losses, metrics = self.measured(params, hidden, batch["targets"], batch["loss_mask"], train)
        of_routers = self.measured_routers(terms, self.count(batch), train)
        return Evaluation({**losses, **of_routers[0]}, state, {**metrics, **of_routers[1]})

    def gradients(self, params: Decoder, state: Any, micro_batches: Batch, key: jax.Array, trainable: Any) -> Gradients:
        if axis_size("stage") > 1:
            found = decoder_pipeline.gradients(self, params, state, micro_batches, key, trainable)
        else:
            found = accumulated(self, params, state, micro_batches, key, trainable)
        return found._replace(state=self._rebalanced(state, found.metrics))

    def _rebalanced(self, state: Any, metrics: Metrics) -> Any:
        """The selection biases, moved by the load of the whole step (arXiv:2408.15664)."""
        moe = self.model.feed_forward
        if moe is None or "router_bias" not in state:
            return state
        load: Any = over_tokens(metrics["experts/load"])
        short = jnp.sign(load.value.mean(axis=-1, keepdims=True) - load.value)
        return state | {"router_bias": state["router_bias"] + moe.bias_rate * short}

    def measured(
        self, params: Decoder, hidden: jax.Array, targets: jax.Array, mask: jax.Array, train: bool
    ) -> tuple[Losses, Metrics]:
        """The losses and metrics of final hidden states."""
        sums = token_loss(
            hidden,
            params.output_table,
            targets,
            mask,
            soft_cap=self.model.logit_soft_cap,
            z_loss=self.z_loss if train else 0.0,
            vocab_size=None if self.model.vocab_size == self.model.vocab_rows else self.model.vocab_size,
        )
        weight = mask.sum()
        losses = {"cross_entropy": Loss(sums.loss, weight)}
        return losses, {"accuracy": Mean(sums.correct, weight), "tokens": Sum(weight)}

    @staticmethod
    def count(batch: Batch) -> jax.Array:
        """Tokens on this device, padding left out."""
        segment = batch.get("segment")
        return jnp.float32(batch["tokens"].size) if segment is None else (segment != 0).sum(dtype=jnp.float32)

    def measured_routers(self, terms: RouterTerms | None, tokens: jax.Array, train: bool) -> tuple[Losses, Metrics]:
        """What the mixture layers' routers add; losses in training only.

        Args:
            tokens: The losses' weights.
        """
        moe = self.model.feed_forward
        if moe is None or terms is None:
            return {}, {}
        losses, metrics = router_measures(moe, terms, tokens)
        return (losses if train else {}), metrics

    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        """What every layer shares of a (micro-)batch."""
        tokens = batch["tokens"]
        length = tokens.shape[1] * axis_size("context")
        if length > self.model.max_length:
            raise RecipeError(_too_long(length, self.model.max_length))
        position = batch.get("position")
        if position is None:
            place = sequence_places(tokens.shape[1], context=axis_size("context"))
            position = jnp.broadcast_to(place[None], tokens.shape)
        parts, tensor = axis_size("context"), axis_size("tensor")
        place = sequence_places(tokens.shape[1] // tensor, context=parts, tensor=tensor)
        moe, segment = self.model.feed_forward, batch.get("segment")
        drawn = train and (self.model.dropout > 0 or (moe is not None and moe.jitter > 0))
        return Context(
            position,
            segment,
            batch["row"],
            key if drawn else None,
            place,
            self.context_attention,
            valid=None if segment is None or moe is None else own_sequence(segment != 0),
            train=train,
        )


def _too_long(length: int, most: int) -> str:
    return (
        f"the data's rows are {length} tokens long, the model is for at most {most}; shorten data.sequence_length, or raise "
        f"task.model.max_length"
    )
