"""Checkpoints: saved in the background by every process, committed by one manifest, restored onto any
layout."""

from .checkpointer import Checkpointer
from .config import CheckpointConfig
from .manifest import MANIFEST_FILE as MANIFEST
from .manifest import Manifest
from .memory import MemoryConfig, MemoryTier
from .reading import Checkpoint
from .record import exclusive_writer
from .restoring import raise_on_all_processes, restore
from .saved import open_checkpoint, parse_step

__all__ = [
    "MANIFEST", "Checkpoint", "CheckpointConfig", "Checkpointer", "Manifest", "MemoryConfig", "MemoryTier",
    "exclusive_writer", "open_checkpoint", "parse_step", "raise_on_all_processes", "restore",
]  # fmt: skip
