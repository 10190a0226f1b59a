"""HSTU: a decoder over items with pointwise attention."""

import dataclasses

import jax

from ...layers.attention.pointwise_attention import PointwiseAttention
from ...layers.attention.rotary import Rotary
from ...layers.block import Block
from ...layers.norm import NormKind
from ..decoder.blocks import norm_builder
from ..decoder.config import DecoderConfig, LayerKind, require

UNUSED_SETTINGS = (
    "kv_heads", "latent", "ffn", "feed_forward", "gated", "activation", "pre_norms", "post_norms", "parallel_residual",
    "shared_norm", "residual_multiplier", "qk_norm", "qk_norm_scope", "qk_norm_after_rotary", "rotaries", "attention_bias",
    "attention_output_bias", "feed_forward_bias", "windows", "attention_clip", "attention_gate", "attention_soft_cap",
    "query_scale",
)  # fmt: skip
"""`DecoderConfig` fields without a meaning for pointwise attention, which has no feed-forward either."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HstuConfig(DecoderConfig):
    """A sequential transducer of HSTU layers (arXiv:2402.17152), with learned positions.

    Attributes:
        rotary: Must be None: scores have a bias of the distances in position and in time.
    """

    rotary: Rotary | None = None
    norm: NormKind = "layer"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                field.name not in UNUSED_SETTINGS or value == field.default,
                f"model.{field.name}={value!r} has no effect in HSTU's layers; leave it {field.default!r}",
            )
        require(self.rotary is None, f"model.rotary={self.rotary!r} has no effect in HSTU's layers; leave it None")
        super().__post_init__()

    def block(self, key: jax.Array, kind: LayerKind) -> Block:
        return PointwiseAttention.build(
            key,
            self.embed,
            self.heads,
            self.head_size,
            self.max_length,
            norm=norm_builder(self),
            epsilon=self.norm_epsilon,
            dropout=self.dropout,
            output_gain=self.num_layers**-0.5,
        )
