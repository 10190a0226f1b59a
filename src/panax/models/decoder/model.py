"""The decoder: embed, run the stacked layers, normalize."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Module, dropout, normal, scope
from ...kernels.product import materialize
from ...layers import Context, Embedding, Head, Norm, PositionEmbedding, Stack, build_stacks, run_stacks
from ...layers.embedding import init_padded
from ...layers.moe.routing import RouterState
from ...parallel import RematPolicy
from ..value_head import ValueHead
from .config import DecoderConfig


class Decoder(Module):
    """A transformer decoder, from tokens to the normalized residual stream.

    The loss applies the heads, that of the vocabulary to a chunk of tokens at a time.

    Attributes:
        value_head: Values of actions, for objectives that train them.
        embedding_norm: Norm of the embeddings; None for none.
    """

    embedding: Embedding
    positions: PositionEmbedding | None
    stacks: tuple[Stack, ...]
    final_norm: Norm
    head: Head | None
    config: DecoderConfig = eqx.field(static=True)
    value_head: ValueHead | None = None
    embedding_norm: Norm | None = None

    @classmethod
    def build(cls, key: jax.Array, config: DecoderConfig) -> "Decoder":
        """Initialize all parameters.

        >>> from panax.models import DecoderConfig
        >>> model = jax.eval_shape(lambda key: Decoder.build(key, DecoderConfig(vocab_size=100)), jax.random.key(0))
        >>> model.stacks[0].blocks[0].feed_forward.w_up.shape
        (4, 256, 1024)
        """
        embedding_key, position_key, head_key, layer_key = jax.random.split(key, 4)
        norm = functools.partial(
            Norm.build,
            key,
            config.embed,
            kind=config.norm,
            epsilon=config.norm_epsilon,
            unit_offset=config.norm_unit_offset,
        )
        sizes = {
            "vocab": config.vocab_rows,
            "embed": config.embed,
            "position": config.max_length + config.position_offset,
        }
        return cls(
            embedding=Embedding.create(embedding_key, sizes, table=init_padded(normal(std=0.02), config.vocab_size)),
            positions=PositionEmbedding.create(position_key, sizes) if config.learned_positions else None,
            stacks=build_stacks(layer_key, config.stacks, config.block),
            final_norm=norm(),
            embedding_norm=norm() if config.embed_norm else None,
            head=None
            if config.tied
            else Head.create(head_key, sizes, table=init_padded(normal("embed"), config.vocab_size)),
            config=config,
        )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        context: Context,
        *,
        dtype: Any,
        remat: RematPolicy = "none",
        state: Any = None,
    ) -> tuple[Float[Array, "batch residual embed"], Any]:
        """Return the final hidden states, in `dtype`, and the layers' auxiliary outputs.

        Args:
            state: Inputs of the mixture layers beside the residual stream (`layer_state`), stacked along a leading layer axis.
        """
        x, reports = run_stacks(self.stacks, self.enter(tokens, context, dtype), context, remat, state)
        return self.normalize(x), reports

    def normalize(self, x: Float[Array, "batch residual embed"]) -> Float[Array, "batch residual embed"]:
        """Apply the final norm, and the logits' multiplier; the result is the head's input."""
        with scope("final_norm"):
            return self.final_norm(x, self.config.logit_multiplier)

    def enter(
        self, tokens: Int[Array, "batch seq"], context: Context, dtype: Any
    ) -> Float[Array, "batch residual embed"]:
        """Embed the tokens and apply dropout; the result is the first layer's input."""
        x = self.embed(tokens, context.position, dtype)
        if context.key is None or context.row is None:
            return x
        key = jax.random.fold_in(context.key, self.config.num_layers)
        return dropout(x, self.config.dropout, key, context.row, context.place)

    def embed(
        self, tokens: Int[Array, "batch seq"], position: Int[Array, "batch seq"], dtype: Any
    ) -> Float[Array, "batch residual embed"]:
        with scope("embedding"):
            x = self.embedding(tokens, dtype)
            if self.config.embed_scale:
                # Rounded to the compute dtype first, as the released weights were trained with.
                x = x * jnp.asarray(math.sqrt(self.config.embed), dtype)
            if self.config.embed_multiplier != 1.0:
                x = (x.astype(jnp.float32) * self.config.embed_multiplier).astype(dtype)
            if self.embedding_norm is not None:
                x = self.embedding_norm(x)
            if self.positions is None:
                return materialize(x)
            offset = self.config.position_offset
            return materialize(x + self.positions(position + offset if offset else position, dtype))

    @property
    def output_table(self) -> Any:
        """The output matrix, `vocab embed`: the head's, or the embedding's if tied."""
        return self.embedding.table if self.head is None else self.head.table


def layer_state(state: Mapping[str, Any]) -> RouterState | None:
    """Return the mixture layers' part of a task's model state: their selection biases, or None without
    them.
    """
    bias = state.get("router_bias")
    return None if bias is None else RouterState(bias)
