"""Checkpointing, rollback, and training through failures."""
