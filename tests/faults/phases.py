"""In a process that is to be killed: announces each phase of saving or restoring, and stretches it.

Production code knows nothing of this: its functions are replaced by ones that announce, pause and call them.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from panax.checkpoint import checkpointer, chunk_reader, commit, memory, snapshot
from panax.stores import local, peer

PHASES = ("copy to host", "write of shards", "manifest", "commit", "cleanup", "restore", "copy to peer")
STRETCH = 0.004
"""Seconds that each small part of the phase takes besides."""


def install(phase: str, announce: Path, saves: int = 0) -> None:
    """Announce `phase` by making the file `announce`; and stretch it.

    Args:
        saves: How many saves this process begins before the one with announced phases.
    """
    begun = 0
    real_save = checkpointer.Checkpointer.save

    def counted(*args: Any, **kwargs: Any) -> bool:
        nonlocal begun
        begun += 1
        return real_save(*args, **kwargs)

    checkpointer.Checkpointer.save = counted  # type: ignore[method-assign]

    def begin() -> None:
        if begun > saves or phase == "restore":
            announce.touch()

    def slowed(
        owner: Any,
        name: str,
        when: Callable[..., bool] = lambda *a, **k: True,
        pauses: int = 1,
        announces: bool = True,
    ) -> None:
        real = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not when(*args, **kwargs):
                return real(*args, **kwargs)
            if announces:
                begin()
            time.sleep(STRETCH * pauses)
            outcome = real(*args, **kwargs)
            time.sleep(STRETCH * pauses)
            return outcome

        setattr(owner, name, replaced)

    if phase == "copy to host":
        slowed(snapshot.Snapshot, "_copy")
    elif phase == "write of shards":
        slowed(local, "_write_all")
    elif phase == "manifest":
        slowed(checkpointer, "commit", pauses=5)
        slowed(commit, "merged", pauses=5)
    elif phase == "commit":
        # The manifest's own write, flush and rename.
        slowed(local.LocalStore, "write", lambda self, path, parts: path.endswith("manifest.json"), pauses=10)
    elif phase == "cleanup":
        slowed(checkpointer, "remove", pauses=5)
        slowed(local.LocalStore, "delete", pauses=5, announces=False)
    elif phase == "restore":
        slowed(chunk_reader.Checkpoint, "_read_checked")
    elif phase == "copy to peer":
        slowed(peer.PeerStore, "write", pauses=5)
        slowed(memory.MemoryTier, "_write", pauses=2)
    else:
        raise ValueError(f"{phase!r}; expected one of {PHASES}")
