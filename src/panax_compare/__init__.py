"""The same work in PyTorch, in JAX by hand, in Flax and here, side by side, and what may be said of it."""

from .work.settings import Settings

__all__ = ["Settings"]
