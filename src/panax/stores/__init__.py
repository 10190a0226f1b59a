"""Where bytes are kept: a disk, a shared file system, or an object store, behind one small protocol."""

from .local import LocalStore
from .store import (
    REMOTE,
    Buffer,
    Claiming,
    Entry,
    Linking,
    MissingError,
    Store,
    checked_path,
    is_remote,
    join,
    open_store,
    shown_address,
)

__all__ = [
    "REMOTE", "Buffer", "Claiming", "Entry", "Linking", "LocalStore", "MissingError", "Store", "checked_path", "is_remote",
    "join", "open_store", "shown_address",
]  # fmt: skip
