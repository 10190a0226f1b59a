"""Panax trains large models on any number of accelerators, on JAX."""
