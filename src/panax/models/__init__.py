"""Built-in models and their published sizes."""

from .decoder import Block, Context, Decoder
from .decoder_config import DecoderConfig
from .decoder_task import ComputeType, DecoderTask
from .presets import PRESETS, PUBLISHED_PARAMETERS

__all__ = [
    "PRESETS", "PUBLISHED_PARAMETERS", "Block", "ComputeType", "Context", "Decoder", "DecoderConfig", "DecoderTask",
]  # fmt: skip
