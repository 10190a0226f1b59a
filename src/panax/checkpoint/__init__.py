"""Checkpoints: saved in the background by every process, committed by one manifest, restored onto any
layout."""

from .checkpoint_index import open_checkpoint, parse_step
from .checkpointer import Checkpointer
from .chunk_reader import Checkpoint
from .config import CheckpointConfig
from .manifest import MANIFEST_FILE as MANIFEST
from .manifest import Manifest
from .memory import MemoryConfig, MemoryTier
from .restoration import raise_on_all_processes, restore
from .run_record import exclusive_writer

__all__ = [
    "MANIFEST", "Checkpoint", "CheckpointConfig", "Checkpointer", "Manifest", "MemoryConfig", "MemoryTier",
    "exclusive_writer", "open_checkpoint", "parse_step", "raise_on_all_processes", "restore",
]  # fmt: skip
