"""Floating-point operations of a model, counted from its shapes.

Source: PaLM (arXiv:2204.02311), appendix B: the model's own products, forward and backward, without what rematerialisation adds.
"""

from .decoder_config import DecoderConfig
from .vit_config import VitConfig


def training_flops_per_token(config: DecoderConfig, length: int) -> float:
    """FLOPs of one token's forward and backward pass in a row of `length` tokens.

    Three times the forward pass (its products, and two for the gradients); attention counts the positions that the causal mask
    and the layer's window leave. Of a mixture's experts, those that a token is sent to.

    >>> from panax.models import PRESETS
    >>> round(training_flops_per_token(PRESETS["gpt2"], 1024) / (6 * 124e6), 2)
    1.07
    """
    weights = config.embed * config.vocab_size
    attended = 0.0
    for kind in config.kinds:
        weights += _projections(config) + (_mixture(config) if kind.mixture else _dense(config, config.ffn))
        width = min(kind.window or length, length)
        # The first `width` positions see 1, 2, ... of them; each later one sees `width`.
        attended += (width * (width + 1) / 2 + (length - width) * width) / length
    value_dim = config.head_size if config.latent is None else config.latent.value_dim
    attention = config.heads * (config.head_size + value_dim) * attended
    return 3 * 2 * (weights + attention)


def training_flops_per_image(config: VitConfig) -> float:
    """FLOPs of an image's forward and backward pass through a vision transformer: of all its products, thrice the forward's.

    >>> from panax.models import VIT_PRESETS
    >>> round(training_flops_per_image(VIT_PRESETS["vit_b16"]) / (3 * 2 * 1e9), 2)
    17.56
    """
    tokens, embed = config.num_tokens, config.embed
    layer = tokens * (4 * embed * embed + 2 * embed * config.ffn) + 2 * embed * tokens * tokens
    patches = config.num_patches * config.patch**2 * config.channels * embed
    return 3.0 * 2 * (config.num_layers * layer + patches + embed * config.num_classes)


def _projections(config: DecoderConfig) -> int:
    """Weights of one layer's attention."""
    latent, heads = config.latent, config.heads
    if latent is None:
        return config.embed * config.head_size * (2 * heads + 2 * config.num_kv_heads)
    queries = heads * latent.head_dim
    q = latent.q_rank * (config.embed + queries) if latent.q_rank else config.embed * queries
    kv = config.embed * (latent.kv_rank + latent.rope_dim)
    kv += latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return q + kv + heads * latent.value_dim * config.embed


def _mixture(config: DecoderConfig) -> int:
    """Weights that one token meets in a mixture of experts: the router's, its experts' and the shared expert's."""
    moe = config.feed_forward
    assert moe is not None
    width = moe.active * (moe.ffn or config.ffn) + moe.shared
    return config.embed * moe.experts + _dense(config, width, moe.gated)


def _dense(config: DecoderConfig, width: int, gated: bool | None = None) -> int:
    return config.embed * width * (3 if (config.gated if gated is None else gated) else 2)
