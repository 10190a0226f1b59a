"""Layers: annotated parameters and pure functions."""

from .attention import Attention, Cache
from .block import Block, Context
from .embedding import Embedding, Head, PositionEmbedding
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
from .transformer import TransformerBlock

__all__ = [
    "Activation", "Attention", "Block", "Cache", "Context", "Embedding", "FeedForward", "Head", "Latent", "LatentAttention",
    "LatentCache", "MixtureOfExperts", "MoE", "Norm", "PositionEmbedding", "Rotary", "RotaryScaling", "RouterTerms", "Stack",
    "StagedTask", "StateSpace", "StateSpaceCache", "TokenLoss", "Tokens", "TransformerBlock", "YarnScaling", "build_stacks",
    "register_router", "router_measures", "router_weights", "run_stacks", "token_loss",
]  # fmt: skip
