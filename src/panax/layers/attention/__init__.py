"""Attention layers and rotary embeddings."""
