"""Columns of plain JAX and its libraries."""
