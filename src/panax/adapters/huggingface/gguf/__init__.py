"""GGUF files, llama.cpp's format: read in place of config.json and safetensors, and written."""

from .file import GGUF, find_gguf, open_gguf
from .reader import read_config_json, read_tensors
from .writer import KINDS, write_gguf

__all__ = ["GGUF", "KINDS", "find_gguf", "open_gguf", "read_config_json", "read_tensors", "write_gguf"]
