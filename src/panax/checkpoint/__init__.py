"""Checkpoints: saved in the background by every process, committed by one manifest, restored onto any layout."""

from .checkpointer import Checkpointer
from .config import CheckpointConfig
from .manifest import FILE as MANIFEST
from .manifest import Manifest
from .memory import MemoryConfig, MemoryTier
from .reading import Checkpoint
from .record import only_job
from .restoring import raise_on_all_processes, restore
from .saved import open_checkpoint, step_of

__all__ = [
    "MANIFEST", "Checkpoint", "CheckpointConfig", "Checkpointer", "Manifest", "MemoryConfig", "MemoryTier", "only_job",
    "open_checkpoint", "raise_on_all_processes", "restore", "step_of",
]  # fmt: skip
