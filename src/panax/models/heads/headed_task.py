"""`HeadedTask`: a decoder without its output head, with hidden states that are pooled into one vector for each text."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...core import Axes, Batch, DataFacts, Module
from ...core.batch_checks import LeafRange, id_range
from ...core.errors import RecipeError
from ...core.measures import Losses, Metrics
from ...core.task import MatmulPrecision
from ...core.validation import Validated
from ...layers import Context, Stack, StagedTask
from ...layers.stages.staged_task import FloatType, UnscaledType
from ...parallel import Pipeline, RematPolicy
from ..decoder.config import DecoderConfig
from ..decoder.model import Decoder
from ..decoder.task import DecoderTask
from ..leaf_names import LEAF_ALIASES
from ..vision.vit import ClassHead
from .pooling import Pooling, pooling_weights


class HeadedDecoder(Module):
    """A decoder without its output head, and a head on its pooled hidden states.

    Attributes:
        head: None if the pooled vectors are the result.
    """

    decoder: Decoder
    head: ClassHead | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadedTask(Validated, StagedTask):
    """Base of tasks on pooled texts: one text in each row, padded anywhere.

    Batches have `tokens`, and `segment`, which is 0 for padding and 1 otherwise; without `segment` all
    positions count.

    Attributes:
        model: The decoder; its output head, if it has one, is not used.
        pooling: Positions of a text that its vector is taken from.
        compute_dtype: Dtype of activations and matmuls; pooled vectors are in float32.
    """

    model: DecoderConfig
    pooling: Pooling = "last"
    compute_dtype: UnscaledType = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    parameter_dtype: FloatType = "float32"
    matmul_precision: MatmulPrecision | None = None
    remat: RematPolicy = "none"
    pipeline: Pipeline = Pipeline()  # noqa: RUF009

    splits_residual = False
    leaf_aliases = LEAF_ALIASES

    def __post_init__(self) -> None:
        self.check_precision()

    @property
    def mesh_axes(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # A text's positions meet in its vector, so each device has whole rows; a mixture splits columns of experts only where
        # the residual stream is split too.
        return frozenset({"replica", "fsdp", "expert"}) | (frozenset() if self.model.mixture_layers else {"tensor"})

    @property
    def decoder_task(self) -> DecoderTask:
        """The decoder alone, as a task."""
        return DecoderTask(
            model=dataclasses.replace(self.model, tied=True),
            compute_dtype=self.compute_dtype,
            parameter_dtype=self.parameter_dtype,
            matmul_precision=self.matmul_precision,
        )

    @abc.abstractmethod
    def build_head(self, key: jax.Array) -> ClassHead | None:
        """Initialize the head."""

    @property
    def text_leaves(self) -> tuple[tuple[str, str], ...]:
        """Names of each text's tokens and of its segments, in a batch."""
        return (("tokens", "segment"),)

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        ids = id_range(self.model.vocab_size, advice="raise task.model.vocab_size")
        ranges = {tokens: ids for tokens, _ in self.text_leaves}
        return ranges | {segment: LeafRange(0, 1, integral=True) for _, segment in self.text_leaves}

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset(tokens for tokens, _ in self.text_leaves)

    @property
    def batch_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        leaves = [name for pair in self.text_leaves for name in pair]
        return {**dict.fromkeys(leaves, ("batch", "seq")), "loss_mask": ("batch",)}

    def adapt_to_data(self, facts: DataFacts) -> "HeadedTask":
        return dataclasses.replace(self, model=self.decoder_task.adapt_to_data(facts).model)

    def init(self, key: jax.Array) -> tuple[HeadedDecoder, dict[str, Any]]:
        decoder_key, head_key = jax.random.split(key)
        decoder, state = self.decoder_task.init(decoder_key)
        head = self.build_head(head_key)
        return HeadedDecoder(decoder, None if head is None else self.cast_to_storage(head)), state

    def stacks(self, params: HeadedDecoder) -> tuple[Stack, ...]:
        return params.decoder.stacks

    def with_stacks(self, params: HeadedDecoder, stacks: tuple[Stack, ...]) -> HeadedDecoder:
        return dataclasses.replace(params, decoder=dataclasses.replace(params.decoder, stacks=stacks))

    def valid(self, batch: Batch) -> Bool[Array, "texts seq"]:
        """Return a mask of all texts of a batch, False for padding; rows are ordered as in `text_leaves`."""
        return jnp.concatenate(
            [
                jnp.ones(batch[tokens].shape, bool) if segment not in batch else batch[segment] != 0
                for tokens, segment in self.text_leaves
            ]
        )

    def context(self, batch: Batch, key: jax.Array, train: bool) -> Context:
        valid, texts = self.valid(batch), len(self.text_leaves)
        length = valid.shape[1]
        if length > self.model.max_length:
            raise RecipeError(
                f"the data's rows are {length} tokens long, the model is for at most {self.model.max_length}; shorten the texts, "
                f"or raise task.model.max_length"
            )
        moe = self.model.feed_forward
        drawn = train and (self.model.dropout > 0 or (moe is not None and moe.jitter > 0))
        # Rows of the second kind of text have numbers of their own.
        rows = jnp.concatenate([texts * batch["row"] + kind for kind in range(texts)])
        place = jnp.arange(length, dtype=jnp.int32)
        return Context(
            jnp.broadcast_to(place[None], valid.shape),
            valid.astype(jnp.int32),
            rows,
            key if drawn else None,
            place,
            valid=None if moe is None else valid,
            train=train,
        )

    def enter(self, params: HeadedDecoder, batch: Batch, context: Context) -> Float[Array, "texts residual embed"]:
        tokens = jnp.concatenate([batch[name] for name, _ in self.text_leaves])
        return params.decoder.enter(tokens, context, self.weight_dtype)

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        mask = batch.get("loss_mask", jnp.ones(batch["row"].shape, jnp.float32))
        return {"loss_mask": mask, "pooling": pooling_weights(self.valid(batch), self.pooling)}

    def layer_state(self, state: Any) -> Any:
        return self.decoder_task.layer_state(state)

    def update_state(self, state: Any, metrics: Metrics) -> Any:
        return self.decoder_task.update_state(state, metrics)

    def count_tokens(self, batch: Batch) -> Float[Array, ""]:
        return self.valid(batch).sum(dtype=jnp.float32)

    def layer_metrics(self, reports: Any, count: Float[Array, ""], train: bool) -> tuple[Losses, Metrics]:
        return self.decoder_task.layer_metrics(reports, count, train)
