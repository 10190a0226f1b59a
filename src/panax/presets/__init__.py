"""Published models by name, as experiments that are ready to run."""

from .experiments import preset
from .released_model import released_model

__all__ = ["preset", "released_model"]
