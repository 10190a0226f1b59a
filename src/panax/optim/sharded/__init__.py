"""Optimizer updates on parameter shards, and the assignment of matrices to devices."""
