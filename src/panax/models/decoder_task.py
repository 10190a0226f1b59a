"""The decoder as a `Task`: next-token prediction on packed documents."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..core import Batch, Evaluation, Loss, Mean, Sum, Task, logical_axes
from ..core.errors import DataError
from ..layers import token_loss
from ..parallel import RematPolicy
from .decoder import Context, Decoder
from .decoder_config import DecoderConfig

ComputeType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderTask(Task):
    """Train a decoder on batches with the leaves `tokens`, `targets`, `loss_mask` and, if packed, `segment` and `position`.

    Attributes:
        compute_dtype: What activations and products are in; parameters stay float32, sums accumulate in float32.
        z_loss: Weight of the squared log-partition in the loss.
    """

    config: DecoderConfig
    compute_dtype: ComputeType = "float32"
    remat: RematPolicy = "none"
    z_loss: float = 0.0

    def init(self, key: jax.Array) -> tuple[Decoder, dict[str, Any]]:
        return Decoder.build(key, self.config), {}

    def parameter_axes(self, params: Decoder) -> Any:
        return logical_axes(params)

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, jax.Array]:
        return {"cross_entropy": micro_batches["loss_mask"].sum()}

    def loss(self, params: Decoder, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        tokens, mask = batch["tokens"], batch["loss_mask"]
        context = self._context(batch, key if train and self.config.dropout > 0 else None)
        hidden = params(tokens, context, dtype=jnp.dtype(self.compute_dtype), remat=self.remat if train else "none")
        sums = token_loss(
            hidden,
            params.output_table,
            batch["targets"],
            mask,
            soft_cap=self.config.logit_soft_cap,
            z_loss=self.z_loss if train else 0.0,
        )
        weight = mask.sum()
        return Evaluation(
            losses={"cross_entropy": Loss(sums.loss, weight)},
            state=state,
            metrics={"accuracy": Mean(sums.correct, weight), "tokens": Sum(weight)},
        )

    def _context(self, batch: Batch, key: jax.Array | None) -> Context:
        tokens = batch["tokens"]
        if tokens.shape[1] > self.config.max_length:
            raise DataError(
                f"the batch's rows are {tokens.shape[1]} tokens long, the model is for at most {self.config.max_length}; shorten "
                f"data.sequence_length or raise model.max_length"
            )
        position = batch.get("position")
        if position is None:
            # Added to the tokens' own zeros, so that it is laid out as they are.
            position = jnp.zeros_like(tokens) + jnp.arange(tokens.shape[1], dtype=tokens.dtype)[None]
        return Context(position, batch.get("segment"), batch["row"], key)
