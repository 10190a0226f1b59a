"""The store at an address: a folder of this machine, or a prefix in an object store."""

from pathlib import Path

from ..core.errors import StoreError
from .local import LocalStore
from .store import REMOTE, ExclusiveStore, is_remote, redact_address


def open_store(url: str | Path) -> ExclusiveStore:
    """Open the store at a path of this machine, or at `s3://bucket/prefix`, `gs://bucket/prefix`,
    `az://container/prefix`.

    Credentials and endpoints of object stores come from the environment alone.

    Raises:
        StoreError: The address is of no known kind, or its credentials are missing.
    """
    text = str(url)
    if is_remote(text):
        from .objects import ObjectStore  # obstore takes a while to import.

        return ObjectStore.open(text)
    if "://" in text:
        raise StoreError(
            f"{redact_address(text)} is not a known kind of store; expected a path or {', '.join(REMOTE[:3])}..., with "
            f"credentials in the environment"
        )
    return LocalStore(text)
