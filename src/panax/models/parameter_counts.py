"""Total and active parameter counts of a decoder."""

import math

import jax

from .decoder.config import DecoderConfig
from .decoder.model import Decoder


def count_parameters(config: DecoderConfig) -> int:
    """Count the values in the weight files: all parameters and the routers' selection biases, without
    vocabulary padding.

    >>> from panax.models import PRESETS
    >>> count_parameters(PRESETS["gpt2"])
    124439808
    """
    model = jax.eval_shape(lambda key: Decoder.build(key, config), jax.random.key(0))
    padding = (config.vocab_rows - config.vocab_size) * config.embed * (1 if config.tied else 2)
    moe = config.feed_forward
    biases = len(config.mixture_layers) * moe.experts if moe is not None and moe.selection_bias else 0
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model)) - padding + biases


def count_active_parameters(config: DecoderConfig) -> int:
    """Count the parameters active for one token: all but the experts to which it is not routed.

    >>> from panax.models import PRESETS
    >>> count_active_parameters(PRESETS["gpt2"])
    124439808
    """
    moe = config.feed_forward
    if moe is None:
        return count_parameters(config)
    gated = config.gated if moe.gated is None else moe.gated
    ffn = moe.ffn or config.ffn
    expert = config.embed * ffn * (3 if gated else 2)
    if moe.expert_biases:
        expert += ffn * (2 if gated else 1) + config.embed
    return count_parameters(config) - len(config.mixture_layers) * (moe.experts - moe.active) * expert
