"""Comparison of one workload in PyTorch, in plain JAX, in Flax and in Panax, and the conclusions that it
supports."""

from .workload.settings import Settings

__all__ = ["Settings"]
