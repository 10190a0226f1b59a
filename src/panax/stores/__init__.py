"""Stores of bytes behind one small protocol: a disk, a shared file system, or an object store."""

from .address import open_store
from .local import LocalStore
from .store import (
    REMOTE,
    Buffer,
    Entry,
    ExclusiveStore,
    LinkableStore,
    ObjectNotFoundError,
    Store,
    check_path,
    is_remote,
    join_url,
    redact_address,
)

__all__ = [
    "REMOTE", "Buffer", "Entry", "ExclusiveStore", "LinkableStore", "LocalStore", "ObjectNotFoundError", "Store",
    "check_path", "is_remote", "join_url", "open_store", "redact_address",
]  # fmt: skip
