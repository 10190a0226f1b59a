"""Models in the layout that Hugging Face's `transformers` reads and writes: config.json and safetensors.

GPT-2, Llama 3, Qwen 3, Gemma 2, Mixtral, Qwen 3 with experts, DeepSeek-V3, DBRX and ViT, both ways. Neither
`transformers` nor `torch` is imported, and nothing is unpickled.
"""

from .config import config_from
from .export import save
from .loader import load

__all__ = ["config_from", "load", "save"]
