"""Batches: example sources, sharding, prefetching and batch shapes."""
