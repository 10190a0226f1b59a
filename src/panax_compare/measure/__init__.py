"""Measurement of columns in worker processes."""
