"""Clients of the object-store library: chosen by the address, with one for each request deadline in use."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from ..core.errors import StoreError
from .failures import CREDENTIALS
from .store import check_path, redact_address

_KINDS: dict[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_CONNECT_SECONDS = 10.0
_MOST_CLIENTS = 16

_memories: dict[str, MemoryStore] = {}
_memories_lock = threading.Lock()


class Address(NamedTuple):
    """An object store's address: its scheme, its bucket or container, and the prefix of object names."""

    scheme: str
    bucket: str
    prefix: str


def parse_address(url: str) -> Address:
    """Split an address into its parts.

    Raises:
        StoreError: The address is not that of an object store, or contains parts that belong in the
            environment.

    >>> parse_address("s3://bucket/runs/a/")
    Address(scheme='s3', bucket='bucket', prefix='runs/a')
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if scheme not in (*_KINDS, "memory") or not bucket or any(mark in rest for mark in "@?#"):
        raise StoreError(
            f"{redact_address(url)} is not an address of an object store; expected s3://bucket/prefix, gs://bucket/prefix or "
            "az://container/prefix, with credentials in the environment and no '@', '?' or '#'"
        )
    return Address(scheme, bucket, check_path(prefix) if prefix else "")


class Clients:
    """The clients of one bucket. A deadline is a property of a client: so there is one for each in use."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._made: OrderedDict[tuple[float, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, seconds: float, retries: int = 0) -> Any:
        """Return a client with a timeout of `seconds` for each request, rounded to two digits.

        Args:
            retries: Number of retries of a request by the library itself.
        """
        if self._address.scheme == "memory":
            with _memories_lock:
                return _memories.setdefault(self._address.bucket, MemoryStore())
        key = (float(f"{seconds:.1e}"), retries)
        with self._lock:
            if key not in self._made:
                self._made[key] = _connect(self._address, *key)
                if len(self._made) > _MOST_CLIENTS:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return self._made[key]

    def check(self, url: str, seconds: float) -> None:
        """Create a first client, without a request; raise StoreError if the environment lacks a setting."""
        try:
            self.get(seconds)
            return
        except BaseError:
            # Raised below, outside the context of this error, which may repeat contents of the environment.
            pass
        raise StoreError(
            f"{url} can't be opened: its account, credentials or endpoint are missing or not understood; {CREDENTIALS}"
        )


def _connect(address: Address, seconds: float, retries: int) -> Any:
    # Not as `client_options`, which would hide those of the environment (AWS_ALLOW_HTTP and its like).
    deadlines = {
        "timeout": f"{int(seconds * 1000)}ms",
        "connect_timeout": f"{int(min(seconds, _CONNECT_SECONDS) * 1000)}ms",
    }
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)}
    return _KINDS[address.scheme](address.bucket, config=deadlines, retry_config=retry)
