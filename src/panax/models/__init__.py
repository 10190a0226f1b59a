"""Built-in models and their published sizes."""

from .decoder import Block, Context, Decoder
from .decoder_config import DecoderConfig
from .decoder_task import ComputeType, DecoderTask
from .flops import training_flops_per_token
from .presets import PRESETS, PUBLISHED_PARAMETERS
from .sampling import logits_of, sample

__all__ = [
    "PRESETS", "PUBLISHED_PARAMETERS", "Block", "ComputeType", "Context", "Decoder", "DecoderConfig", "DecoderTask",
    "logits_of", "sample", "training_flops_per_token",
]  # fmt: skip
