"""Checkpoints: saved in the background by every process, committed by one manifest, restored onto any layout."""

from .checkpointer import CheckpointConfig, Checkpointer, open_checkpoint
from .manifest import FILE as MANIFEST
from .manifest import Manifest
from .memory import MemoryConfig, MemoryTier, run_identity
from .reading import Checkpoint
from .restoring import agreeing, restore

__all__ = [
    "MANIFEST", "Checkpoint", "CheckpointConfig", "Checkpointer", "Manifest",
    "MemoryConfig", "MemoryTier", "agreeing", "open_checkpoint", "restore", "run_identity",
]  # fmt: skip
