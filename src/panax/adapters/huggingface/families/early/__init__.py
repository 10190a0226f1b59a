"""Families from before the names that Llama introduced."""
