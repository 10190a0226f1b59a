"""Environments: what replies to the model's turns, tools, and prompts and rewards of other libraries."""
