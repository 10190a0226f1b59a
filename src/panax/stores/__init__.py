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
    check_path,
    is_remote,
    join,
    open_store,
    redact_address,
)

__all__ = [
    "REMOTE", "Buffer", "Claiming", "Entry", "Linking", "LocalStore", "MissingError", "Store", "check_path", "is_remote",
    "join", "open_store", "redact_address",
]  # fmt: skip
