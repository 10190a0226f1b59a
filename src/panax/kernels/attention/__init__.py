"""Attention kernels, their reference, and the choice between them."""
