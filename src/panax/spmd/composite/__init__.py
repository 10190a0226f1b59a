"""Weights that are computed from parts: sums with corrections of low rank, and codes with scales."""
