"""Checkpointing, rewinding, and training through failures."""
