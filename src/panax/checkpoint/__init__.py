"""Checkpoints: asynchronous sharded save, atomic commit, restore onto any layout."""

from .checkpointer import CheckpointConfig, Checkpointer, restore
from .manifest import Manifest

__all__ = ["CheckpointConfig", "Checkpointer", "Manifest", "restore"]
