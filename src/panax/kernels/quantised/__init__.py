"""Numbers in fewer bits: how they are rounded."""

from .rounding import round_stochastically

__all__ = ["round_stochastically"]
