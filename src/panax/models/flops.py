"""Floating-point operations of a model, counted from its shapes.

Source: PaLM (arXiv:2204.02311), appendix B: the model's own products, forward and backward, without what rematerialisation adds.
Three times the forward pass: its products, and two for the gradients.
"""

from .decoder_config import DecoderConfig
from .decoder_task import DecoderTask
from .vit_config import VitConfig
from .vit_task import VitTask


def training_flops_per_token(config: DecoderConfig, length: int) -> float:
    """FLOPs of one token's forward and backward pass in a row of `length` tokens.

    Attention counts the positions that the causal mask and the layer's window leave; a mixture, the experts that a token is sent
    to.

    >>> from panax.models import PRESETS
    >>> round(training_flops_per_token(PRESETS["gpt2"], 1024) / (6 * 124e6), 2)
    1.07
    """
    return DecoderTask(model=config).flops_per_token(length)


def training_flops_per_image(config: VitConfig) -> float:
    """FLOPs of an image's forward and backward pass through a vision transformer.

    >>> from panax.models import VIT_PRESETS
    >>> round(training_flops_per_image(VIT_PRESETS["vit_b16"]) / (3 * 2 * 1e9), 2)
    17.56
    """
    return VitTask(model=config).flops_per_example()
