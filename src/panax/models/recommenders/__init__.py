"""Recommender models: DLRM, HSTU, two towers and retrieval."""
