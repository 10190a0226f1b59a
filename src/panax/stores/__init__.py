"""Where bytes are kept: a disk, a shared file system, or an object store, behind one small protocol."""

from .local import LocalStore
from .store import Buffer, Entry, MissingError, Store, checked_path, is_remote, join, open_store

__all__ = [
    "Buffer", "Entry", "LocalStore", "MissingError", "Store", "checked_path", "is_remote", "join", "open_store",
]  # fmt: skip
