"""Floating-point operations of a model, counted from its shapes.

Source: PaLM (arXiv:2204.02311), appendix B: the model's forward and backward matmuls, without recomputation. The
total is three times the forward pass, since each matmul needs two more for its gradients.
"""

from .decoder.config import DecoderConfig
from .decoder.task import DecoderTask
from .vision.vit_config import VitConfig
from .vision.vit_task import VitTask


def training_flops_per_token(config: DecoderConfig, length: int) -> float:
    """Return the FLOPs of one token's forward and backward pass in a row of `length` tokens.

    Attention counts only positions inside the causal mask and the layer's window; a mixture counts only the
    experts to which a token is routed.

    >>> from panax.models import PRESETS
    >>> round(training_flops_per_token(PRESETS["gpt2"], 1024) / (6 * 124e6), 2)
    1.07
    """
    return DecoderTask(model=config).flops_per_token(length)


def training_flops_per_image(config: VitConfig) -> float:
    """Return the FLOPs of one image's forward and backward pass through a vision transformer.

    >>> from panax.models import VIT_PRESETS
    >>> round(training_flops_per_image(VIT_PRESETS["vit_b16"]) / (3 * 2 * 1e9), 2)
    17.56
    """
    return VitTask(model=config).flops_per_example()
