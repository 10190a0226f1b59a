"""Built-in models, their tasks, and presets of published sizes."""

from ..layers.stages.staged_task import ComputeType
from .decoder.base_width import BaseWidth
from .decoder.config import DecoderConfig, HeadSizes
from .decoder.convolutional import ConvolutionConfig
from .decoder.delta import DeltaNetConfig
from .decoder.logits import compute_logits
from .decoder.mamba import HybridConfig
from .decoder.model import Decoder
from .decoder.side_by_side import SideBySideConfig
from .decoder.sublayers import SublayerConfig
from .decoder.task import DecoderTask
from .flops import training_flops_per_image, training_flops_per_token
from .heads.classifier import TextClassifierTask
from .heads.embedder import TextEmbedderTask
from .heads.headed_task import HeadedDecoder, HeadedTask
from .heads.reward import RewardTask
from .lora import LoRA
from .objectives.distill import Distill
from .objectives.kto import Kto
from .objectives.next_token import NextToken
from .objectives.objective import DecoderObjective
from .objectives.policy_gradient import PolicyGradient
from .objectives.preference import Preference
from .parameter_counts import count_active_parameters, count_parameters
from .presets.decoders import PRESETS, PUBLISHED_PARAMETERS
from .presets.moe import PUBLISHED_ACTIVE
from .presets.vit import VIT_PRESETS, VIT_PUBLISHED_PARAMETERS
from .recommenders.dlrm import Dlrm, DlrmConfig
from .recommenders.dlrm_task import DlrmTask
from .recommenders.hstu import HstuConfig
from .recommenders.retrieval import item_vectors, query_vectors, retrieval_metrics, sequence_item_vectors, write_vectors
from .recommenders.sequence_task import SequenceTask
from .recommenders.two_tower import TwoTower, TwoTowerConfig
from .recommenders.two_tower_task import TwoTowerTask
from .vision.vit import Vit
from .vision.vit_config import VitConfig
from .vision.vit_task import VitTask

__all__ = [
    "PRESETS", "PUBLISHED_ACTIVE", "PUBLISHED_PARAMETERS", "VIT_PRESETS", "VIT_PUBLISHED_PARAMETERS", "BaseWidth",
    "ComputeType", "ConvolutionConfig", "Decoder", "DecoderConfig", "DecoderObjective", "DecoderTask", "DeltaNetConfig",
    "Distill", "Dlrm", "DlrmConfig", "DlrmTask", "HeadSizes", "HeadedDecoder", "HeadedTask", "HstuConfig",
    "HybridConfig", "Kto", "LoRA", "NextToken", "PolicyGradient", "Preference", "RewardTask", "SequenceTask",
    "SideBySideConfig", "SublayerConfig", "TextClassifierTask", "TextEmbedderTask", "TwoTower", "TwoTowerConfig",
    "TwoTowerTask", "Vit", "VitConfig", "VitTask", "compute_logits", "count_active_parameters", "count_parameters",
    "item_vectors", "query_vectors", "retrieval_metrics", "sequence_item_vectors", "training_flops_per_image",
    "training_flops_per_token", "write_vectors",
]  # fmt: skip
