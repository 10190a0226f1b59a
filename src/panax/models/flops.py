"""Floating-point operations of a decoder, counted from its shapes.

Source: PaLM (arXiv:2204.02311), appendix B: the model's own products, forward and backward, without what rematerialisation adds.
"""

from .decoder_config import DecoderConfig


def training_flops_per_token(config: DecoderConfig, length: int) -> float:
    """FLOPs of one token's forward and backward pass in a row of `length` tokens.

    Three times the forward pass (its products, and two for the gradients); attention counts the positions that the causal mask
    and the layer's window leave.

    >>> from panax.models import PRESETS
    >>> round(training_flops_per_token(PRESETS["gpt2"], 1024) / (6 * 124e6), 2)
    1.07
    """
    projections = config.embed * config.head_size * (2 * config.heads + 2 * config.num_kv_heads)
    feed_forward = config.embed * config.ffn * (3 if config.gated else 2)
    weights = config.num_layers * (projections + feed_forward) + config.embed * config.vocab_size
    attended = 0.0
    for periods, repeats in config.stacks:
        for window in periods:
            width = min(window or length, length)
            # The first `width` positions see 1, 2, ... of them; each later one sees `width`.
            mean = (width * (width + 1) / 2 + (length - width) * width) / length
            attended += repeats * mean
    attention = 2 * config.heads * config.head_size * attended
    return 3 * 2 * (weights + attention)
