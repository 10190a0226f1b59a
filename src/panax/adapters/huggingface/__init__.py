"""Models in the layout that Hugging Face's `transformers` reads and writes: config.json and safetensors.

Llama, Qwen, Gemma, Mistral, DeepSeek, GLM, Phi, OLMo, Granite and some fifty other families, and ViT, both ways; of models
with vision the text's tower. Neither `transformers` nor `torch` is imported, and nothing is unpickled.
"""

from .config import config_from
from .export import save, save_gguf
from .families import register_family
from .family import Family
from .loader import load
from .low_rank.peft import load_adapter, read_adapter_config, save_adapter

__all__ = [
    "Family", "config_from", "load", "load_adapter", "read_adapter_config", "register_family", "save", "save_adapter",
    "save_gguf",
]  # fmt: skip
