"""Prompts and rewards of other libraries' environments."""
