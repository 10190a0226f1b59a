"""The protocol of a store: named byte strings, each of which appears whole or not at all, on a disk or in an
object store."""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, runtime_checkable

from ..core.errors import StoreError

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview has format "B" and one dimension."""


class Entry(NamedTuple):
    """One stored object: its path below the store's root, `/` between parts, and its size in bytes."""

    path: str
    size: int


@runtime_checkable
class Store(Protocol):
    """A folder of objects. Every method may be called from several threads at once.

    Attributes:
        url: Its root, as errors name it.
        writers: Best number of simultaneous writes.
        readers: Best number of simultaneous reads.
    """

    url: str
    writers: int
    readers: int

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write an object of these bytes, one part after another, replacing an object of that name.

        When it returns the object is durable, and the stored bytes were verified to be those given.

        Raises:
            StoreError: The object could not be written, after all of the store's retries.
        """
        ...

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes of an object from `start` up to `stop`, or to its end.

        Raises:
            ObjectNotFoundError: The object does not exist.
            StoreError: The object can't be read, or ends before `stop`.
        """
        ...

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        """Fill `target` with an object's bytes from `start` on; raises as `read` does."""
        ...

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """List every object below the folder `prefix`, at any depth, by path; empty without such a folder."""
        ...

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List the names of the folders directly in `prefix`, by name."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; a missing one is not an error."""
        ...


@runtime_checkable
class LinkableStore(Store, Protocol):
    """A store in which a name may be a link to something outside of the store."""

    def is_link(self, path: str) -> bool:
        """Return True if an object or folder is reached by a link inside the store. Reads follow it;
        `delete` removes the link."""
        ...


@runtime_checkable
class ExclusiveStore(Store, Protocol):
    """A store in which one of several writers of the same object wins."""

    def create(self, path: str, data: bytes) -> bool:
        """Create an object if its name is free; return True if this call created it.

        For bytes that no other writer would write, the result is right even if a response was lost and the
        request repeated.

        Raises:
            StoreError: The object could not be written, or the store does not support exclusive writes.
        """
        ...


class ObjectNotFoundError(StoreError):
    """Error for an object that does not exist."""


REMOTE = ("s3://", "gs://", "az://", "memory://")
"""Prefixes of the addresses of object stores; anything else is a path of this machine."""


def is_remote(url: str) -> bool:
    """Return True for the address of an object store.

    >>> is_remote("s3://bucket/run"), is_remote("runs/quickstart")
    (True, False)
    """
    return url.startswith(REMOTE)


def redact_address(text: str) -> str:
    """Remove parts of an address that can hold a secret: user and password, and anything after `?` or `#`.

    >>> redact_address("https://user:SECRET@host/data?token=SECRET"), redact_address("s3a://bucket/a")
    ('https://...@host/data?...', 's3a://bucket/a')
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    end = min((at for at in map(rest.find, "?#") if at >= 0), default=len(rest))
    # A password may itself hold an @ or a slash: everything before the last @ is removed.
    _, at, place = rest[:end].rpartition("@")
    return f"{scheme}://{'...@' if at else ''}{place}{rest[end] + '...' if end < len(rest) else ''}"


def join_url(url: str, *parts: str) -> str:
    """Return an address below another.

    >>> join_url("s3://bucket/run/", "checkpoints"), join_url("runs/a", "checkpoints")
    ('s3://bucket/run/checkpoints', 'runs/a/checkpoints')
    """
    return "/".join([url.rstrip("/"), *parts]) if is_remote(url) else str(Path(url, *parts))


def check_path(path: str) -> str:
    """Return a path unchanged, if it stays inside the store: relative, normalized, without `..`.

    Raises:
        StoreError: The path leads out of the store.

    >>> check_path("step_1/a.bin")
    'step_1/a.bin'
    >>> check_path("../../etc/passwd")
    Traceback (most recent call last):
        ...
    panax.core.errors.StoreError: '../../etc/passwd' is not a path inside a store; expected a relative one without '..'
    """
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\\" in path or "\0" in path:
        raise StoreError(f"{path!r} is not a path inside a store; expected a relative one without '..'")
    return path
