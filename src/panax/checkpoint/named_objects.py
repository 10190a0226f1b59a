"""Objects read by name: the listing of a store may be stale, by an hour in some."""

from ..stores import ObjectNotFoundError, Store


def has_object(store: Store, path: str, size: int) -> bool:
    """Return True if an object of at least `size` bytes exists.

    Raises:
        StoreError: The store can't be read, or the object is shorter.
    """
    try:
        store.read(path, max(size - 1, 0), size)
    except ObjectNotFoundError:
        return False
    return True


def read_if_exists(store: Store, path: str) -> bytes | None:
    """Read an object; None if it does not exist.

    Raises:
        StoreError: The store can't be read.
    """
    try:
        return store.read(path)
    except ObjectNotFoundError:
        return None
