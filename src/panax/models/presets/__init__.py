"""Configs of published models by name."""
