"""Layers: annotated parameters and pure functions."""

from .attention import Attention, Cache
from .embedding import Embedding, Head, PositionEmbedding
from .feed_forward import Activation, FeedForward
from .latent_attention import Latent, LatentAttention, LatentCache
from .loss import TokenLoss, token_loss
from .moe import MixtureOfExperts, router_measures, router_weights
from .moe_config import MoE
from .norm import Norm
from .rotary import Rotary, RotaryScaling, YarnScaling
from .routing import RouterTerms, Tokens
from .state_space import StateSpace, StateSpaceCache

__all__ = [
    "Activation", "Attention", "Cache", "Embedding", "FeedForward", "Head", "Latent", "LatentAttention", "LatentCache",
    "MixtureOfExperts", "MoE", "Norm", "PositionEmbedding", "Rotary", "RotaryScaling", "RouterTerms", "StateSpace",
    "StateSpaceCache", "TokenLoss", "Tokens", "YarnScaling", "router_measures", "router_weights", "token_loss",
]  # fmt: skip
