"""Objects asked for by their names: the list that a store answers may be an older one, by an hour in some."""

from ..stores import MissingError, Store


def holds(store: Store, path: str, size: int) -> bool:
    """Whether an object of at least so many bytes is there.

    Raises:
        StoreError: The store can't be read, or the object is shorter.
    """
    try:
        store.read(path, max(size - 1, 0), size)
    except MissingError:
        return False
    return True


def read_if_there(store: Store, path: str) -> bytes | None:
    """An object's bytes; None where there is none.

    Raises:
        StoreError: The store can't be read.
    """
    try:
        return store.read(path)
    except MissingError:
        return None
