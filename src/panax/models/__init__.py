"""Built-in models and their published sizes."""

from .decoder import Block, Context, Decoder
from .decoder_config import DecoderConfig
from .decoder_task import ComputeType, DecoderTask
from .flops import training_flops_per_token
from .parameter_counts import active_parameters, count_parameters
from .presets import PRESETS, PUBLISHED_PARAMETERS
from .presets_moe import PUBLISHED_ACTIVE
from .sampling import logits_of, sample

__all__ = [
    "PRESETS", "PUBLISHED_ACTIVE", "PUBLISHED_PARAMETERS", "Block", "ComputeType", "Context", "Decoder", "DecoderConfig",
    "DecoderTask", "active_parameters", "count_parameters", "logits_of", "sample", "training_flops_per_token",
]  # fmt: skip
