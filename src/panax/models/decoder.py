"""The decoder: embed, run the stacked layers, normalise."""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from ..core import Module, dropout, normal, scope, stack, stacked
from ..layers import Attention, Cache, Embedding, FeedForward, Head, Norm, PositionEmbedding
from ..layers.embedding import padded
from ..parallel import ContextAttention, RematPolicy, rematerialise, scan_layers
from .decoder_config import DecoderConfig


class Context(NamedTuple):
    """What every layer of one pass shares.

    Attributes:
        position: Of each token in its document.
        segment: Which packed document each token belongs to; 0 is padding, None is one document a row.
        row: Each row's index in the global batch.
        key: None when nothing is to be dropped.
        place: Index in its whole row of each position of the residual stream; 0, 1, 2, ... unless told.
        attention: How rows that are split over the context axis attend.
    """

    position: Int[Array, "batch seq"]
    segment: Int[Array, "batch seq"] | None = None
    row: Int[Array, " batch"] | None = None
    key: Key[Array, ""] | None = None
    place: Int[Array, " residual"] | None = None
    attention: ContextAttention = "auto"


class Block(Module):
    """One layer: attention, then the feed-forward, each normalised before (and after, where asked for) and added."""

    attention_norm: Norm
    attention: Attention
    attention_post_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward
    feed_forward_post_norm: Norm | None
    dropout: float = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: DecoderConfig, window: int) -> "Block":
        keys = iter(jax.random.split(key, 8))
        # Each layer adds two branches; their sum keeps its scale at any depth (GPT-2, section 2.3).
        output_gain = (2 * config.num_layers) ** -0.5
        norm = functools.partial(
            Norm.build, kind=config.norm, epsilon=config.norm_epsilon, unit_offset=config.norm_unit_offset
        )
        sizes = {
            "embed": config.embed,
            "norm": config.embed,
            "heads": config.heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_size,
        }
        absent = {} if config.attention_bias else {"b_q": None, "b_k": None, "b_v": None}
        absent |= {} if config.attention_output_bias else {"b_o": None}
        attention = Attention.create(
            next(keys),
            sizes,
            w_o=normal("heads", "head_dim", gain=output_gain),
            q_norm=norm(next(keys), config.head_size) if config.qk_norm else None,
            k_norm=norm(next(keys), config.head_size) if config.qk_norm else None,
            rotary=config.rotary,
            window=window or None,
            soft_cap=config.attention_soft_cap,
            scale=config.query_scale**-0.5 if config.query_scale else None,
            **absent,
        )
        feed_forward = FeedForward.build(
            next(keys),
            config.embed,
            config.ffn,
            gated=config.gated,
            bias=config.feed_forward_bias,
            activation=config.activation,
            output_gain=output_gain,
        )
        return cls(
            attention_norm=norm(next(keys), config.embed),
            attention=attention,
            attention_post_norm=norm(next(keys), config.embed) if config.post_norms else None,
            feed_forward_norm=norm(next(keys), config.embed),
            feed_forward=feed_forward,
            feed_forward_post_norm=norm(next(keys), config.embed) if config.post_norms else None,
            dropout=config.dropout,
        )

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context
    ) -> Float[Array, "batch residual embed"]:
        with scope("attention"):
            branch = self.attention(self.attention_norm(x), context.position, context.segment, context.attention)
            x = self._add(x, branch, self.attention_post_norm, context, 0)
        with scope("feed_forward"):
            branch = self.feed_forward(self.feed_forward_norm(x))
            return self._add(x, branch, self.feed_forward_post_norm, context, 1)

    def extend(
        self, x: Float[Array, "batch seq embed"], position: Int[Array, "batch seq"], cache: Cache, start: Int[Array, ""]
    ) -> tuple[Float[Array, "batch seq embed"], Cache]:
        """Run on the next tokens, with the keys and values of those before."""
        branch, cache = self.attention.extend(self.attention_norm(x), position, cache, start)
        x = self._add(x, branch, self.attention_post_norm, Context(position), 0)
        branch = self.feed_forward(self.feed_forward_norm(x))
        return self._add(x, branch, self.feed_forward_post_norm, Context(position), 1), cache

    def _add(self, x: jax.Array, branch: jax.Array, post_norm: Norm | None, context: Context, place: int) -> jax.Array:
        if post_norm is not None:
            branch = post_norm(branch)
        if context.key is not None and context.row is not None:
            key = jax.random.fold_in(context.key, place)
            branch = dropout(branch, self.dropout, key, context.row, context.place)
        return x + branch


