"""Layers: annotated parameters and pure functions. Importing this package registers their logical axes."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily
from . import axes as axes

if TYPE_CHECKING:
    from .attention import Attention, Cache
    from .bags import embedding_bag, embedding_rows
    from .block import Block, Context
    from .embedding import Embedding, Head, PositionEmbedding
    from .expert_load import ExpertWatch
    from .feed_forward import Activation, FeedForward
    from .latent_attention import Latent, LatentAttention, LatentCache
    from .loss import TokenLoss, token_loss
    from .moe import MixtureOfExperts, router_measures, router_weights
    from .moe_config import MoE, register_router
    from .norm import Norm
    from .rotary import Rotary, RotaryScaling, YarnScaling
    from .routing import RouterTerms, Tokens
    from .stack import Stack, build_stacks, run_stacks
    from .staged import StagedTask
    from .state_space import StateSpace, StateSpaceCache
    from .state_space_block import StateSpaceBlock
    from .table_config import FeatureConfig, Growth, TableConfig
    from .tables import EmbeddingTables, TablesConfig
    from .transformer import TransformerBlock

_WHERE = {
    "attention": ("Attention", "Cache"),
    "bags": ("embedding_bag", "embedding_rows"),
    "block": ("Block", "Context"),
    "embedding": ("Embedding", "Head", "PositionEmbedding"),
    "expert_load": ("ExpertWatch",),
    "feed_forward": ("Activation", "FeedForward"),
    "latent_attention": ("Latent", "LatentAttention", "LatentCache"),
    "loss": ("TokenLoss", "token_loss"),
    "moe": ("MixtureOfExperts", "router_measures", "router_weights"),
    "moe_config": ("MoE", "register_router"),
    "norm": ("Norm",),
    "rotary": ("Rotary", "RotaryScaling", "YarnScaling"),
    "routing": ("RouterTerms", "Tokens"),
    "stack": ("Stack", "build_stacks", "run_stacks"),
    "staged": ("StagedTask",),
    "state_space": ("StateSpace", "StateSpaceCache"),
    "state_space_block": ("StateSpaceBlock",),
    "table_config": ("FeatureConfig", "Growth", "TableConfig"),
    "tables": ("EmbeddingTables", "TablesConfig"),
    "transformer": ("TransformerBlock",),
}

__getattr__ = lazily(__name__, _WHERE)

__all__ = [
    "Activation", "Attention", "Block", "Cache", "Context", "Embedding", "EmbeddingTables", "ExpertWatch", "FeatureConfig",
    "FeedForward", "Growth", "Head", "Latent", "LatentAttention", "LatentCache", "MixtureOfExperts", "MoE", "Norm",
    "PositionEmbedding", "Rotary", "RotaryScaling", "RouterTerms", "Stack", "StagedTask", "StateSpace", "StateSpaceBlock",
    "StateSpaceCache", "TableConfig", "TablesConfig", "TokenLoss", "Tokens", "TransformerBlock", "YarnScaling",
    "build_stacks", "embedding_bag", "embedding_rows", "register_router", "router_measures", "router_weights", "run_stacks",
    "token_loss",
]  # fmt: skip
