"""Optimizers that update each element, or each layer by one factor."""
