"""The decoder's config; GPT-2, Llama 3, Gemma 2, Mixtral and DeepSeek-V3 differ only in its values."""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax

from ...core.errors import RecipeError
from ...core.validation import Validated
from ...layers.attention.alibi import MOST_POSITIONS
from ...layers.attention.attention import QKNormScope
from ...layers.attention.latent_attention import Latent
from ...layers.attention.rotary import Rotary
from ...layers.block import Block
from ...layers.feed_forward import Activation, GateClamp
from ...layers.moe.moe_config import MoE
from ...layers.norm import NormKind
from .blocks import build_transformer_block


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """Heads of one kind of layers; a 0 takes the decoder's setting of that name.

    Attributes:
        heads: Number of query heads.
        kv_heads: Number of key-value heads; 0 for `heads` if that is set here.
        head_dim: Width of a head.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0


class LayerKind(NamedTuple):
    """The properties that may differ between the layers of one decoder.

    Attributes:
        window: Size of the sliding attention window; 0 for none.
        mixture: True if the feed-forward is a mixture of experts.
        rotary: Rotary embedding of its attention; None if it has none.
        mixer: The layer that mixes positions; configs with other mixers than attention name them here.
        heads: Heads of its attention, all of them above 0; None for the decoder's.
    """

    window: int
    mixture: bool
    rotary: Rotary | None = None
    mixer: str = "attention"
    heads: HeadSizes | None = None


_WITH_LATENT = {
    "kv_heads": 0,
    "head_dim": 0,
    "head_sizes": (),
    "qk_norm": False,
    "qk_norm_scope": "head",
    "qk_norm_layers": "all",
    "qk_norm_after_rotary": False,
    "window_kind": "sliding",
    "attention_bias": False,
    "attention_output_bias": False,
    "attention_sinks": False,
    "attention_clip": None,
    "attention_gate": False,
}
"""Fields that latent attention does not use, with the values they must keep."""


def require(holds: bool, message: str) -> None:
    """Raise a RecipeError with `message` if the condition does not hold."""
    if not holds:
        raise RecipeError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(Validated):
    """A transformer decoder.

    Attributes:
        vocab_size: Number of tokens; 0 takes the tokenizer's.
        vocab_multiple: The embedding and the head are padded to a multiple of this many rows, so that any
            usual tensor axis divides them. The rows past `vocab_size` are never read, get probability 0, and
            are not exported.
        max_length: Longest sequence the model accepts; also the number of learned positions, if it has them.
        embed: Width of the residual stream.
        kv_heads: Number of key-value heads; 0 for the number of query heads.
        head_dim: Width of a head; 0 for `embed / heads`.
        head_sizes: Heads in place of `heads`, `kv_heads` and `head_dim`, cycled over the layers like `windows`.
        latent: Attend with keys and values projected up from a latent; its widths replace `kv_heads` and
            `head_dim`.
        ffn: Width of the feed-forward layer.
        feed_forward: A mixture of experts, in all layers or some; None for dense layers.
        windows: Sliding windows, cycled over the layers; 0 attends to all earlier positions. (4096, 0)
            alternates.
        position_offset: First row of the table of learned positions that is read; those before it are never (OPT).
        window_kind: "chunked" cuts each document into chunks of the window's length, and a position attends to those of its
            own chunk only (Llama 4).
        rotary: None for learned positions, or with `alibi_slopes`.
        alibi_slopes: Slope of each head, by which scores grow with a key's position, in place of other positions (BLOOM).
        embed_norm: Normalize embeddings (BLOOM).
        rotaries: Rotary embeddings in place of `rotary`, cycled over the layers like `windows`; None for a
            layer without positions.
        gate_clamp: Bounds of gated feed-forwards, in place of their activation (gpt-oss).
        attention_sinks: Each head has a learned score that takes part in every softmax without a value (gpt-oss).
        norm: Kind of norm. Layer norms have a bias unless the kind is unbiased; an unscaled one has no
            parameters.
        pre_norms: Normalize each sub-layer's input. Without, `post_norms` is needed (OLMo 2).
        attention_clip: Clip queries, keys and values to ±attention_clip after their projection (DBRX).
        attention_gate: Multiply the attention's output by a sigmoid of a projection of its input, feature by feature,
            before the output projection (Qwen3-Next).
        query_scale: Scores are multiplied by `query_scale ** -0.5`; 0 takes the layer's `head_dim`.
        post_norms: Also normalize each sub-layer's output before it is added to the residual stream (Gemma
            2).
        parallel_residual: Attention and feed-forward have the same input, and both are added to it (GPT-NeoX).
        shared_norm: With `parallel_residual`: one norm for both (Cohere).
        qk_norm: Normalize queries and keys.
        qk_norm_scope: Scope of these norms: each head, with a scale that all share; each head with a scale of its
            own; all heads together (OLMo 2); or each head without a scale (Llama 4). Only the first is of the decoder's
            kind of norm, with its unit offset; the others are "rms", or "layer" without a bias.
        qk_norm_layers: All layers, or only those that rotate queries and keys (Llama 4).
        qk_norm_after_rotary: Normalize after the rotation instead of before (Hunyuan).
        embed_scale: Multiply embeddings by `sqrt(embed)` (Gemma).
        embed_multiplier: Embeddings are multiplied by this (Granite).
        residual_multiplier: Each sub-layer's output is multiplied by this, before it is added to the residual
            stream.
        logit_multiplier: Logits are multiplied by this, before `logit_soft_cap`.
        dropout: Dropout rate of the embedding and of each sub-layer's output.
    """

    vocab_size: int = 0
    vocab_multiple: int = 128
    max_length: int = 1024
    embed: int = 256
    num_layers: int = 4
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    head_sizes: tuple[HeadSizes, ...] = ()
    latent: Latent | None = None
    ffn: int = 1024
    feed_forward: MoE | None = None
    gated: bool = True
    activation: Activation = "silu"
    gate_clamp: GateClamp | None = None
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-6
    norm_unit_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    qk_norm: bool = False
    qk_norm_scope: QKNormScope = "head"
    qk_norm_layers: Literal["all", "rotary"] = "all"
    qk_norm_after_rotary: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    feed_forward_bias: bool = False
    position_offset: int = 0
    rotary: Rotary | None = Rotary()  # noqa: RUF009
    rotaries: tuple[Rotary | None, ...] = ()
    alibi_slopes: tuple[float, ...] = ()
    windows: tuple[int, ...] = (0,)
    window_kind: Literal["sliding", "chunked"] = "sliding"
    attention_sinks: bool = False
    attention_clip: float | None = None
    attention_gate: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    query_scale: float = 0.0
    embed_norm: bool = False
    embed_scale: bool = False
    embed_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_length", "embed", "num_layers", "vocab_multiple"):
            require(getattr(self, name) > 0, f"model.{name}={getattr(self, name)}; expected a positive number")
        require(
            0.0 < self.norm_epsilon < math.inf,
            f"model.norm_epsilon={self.norm_epsilon}; expected a small positive number",
        )
        require(
            self.vocab_size >= 0,
            f"model.vocab_size={self.vocab_size}; expected a positive number, or 0 for the tokenizer's",
        )
        require(0.0 <= self.dropout < 1.0, f"model.dropout={self.dropout}; expected a rate in [0, 1)")
        self._require_bounds("logit_soft_cap")
        for name in ("embed_multiplier", "residual_multiplier", "logit_multiplier"):
            value = getattr(self, name)
            require(0.0 < value < math.inf, f"model.{name}={value}; expected a positive factor, 1 changes nothing")
        require(
            self.position_offset == 0 or (self.position_offset > 0 and self.learned_positions),
            f"model.position_offset={self.position_offset}; expected 0, or with learned positions a positive number of rows",
        )
        self.check_norms()
        self.check_feed_forward()
        self.check_attention()

    def check_norms(self) -> None:
        """Raise a RecipeError if norms are placed where layers can't have them."""
        require(
            self.pre_norms or self.post_norms,
            "model.pre_norms=False and post_norms=False leave a layer without norms; set one of them",
        )
        require(
            not self.parallel_residual or (self.pre_norms and not self.post_norms),
            f"model.parallel_residual=True with pre_norms={self.pre_norms}, post_norms={self.post_norms}; expected True and "
            f"False",
        )
        require(
            self.parallel_residual or not self.shared_norm,
            "model.shared_norm=True has no effect without parallel_residual; set it, or leave shared_norm False",
        )
        require(
            not (self.norm_unit_offset and self.norm.endswith("unscaled")),
            f"model.norm_unit_offset=True, but norm={self.norm!r} has no scale; leave norm_unit_offset False",
        )
        for name in ("qk_norm_scope", "qk_norm_layers", "qk_norm_after_rotary"):
            value, default = getattr(self, name), _WITH_LATENT[name]
            require(
                self.qk_norm or value == default,
                f"model.{name}={value!r} has no effect without qk_norm; set it, or leave {name} {default!r}",
            )

    def check_feed_forward(self) -> None:
        """Raise a RecipeError if a layer's feed-forward can't be built."""
        require(self.ffn > 0, f"model.ffn={self.ffn}; expected a positive number")
        require(
            self.gate_clamp is None or (self.gated and self.activation == "silu"),
            f"model.gate_clamp with gated={self.gated}, activation={self.activation!r}; it bounds a gate and has its own "
            f"activation, leave them True and 'silu'",
        )
        require(
            self.gate_clamp is None or self.feed_forward is None or self.feed_forward.gated is not False,
            "model.gate_clamp with feed_forward.gated=False; it bounds a gate, leave feed_forward.gated None",
        )

    def check_attention(self) -> None:
        """Raise a RecipeError if a layer's attention can't be built."""
        require(self.heads > 0, f"model.heads={self.heads}; expected a positive number")
        for name in ("kv_heads", "head_dim"):
            require(getattr(self, name) >= 0, f"model.{name}={getattr(self, name)}; expected 0 or more")
        require(
            0.0 <= self.query_scale < math.inf,
            f"model.query_scale={self.query_scale}; expected a positive number, or 0 for head_dim",
        )
        require(
            self.head_dim > 0 or self.latent is not None or self.embed % self.heads == 0,
            f"model.embed={self.embed} is not divisible by heads={self.heads}; change one, or set model.head_dim",
        )
        for sizes in self.layer_heads:
            require(
                min(dataclasses.astuple(sizes)) > 0,
                f"model.head_sizes={self.head_sizes}; expected numbers above 0, or 0 for the decoder's",
            )
            require(
                sizes.heads % sizes.kv_heads == 0,
                f"model.heads={sizes.heads} is not divisible by kv_heads={sizes.kv_heads}; each key-value head serves an "
                f"equal number of query heads",
            )
        self._require_bounds("attention_clip", "attention_soft_cap")
        require(
            len(self.windows) > 0 and min(self.windows) >= 0,
            f"model.windows={self.windows}; expected lengths, or 0 for all",
        )
        self.check_alibi()
        require(
            self.window_kind == "sliding" or any(self.windows),
            f"model.window_kind={self.window_kind!r} has no effect without windows; set them, or leave it 'sliding'",
        )
        if self.latent is not None:
            for name, needed in _WITH_LATENT.items():
                require(
                    getattr(self, name) == needed,
                    f"model.{name}={getattr(self, name)!r} has no effect with latent attention; leave it {needed!r}",
                )
            require(
                None not in (self.rotaries or (self.rotary,)),
                "model.rotary=None; latent attention needs rotary positions, so set a Rotary",
            )
        require(
            not self.rotaries or self.rotary == Rotary(),
            f"model.rotary={self.rotary!r} has no effect with rotaries; leave it {Rotary()!r}",
        )
        for rotary in self.rotaries or (self.rotary,):
            if rotary is not None:
                for sizes in self.layer_heads:
                    rotary.check(sizes.head_dim if self.latent is None else self.latent.rope_dim)
                limit = None if rotary.scaling is None else rotary.scaling.max_positions
                require(
                    limit is None or self.max_length <= limit,
                    f"model.max_length={self.max_length}, and rotary.scaling is for rows of at most {limit}; shorten it, or "
                    f"choose the factors of long rows (rotary.scaling.use)",
                )

    def check_alibi(self) -> None:
        """Raise a RecipeError if scores can't grow with positions by these slopes."""
        if not self.alibi_slopes:
            return
        require(
            len(self.alibi_slopes) == self.heads and all(0.0 < slope < math.inf for slope in self.alibi_slopes),
            f"model.alibi_slopes has {len(self.alibi_slopes)} values; expected heads={self.heads} positive ones",
        )
        require(
            self.rotary is None and not self.rotaries and not self.head_sizes and self.latent is None,
            "model.alibi_slopes with rotary, rotaries, head_sizes or latent; leave these None and ()",
        )
        require(
            self.max_length <= MOST_POSITIONS,
            f"model.max_length={self.max_length} with alibi_slopes; expected at most {MOST_POSITIONS}",
        )

    def _require_bounds(self, *names: str) -> None:
        for name in names:
            bound = getattr(self, name)
            require(
                bound is None or 0.0 < bound < math.inf,
                f"model.{name}={bound}; expected a positive bound, or None",
            )

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and of the head, padding included.

        >>> DecoderConfig(vocab_size=50257).vocab_rows
        50304
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def learned_positions(self) -> bool:
        return self.rotary is None and not self.rotaries and not self.alibi_slopes

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of a query and of a key."""
        return self.latent.head_dim if self.latent is not None else self.head_dim or self.embed // self.heads

    @property
    def layer_heads(self) -> tuple[HeadSizes, ...]:
        """Heads of the layers, cycled over them; one for all if they don't differ.

        >>> DecoderConfig(heads=8, head_sizes=(HeadSizes(), HeadSizes(kv_heads=2, head_dim=64))).layer_heads
        (HeadSizes(heads=8, kv_heads=8, head_dim=32), HeadSizes(heads=8, kv_heads=2, head_dim=64))
        """
        decoder = HeadSizes(self.heads, self.num_kv_heads, self.head_size)
        return tuple(
            HeadSizes(
                sizes.heads or decoder.heads,
                sizes.kv_heads or sizes.heads or decoder.kv_heads,
                sizes.head_dim or decoder.head_dim,
            )
            for sizes in self.head_sizes or (decoder,)
        )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        windows, rotaries, moe = self.windows, self.rotaries or (self.rotary,), self.feed_forward
        heads = self.layer_heads if self.head_sizes else (None,)
        return tuple(
            LayerKind(
                windows[layer % len(windows)],
                moe is not None and moe.is_mixture(layer),
                rotaries[layer % len(rotaries)],
                heads=heads[layer % len(heads)],
            )
            for layer in range(self.num_layers)
        )

    def block(self, key: jax.Array, kind: LayerKind) -> Block:
        """Initialize one layer of the given kind."""
        return build_transformer_block(key, self, kind)

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a mixture of experts."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.mixture)

    @property
    def stacks(self) -> tuple[tuple[tuple[LayerKind, ...], int], ...]:
        """(one period of layers, repeats) of each stack: whole periods first, then the remaining layers.

        >>> [([kind.window for kind in period], n) for period, n in DecoderConfig(num_layers=26, windows=(512, 512, 0)).stacks]
        [([512, 512, 0], 8), ([512, 512], 1)]
        """
        first = 0 if self.feed_forward is None else min(self.feed_forward.first_dense, self.num_layers)
        return (*_periods(self.kinds[:first]), *_periods(self.kinds[first:]))


def _periods(kinds: tuple[LayerKind, ...]) -> list[tuple[tuple[LayerKind, ...], int]]:
    """Split the layers into repeats of their shortest period and the remainder."""
    if not kinds:
        return []
    lengths = range(1, len(kinds) + 1)
    period = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    repeats, rest = divmod(len(kinds), period)
    return [(kinds[:period], repeats), *([(kinds[:rest], 1)] if rest else [])]
