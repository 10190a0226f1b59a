"""Layers: annotated parameters and pure functions."""

from .attention import Attention, Cache
from .embedding import Embedding, Head, PositionEmbedding
from .feed_forward import Activation, FeedForward
from .loss import TokenLoss, token_loss
from .norm import Norm
from .rotary import Rotary, RotaryScaling

__all__ = [
    "Activation", "Attention", "Cache", "Embedding", "FeedForward", "Head", "Norm", "PositionEmbedding", "Rotary",
    "RotaryScaling", "TokenLoss", "token_loss",
]  # fmt: skip
