"""Grouped matmuls for mixtures of experts: kernels and their reference."""