class Stack(Module):
    """Layers of one repeating period, stored stacked along `layer` and run by a scan."""

    first: int = eqx.field(static=True)
    repeats: int = eqx.field(static=True)
    blocks: tuple[Block, ...] = stacked("layer")

    def __call__(
        self, x: Float[Array, "batch residual embed"], context: Context, remat: RematPolicy
    ) -> Float[Array, "batch residual embed"]:
        period = len(self.blocks)

        def one_block(x: jax.Array, block: Block, index: jax.Array) -> jax.Array:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            return block(x, context._replace(key=key))

        run = rematerialise(one_block, remat)

        def one_period(x: jax.Array, scanned: tuple[tuple[Block, ...], jax.Array]) -> jax.Array:
            blocks, repeat = scanned
            for place, block in enumerate(blocks):
                index = self.first + repeat * period + place
                # The debugger runs layer by layer and knows which one it is in; a compiled scan is all of them at once.
                with scope(f"layers.{'*' if isinstance(index, Tracer) else int(index)}"):
                    x = run(x, block, index)
            return x

        return scan_layers(one_period, x, (self.blocks, jnp.arange(self.repeats)))

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        caches: tuple[Cache, ...],
        start: Int[Array, ""],
    ) -> tuple[Float[Array, "batch seq embed"], tuple[Cache, ...]]:
        """As `Block.extend`; the caches are stacked like the layers."""

        def one_period(x: jax.Array, scanned: tuple) -> tuple[jax.Array, tuple[Cache, ...]]:
            blocks, caches = scanned
            new = []
            for block, cache in zip(blocks, caches):
                x, cache = block.extend(x, position, cache, start)
                new.append(cache)
            return x, tuple(new)

        return jax.lax.scan(one_period, x, (self.blocks, caches))


class Decoder(Module):
    """From tokens to the normalised residual stream; the head is applied by the loss, a few tokens at a time."""

    embedding: Embedding
    positions: PositionEmbedding | None
    stacks: tuple[Stack, ...]
    final_norm: Norm
    head: Head | None
    config: DecoderConfig = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: DecoderConfig) -> "Decoder":
        """Draw all parameters.

        >>> from panax.models import DecoderConfig
        >>> model = jax.eval_shape(lambda key: Decoder.build(key, DecoderConfig(vocab_size=100)), jax.random.key(0))
        >>> model.stacks[0].blocks[0].feed_forward.w_up.shape
        (4, 256, 1024)
        """
        embedding_key, position_key, head_key, layer_key = jax.random.split(key, 4)
        sizes = {"vocab": config.vocab_rows, "embed": config.embed, "position": config.max_length}
        stacks, first = [], 0
        for period, repeats in config.stacks:
            stack_key = jax.random.fold_in(layer_key, first)
            blocks = tuple(
                stack(
                    jax.random.fold_in(stack_key, place),
                    repeats,
                    functools.partial(Block.build, config=config, window=window),
                )
                for place, window in enumerate(period)
            )
            stacks.append(Stack(blocks=blocks, first=first, repeats=repeats))
            first += repeats * len(period)
        return cls(
            embedding=Embedding.create(embedding_key, sizes, table=padded(normal(std=0.02), config.vocab_size)),
            positions=None if config.rotary is not None else PositionEmbedding.create(position_key, sizes),
            stacks=tuple(stacks),
            final_norm=Norm.build(
                key,
                config.embed,
                kind=config.norm,
                epsilon=config.norm_epsilon,
                unit_offset=config.norm_unit_offset,
            ),
            head=None
            if config.tied
            else Head.create(head_key, sizes, table=padded(normal("embed"), config.vocab_size)),
            config=config,
        )

    def __call__(
        self, tokens: Int[Array, "batch seq"], context: Context, *, dtype: Any, remat: RematPolicy = "none"
    ) -> Float[Array, "batch residual embed"]:
        """The final hidden states, in `dtype`."""
        x = self.enter(tokens, context, dtype)
        for stack_ in self.stacks:
            x = stack_(x, context, remat)
        with scope("final_norm"):
            return self.final_norm(x)

    def enter(
        self, tokens: Int[Array, "batch seq"], context: Context, dtype: Any
    ) -> Float[Array, "batch residual embed"]:
        """What the first layer reads."""
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
            return x if self.positions is None else x + self.positions(position, dtype)

    @property
    def output_table(self) -> Any:
        """The head's parameter, `vocab embed`: its own, or the embedding's."""
        return self.embedding.table if self.head is None else self.head.table
