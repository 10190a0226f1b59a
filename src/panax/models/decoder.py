"""The decoder: embed, run the stacked layers, normalise."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key

from ..core import Module, dropout, normal, scope, stack, stacked
from ..layers import (
    Attention,
    Cache,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    LatentCache,
    MixtureOfExperts,
    Norm,
    PositionEmbedding,
    RouterTerms,
    Tokens,
)
from ..layers.embedding import padded
from ..parallel import ContextAttention, RematPolicy, rematerialise, scan_layers
from .decoder_config import DecoderConfig, LayerKind

AnyCache = Cache | LatentCache
"""What a layer keeps of the positions seen so far, for generation."""


class Context(NamedTuple):
    """What every layer of one pass shares.

    Attributes:
        position: Of each token in its document.
        segment: Which packed document each token belongs to; 0 is padding, None is one document a row.
        row: Each row's index in the global batch.
        key: None when nothing is drawn: neither dropout nor jitter.
        place: Index in its whole row of each position of the residual stream; 0, 1, 2, ... unless told.
        attention: How rows that are split over the context axis attend.
        valid: False for padding, of each position of the residual stream; None where there is none.
        train: Whether routers draw their jitter.
    """

    position: Int[Array, "batch seq"]
    segment: Int[Array, "batch seq"] | None = None
    row: Int[Array, " batch"] | None = None
    key: Key[Array, ""] | None = None
    place: Int[Array, " residual"] | None = None
    attention: ContextAttention = "auto"
    valid: Bool[Array, "batch residual"] | None = None
    train: bool = False


class Block(Module):
    """One layer: attention, then the feed-forward, each normalised before (and after, where asked for) and added."""

    attention_norm: Norm
    attention: Attention | LatentAttention
    attention_post_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward | MixtureOfExperts
    feed_forward_post_norm: Norm | None
    dropout: float = eqx.field(static=True)

    @classmethod
    def build(cls, key: jax.Array, config: DecoderConfig, kind: LayerKind) -> "Block":
        keys = iter(jax.random.split(key, 8))
        # Each layer adds two branches; their sum keeps its scale at any depth (GPT-2, section 2.3).
        output_gain = (2 * config.num_layers) ** -0.5
        norm = functools.partial(
            Norm.build, kind=config.norm, epsilon=config.norm_epsilon, unit_offset=config.norm_unit_offset
        )
        attention = _attention(keys, config, kind.window, output_gain)
        widths, options = (config.embed, config.ffn), {"activation": config.activation, "output_gain": output_gain}
        if kind.mixture and config.feed_forward is not None:
            feed_forward = MixtureOfExperts.build(
                next(keys), *widths, config.feed_forward, gated=config.gated, **options
            )
        else:
            feed_forward = FeedForward.build(
                next(keys), *widths, gated=config.gated, bias=config.feed_forward_bias, **options
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
        self, x: Float[Array, "batch residual embed"], context: Context, bias: Float[Array, " router"] | None = None
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms | None]:
        """
        Args:
            bias: Of the selection of experts, in a mixture that has one.
        """
        with scope("attention"):
            branch = self.attention(self.attention_norm(x), context.position, context.segment, context.attention)
            x = self._add(x, branch, self.attention_post_norm, context, 0)
        with scope("feed_forward"):
            branch, terms = self._feed(self.feed_forward_norm(x), context, bias)
            return self._add(x, branch, self.feed_forward_post_norm, context, 1), terms

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        cache: AnyCache,
        start: Int[Array, ""],
        bias: Float[Array, " router"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], AnyCache]:
        """Run on the next tokens, with the keys and values of those before."""
        attention: Any = self.attention  # Of either kind, like its cache.
        branch, cache = attention.extend(self.attention_norm(x), position, cache, start)
        x = self._add(x, branch, self.attention_post_norm, Context(position), 0)
        branch, _ = self._feed(self.feed_forward_norm(x), Context(position), bias)
        return self._add(x, branch, self.feed_forward_post_norm, Context(position), 1), cache

    def _feed(self, x: jax.Array, context: Context, bias: jax.Array | None) -> tuple[jax.Array, RouterTerms | None]:
        if isinstance(self.feed_forward, FeedForward):
            return self.feed_forward(x), None
        key = None if context.key is None or not context.train else jax.random.fold_in(context.key, 2)
        return self.feed_forward(x, Tokens(context.valid, context.place, context.row, key, bias))

    def _add(self, x: jax.Array, branch: jax.Array, post_norm: Norm | None, context: Context, place: int) -> jax.Array:
        if post_norm is not None:
            branch = post_norm(branch)
        if context.key is not None and context.row is not None:
            key = jax.random.fold_in(context.key, place)
            branch = dropout(branch, self.dropout, key, context.row, context.place)
        return x + branch


def _attention(
    keys: Iterator[jax.Array], config: DecoderConfig, window: int, output_gain: float
) -> Attention | LatentAttention:
    scale = config.query_scale**-0.5 if config.query_scale else None
    if config.latent is not None and config.rotary is not None:
        return LatentAttention.build(
            next(keys),
            config.embed,
            config.heads,
            config.latent,
            rotary=config.rotary,
            window=window or None,
            soft_cap=config.attention_soft_cap,
            scale=scale,
            output_gain=output_gain,
        )
    norm = functools.partial(
        Norm.build,
        size=config.head_size,
        kind=config.norm,
        epsilon=config.norm_epsilon,
        unit_offset=config.norm_unit_offset,
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
    if config.rotary is not None and config.rotary.score_gain != 1.0:
        scale = (config.head_size**-0.5 if scale is None else scale) * config.rotary.score_gain
    return Attention.create(
        next(keys),
        sizes,
        w_o=normal("heads", "head_dim", gain=output_gain),
        q_norm=norm(next(keys)) if config.qk_norm else None,
        k_norm=norm(next(keys)) if config.qk_norm else None,
        rotary=config.rotary,
        window=window or None,
        clip=config.attention_clip,
        soft_cap=config.attention_soft_cap,
        scale=scale,
        **absent,
    )


class Stack(Module):
    """Layers of one repeating period, stored stacked along `layer` and run by a scan."""

    first: int = eqx.field(static=True)
    repeats: int = eqx.field(static=True)
    blocks: tuple[Block, ...] = stacked("layer")

    def __call__(
        self,
        x: Float[Array, "batch residual embed"],
        context: Context,
        remat: RematPolicy,
        bias: Float[Array, "mixture router"] | None = None,
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms | None]:
        """
        Args:
            bias: Of this stack's mixtures, where they have one.

        Returns:
            The residual stream, and what the routers of its mixtures found, with a leading axis of these; None without any.
        """
        period = len(self.blocks)

        def one_block(
            x: jax.Array, block: Block, index: jax.Array, bias: jax.Array | None
        ) -> tuple[jax.Array, RouterTerms | None]:
            key = None if context.key is None else jax.random.fold_in(context.key, index)
            return block(x, context._replace(key=key), bias)

        run = rematerialise(one_block, remat)

        def one_period(x: jax.Array, scanned: tuple) -> tuple[jax.Array, list[RouterTerms]]:
            blocks, repeat, biases = scanned
            found = []
            for place, block in enumerate(blocks):
                index = self.first + repeat * period + place
                # The debugger runs layer by layer and knows which one it is in; a compiled scan is all of them at once.
                with scope(f"layers.{'*' if isinstance(index, Tracer) else int(index)}"):
                    x, terms = run(x, block, index, biases[place])
                found += [] if terms is None else [terms]
            return x, found

        x, found = scan_layers(one_period, x, (self.blocks, jnp.arange(self.repeats), self._biases(bias)))
        if not found:
            return x, None
        return x, jax.tree.map(lambda *places: _interleaved(places), *found)

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        caches: tuple[AnyCache, ...],
        start: Int[Array, ""],
        bias: Float[Array, "mixture router"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], tuple[AnyCache, ...]]:
        """As `Block.extend`; the caches are stacked like the layers."""

        def one_period(x: jax.Array, scanned: tuple) -> tuple[jax.Array, tuple[AnyCache, ...]]:
            blocks, caches, biases = scanned
            new = []
            for block, cache, bias in zip(blocks, caches, biases):
                x, cache = block.extend(x, position, cache, start, bias)
                new.append(cache)
            return x, tuple(new)

        return jax.lax.scan(one_period, x, (self.blocks, caches, self._biases(bias)))

    @property
    def mixtures(self) -> int:
        """How many of its layers are mixtures of experts."""
        return self.repeats * sum(isinstance(block.feed_forward, MixtureOfExperts) for block in self.blocks)

    def _biases(self, bias: jax.Array | None) -> tuple[jax.Array | None, ...]:
        """For each place in the period, its layers' biases."""
        mixed = [isinstance(block.feed_forward, MixtureOfExperts) for block in self.blocks]
        places = [sum(mixed[:place]) if is_mixture else None for place, is_mixture in enumerate(mixed)]
        return tuple(None if bias is None or place is None else bias[place :: sum(mixed)] for place in places)


