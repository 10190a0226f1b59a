"""PyTorch modules, unchanged: traced to a graph by PyTorch's own autograd, and run in JAX, exactly or not at all."""

from ..extras import import_extra

import_extra("torch", "torch")

from .lowering.registry import register_lowering  # noqa: E402
from .task import task  # noqa: E402

__all__ = ["register_lowering", "task"]
