"""Optimizers that precondition whole matrices."""
