"""Published models by name, as experiments that are ready to run."""

from .experiments import preset

__all__ = ["preset"]
