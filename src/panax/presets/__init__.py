"""Published models by name, as experiments that are ready to run."""

from .experiments import preset
from .released_model import adapted_model, released_model

__all__ = ["adapted_model", "preset", "released_model"]
