"""Objectives of a decoder: what its hidden states are trained for."""
