"""Built-in models, their tasks, and presets of published sizes."""

from ..layers.staged import ComputeType
from .base_width import BaseWidth
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .decoder_task import DecoderTask
from .dlrm import Dlrm, DlrmConfig
from .dlrm_task import DlrmTask
from .flops import training_flops_per_image, training_flops_per_token
from .hstu import HstuConfig
from .mamba import HybridConfig
from .parameter_counts import active_parameters, count_parameters
from .presets import PRESETS, PUBLISHED_PARAMETERS
from .presets_moe import PUBLISHED_ACTIVE
from .retrieval import item_vectors, query_vectors, retrieval_metrics, sequence_item_vectors, write_vectors
from .sampling import logits_of, sample
from .sequence_task import SequenceTask
from .two_tower import TwoTower, TwoTowerConfig
from .two_tower_task import TwoTowerTask
from .vit import Vit
from .vit_config import VitConfig
from .vit_presets import VIT_PRESETS, VIT_PUBLISHED_PARAMETERS
from .vit_task import VitTask

__all__ = [
    "PRESETS", "PUBLISHED_ACTIVE", "PUBLISHED_PARAMETERS", "VIT_PRESETS", "VIT_PUBLISHED_PARAMETERS", "BaseWidth",
    "ComputeType", "Decoder", "DecoderConfig", "DecoderTask", "Dlrm", "DlrmConfig", "DlrmTask", "HstuConfig",
    "HybridConfig", "SequenceTask", "TwoTower", "TwoTowerConfig", "TwoTowerTask", "Vit", "VitConfig", "VitTask",
    "active_parameters", "count_parameters", "item_vectors", "logits_of", "query_vectors", "retrieval_metrics", "sample",
    "sequence_item_vectors", "training_flops_per_image", "training_flops_per_token", "write_vectors",
]  # fmt: skip