def _interleaved(places: tuple[jax.Array, ...]) -> jax.Array:
    """What each place in a period found in each repeat, in the order of the layers."""
    return jnp.stack(places, axis=1).reshape(-1, *places[0].shape[1:])


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
                    functools.partial(Block.build, config=config, kind=kind),
                )
                for place, kind in enumerate(period)
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
        self,
        tokens: Int[Array, "batch seq"],
        context: Context,
        *,
        dtype: Any,
        remat: RematPolicy = "none",
        router_bias: Float[Array, "mixture router"] | None = None,
    ) -> tuple[Float[Array, "batch residual embed"], RouterTerms | None]:
        """The final hidden states, in `dtype`, and what the routers found, with a leading axis of mixture layers."""
        x, found = self.enter(tokens, context, dtype), []
        for stack_, bias in zip(self.stacks, self.biases(router_bias)):
            x, terms = stack_(x, context, remat, bias)
            found += [] if terms is None else [terms]
        with scope("final_norm"):
            hidden = self.final_norm(x)
        return hidden, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found) if found else None

    def biases(self, router_bias: Float[Array, "mixture router"] | None) -> list[jax.Array | None]:
        """Each stack's part of what all mixture layers have."""
        if router_bias is None:
            return [None] * len(self.stacks)
        ends = list(itertools.accumulate(stack_.mixtures for stack_ in self.stacks))
        return [router_bias[end - stack_.mixtures : end] for stack_, end in zip(self.stacks, ends)]

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
