"""Published models by name, as experiments that are ready to run."""

from .experiments import preset
from .pretrained import pretrained

__all__ = ["preset", "pretrained"]
