"""Layers: annotated parameters and pure functions. Importing this package registers their logical axes."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr
from . import axes as axes

if TYPE_CHECKING:
    from .attention.attention import Attention, Cache
    from .attention.latent_attention import Latent, LatentAttention, LatentCache
    from .attention.rotary import DynamicScaling, LinearScaling, LongScaling, Rotary, RotaryScaling, YarnScaling
    from .block import Block, Context
    from .embedding import Embedding, Head, PositionEmbedding
    from .feed_forward import Activation, FeedForward, GateClamp
    from .loss import TokenLoss, token_log_probabilities, token_loss
    from .mixers.delta_net import DeltaNet, DeltaNetCache
    from .mixers.short_convolution import ConvolutionCache, ShortConvolution
    from .mixers.state_space import StateSpace, StateSpaceCache
    from .mixers.state_space_block import StateSpaceBlock
    from .moe.expert_load import ExpertLoadMonitor
    from .moe.moe import MixtureOfExperts, router_metrics, router_weights
    from .moe.moe_config import MoE, register_router
    from .moe.routing import RouterTerms, Tokens
    from .norm import Norm
    from .stack import Stack, build_stacks, run_stacks
    from .stages.staged_task import StagedTask
    from .sublayer_block import SublayerBlock
    from .tables.bags import embedding_bag, embedding_rows
    from .tables.table_config import FeatureConfig, Growth, TableConfig
    from .tables.tables import EmbeddingTables, TablesConfig
    from .top_log_probabilities import (
        LikelyTokens,
        TokenTops,
        TopTokens,
        find_likely_tokens,
        token_top_log_probabilities,
    )
    from .transformer import TransformerBlock

_WHERE = {
    "attention.attention": ("Attention", "Cache"),
    "tables.bags": ("embedding_bag", "embedding_rows"),
    "block": ("Block", "Context"),
    "embedding": ("Embedding", "Head", "PositionEmbedding"),
    "moe.expert_load": ("ExpertLoadMonitor",),
    "feed_forward": ("Activation", "FeedForward", "GateClamp"),
    "attention.latent_attention": ("Latent", "LatentAttention", "LatentCache"),
    "loss": ("TokenLoss", "token_log_probabilities", "token_loss"),
    "moe.moe": ("MixtureOfExperts", "router_metrics", "router_weights"),
    "moe.moe_config": ("MoE", "register_router"),
    "norm": ("Norm",),
    "attention.rotary": ("DynamicScaling", "LinearScaling", "LongScaling", "Rotary", "RotaryScaling", "YarnScaling"),
    "moe.routing": ("RouterTerms", "Tokens"),
    "stack": ("Stack", "build_stacks", "run_stacks"),
    "stages.staged_task": ("StagedTask",),
    "mixers.delta_net": ("DeltaNet", "DeltaNetCache"),
    "mixers.short_convolution": ("ConvolutionCache", "ShortConvolution"),
    "mixers.state_space": ("StateSpace", "StateSpaceCache"),
    "mixers.state_space_block": ("StateSpaceBlock",),
    "sublayer_block": ("SublayerBlock",),
    "tables.table_config": ("FeatureConfig", "Growth", "TableConfig"),
    "tables.tables": ("EmbeddingTables", "TablesConfig"),
    "top_log_probabilities": (
        "LikelyTokens",
        "TokenTops",
        "TopTokens",
        "find_likely_tokens",
        "token_top_log_probabilities",
    ),
    "transformer": ("TransformerBlock",),
}

__getattr__ = lazy_getattr(__name__, _WHERE)

__all__ = [
    "Activation", "Attention", "Block", "Cache", "Context", "ConvolutionCache", "DeltaNet", "DeltaNetCache",
    "DynamicScaling", "Embedding", "EmbeddingTables", "ExpertLoadMonitor", "FeatureConfig", "FeedForward",
    "GateClamp", "Growth", "Head", "Latent", "LatentAttention", "LatentCache", "LikelyTokens", "LinearScaling",
    "LongScaling", "MixtureOfExperts", "MoE", "Norm", "PositionEmbedding", "Rotary", "RotaryScaling", "RouterTerms",
    "ShortConvolution", "Stack", "StagedTask", "StateSpace", "StateSpaceBlock", "StateSpaceCache", "SublayerBlock",
    "TableConfig", "TablesConfig", "TokenLoss", "TokenTops", "Tokens", "TopTokens", "TransformerBlock", "YarnScaling",
    "build_stacks", "embedding_bag", "embedding_rows", "find_likely_tokens", "register_router", "router_metrics",
    "router_weights", "run_stacks", "token_log_probabilities", "token_loss", "token_top_log_probabilities",
]  # fmt: skip
