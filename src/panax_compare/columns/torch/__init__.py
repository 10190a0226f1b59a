"""Columns of PyTorch."""
