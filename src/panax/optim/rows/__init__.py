"""Optimizers that update only the rows of a table that a batch used."""
