"""Object stores (S3, Google Cloud Storage, Azure) through obstore: one layer of retries, every write
verified.

Neither obstore nor HTTP detects a bit that flips in transit. A write is compared with the checksum that the
server returns, or read back if there is none, before it counts as done. An object of up to 16 MiB
that is read whole is compared with its checksum as well, if that is known. Other reads are for the reader to
check against checksums of the contents, and to repeat.
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from ..core.errors import StoreError
from .clients import Clients, parse_address
from .failures import ReadPastEndError, TruncatedReadError, WriteMismatchError, is_past_end
from .retry import RetryPolicy, retry
from .store import Buffer, Entry, check_path
from .verification import ReadCheck, entity_tag, verify_written

T = TypeVar("T")

ONE_PUT_BYTES = 2**28
"""The largest object that is sent in one request; a larger one is sent in parts."""

PART_BYTES = 2**26
_PARTS_AT_A_TIME = 4
_PART_RETRIES = 3
_FIRST_READ_BYTES = 2**24
_CHUNK_BYTES = 2**20
_DELETES_PER_REQUEST = 1000
_MOST_LISTED = 10_000_000


class ObjectStore:
    """A store of objects below a prefix of a bucket. `memory://name` is for tests; a process has one store
    for each name."""

    writers = 8
    readers = 8

    def __init__(self, url: str, policy: RetryPolicy | None = None) -> None:
        address = parse_address(url)
        self.url = url.rstrip("/")
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._policy = policy or RetryPolicy()
        if address.scheme == "memory":
            self._policy = dataclasses.replace(self._policy, missing_attempts=1, stagger_seconds=0.0)
        self._keeps_buffers = address.scheme == "memory"
        # Google and Azure return 404 for the deletion of a missing object, S3 does not.
        self._missing_is_deleted = address.scheme != "s3"
        self._clients = Clients(address)
        self._clients.check(self.url, self._policy.request_seconds)
        self._writing = threading.BoundedSemaphore(self.writers)
        self._reading = threading.BoundedSemaphore(self.readers)
        self._burst = _Burst(self._policy.stagger_seconds)

    @classmethod
    def open(cls, url: str, policy: RetryPolicy | None = None) -> "ObjectStore":
        """Open the store at `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or
        `memory://name/prefix`.

        No request is made yet. Credentials, region and endpoint come from the environment alone.

        Raises:
            StoreError: The address has none of these forms, or the environment lacks a setting without which
                the store has no address.
        """
        return cls(url, policy)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        if self._keeps_buffers:
            # The caller may write into its memory again.
            parts = [bytes(part) for part in parts]
        key, size = self._key(path), sum(len(part) for part in parts)
        part_bytes = PART_BYTES if size > ONE_PUT_BYTES else None
        expected = entity_tag(parts, part_bytes)
        wrong = False

        def put(seconds: float) -> None:
            nonlocal wrong
            answer = obstore.put(
                self._clients.get(seconds, 0 if part_bytes is None else _PART_RETRIES),
                key,
                iter(parts) if part_bytes or len(parts) != 1 else parts[0],
                use_multipart=part_bytes is not None,
                chunk_size=PART_BYTES,
                max_concurrency=_PARTS_AT_A_TIME,
            )
            # A tag that is not an MD5, as with encryption by a key, shows nothing: read the object back.
            if (answer["e_tag"] or "").strip('"') != expected:
                try:
                    verify_written(obstore.get(self._clients.get(seconds), key).stream(_CHUNK_BYTES), parts)
                except WriteMismatchError:
                    wrong = True
                    raise
            wrong = False

        self._burst.wait()
        with self._writing:
            try:
                self._retried(put, "written", path, size)
            except StoreError as error:
                if not wrong:
                    raise
                removed = self._discard(key)
                left = "it was removed" if removed else "it could not be removed: don't use it"
                raise StoreError(f"{error}; an object with other bytes was there, {left}") from None
            finally:
                self._burst.touch()

    def create(self, path: str, data: bytes) -> bool:
        key = self._key(path)

        def put(seconds: float) -> bool:
            try:
                obstore.put(self._clients.get(seconds), key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        if self._retried(put, "created", path, len(data)):
            return True
        # There is one: maybe from this very write, if its response was lost before the retry.
        return self.read(path) == data

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None:
            return self._read_to_end(path, start)
        found = bytearray(_length(path, start, stop))
        self._fill(path, start, memoryview(found))
        return bytes(found)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        _length(path, start, start + len(target))
        self._fill(path, start, target)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        found = [*self._listed(prefix)]
        if any(not entry.size for entry in found):
            # The empty objects by which some tools mark a folder don't count.
            folders = {str(parent) for entry in found for parent in PurePosixPath(entry.path).parents}
            found = [entry for entry in found if entry.size or entry.path not in folders]
        return sorted(found)

    def folders(self, prefix: str = "") -> Sequence[str]:
        # Not by a list with delimiter: the library would request its pages until they end, and they may
        # never.
        start = len(prefix) + 1 if prefix else 0
        names = {
            folder
            for entry in self._listed(prefix)
            for folder, slash, _ in [entry.path[start:].partition("/")]
            if slash
        }
        return sorted(names)

    def _listed(self, prefix: str) -> Iterator[Entry]:
        """Yield the entries of a list's pages, in their order.

        Raises:
            StoreError: The objects can't be listed, or the list's pages don't end.
        """
        within = self._within(prefix)
        pages: Iterator[Any] | None = None
        last = None

        def next_page(seconds: float) -> Any:
            nonlocal pages
            if pages is None:
                pages = iter(obstore.list(self._clients.get(seconds), within, offset=last))
            try:
                return next(pages, None)
            except BaseException:
                pages = None
                raise

        listed: set[str] = set()
        end = time.monotonic() + self._policy.list_seconds
        while (page := self._retried(next_page, "listed", prefix)) is not None:
            new = [(meta["path"], meta["size"]) for meta in page if meta["path"] not in listed]
            listed.update(name for name, _ in new)
            if page and not new:
                self._refuse_list(prefix, "its pages repeat themselves")
            if len(listed) > _MOST_LISTED or time.monotonic() > end:
                self._refuse_list(prefix, f"its pages had not ended after {len(listed):,} objects")
            for name, size in new:
                if name.startswith(self._prefix):
                    yield Entry(name[len(self._prefix) :], size)
            last = page[-1]["path"] if page else last

    def _refuse_list(self, prefix: str, reason: str) -> NoReturn:
        raise StoreError(
            f"{self.url}{'/' * bool(prefix)}{prefix} can't be listed: {reason} (at most {_MOST_LISTED:,} objects within "
            f"{self._policy.list_seconds:.0f} s are); check that the endpoint is an object store and the prefix is right"
        )

    def delete(self, paths: Iterable[str]) -> None:
        keys = {self._key(path): path for path in paths}
        for begin in range(0, len(keys), _DELETES_PER_REQUEST):
            batch = [*keys][begin : begin + _DELETES_PER_REQUEST]
            more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            self._retried(lambda seconds, batch=batch: self._remove(batch, seconds), "removed", keys[batch[0]] + more)

    def _remove(self, batch: Sequence[str], seconds: float) -> None:
        client = self._clients.get(seconds)
        try:
            obstore.delete(client, [*batch])
        except FileNotFoundError:
            if not self._missing_is_deleted:
                raise
            for key in batch:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(client, [key])

    def _read_to_end(self, path: str, start: int) -> bytes:
        """Read an object from `start` to its end; the first response has its size, and all of a small one."""
        key, check = self._key(path), ReadCheck()
        _length(path, start, start)

        def request(seconds: float) -> tuple[int, bytes]:
            client = self._clients.get(seconds)
            try:
                answer = obstore.get(client, key, options={"range": (start, start + _FIRST_READ_BYTES)})
            except BaseError as error:
                if is_past_end(error):
                    return start, b""
                raise
            size, body = answer.meta["size"], bytes(answer.bytes())
            if len(body) != min(size - start, _FIRST_READ_BYTES):
                raise TruncatedReadError(f"the answer was cut short after {len(body)} bytes")
            if len(body) == size:
                check(body, answer.meta["e_tag"])
            return size, body

        with self._reading:
            size, first = self._retried(request, "read", path, _FIRST_READ_BYTES)
        if size - start == len(first):
            return first
        buffer = bytearray(size - start)
        self._fill(path, start, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, path: str, start: int, target: memoryview) -> None:
        """Fill `target`; a body that breaks off is continued at its end, if the object is still the same."""
        key, stop, filled, tag = self._key(path), start + len(target), 0, None

        def request(seconds: float) -> None:
            nonlocal filled, tag
            client = self._clients.get(seconds)
            if not len(target):
                obstore.head(client, key)
                return
            try:
                answer = obstore.get(client, key, options={"range": (start + filled, stop)})
            except BaseError as error:
                if not is_past_end(error):
                    raise
                raise ReadPastEndError(
                    f"it ends before byte {start + filled}; expected bytes {start} to {stop}"
                ) from None
            if filled and answer.meta["e_tag"] != tag:
                filled = 0
                raise TruncatedReadError("it was replaced while it was read")
            tag = answer.meta["e_tag"]
            if answer.meta["size"] < stop:
                raise ReadPastEndError(f"it ends at byte {answer.meta['size']}; expected bytes {start} to {stop}")
            if answer.range != (start + filled, stop):
                raise TruncatedReadError(
                    f"the server sent bytes {answer.range[0]} to {answer.range[1]}, not those requested"
                )
            for chunk in answer.stream(_CHUNK_BYTES):
                if len(chunk) > len(target) - filled:
                    raise TruncatedReadError("the answer is longer than requested")
                target[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            if filled < len(target):
                raise TruncatedReadError(f"the answer was cut short at byte {start + filled}")

        with self._reading:
            self._retried(request, "read", path, len(target))

    def _discard(self, key: str) -> bool:
        """Remove an object; True if it could be removed at the first try."""
        try:
            obstore.delete(self._clients.get(self._policy.request_seconds), [key])
        except (BaseError, FileNotFoundError):
            return False
        return True

    def _retried(self, action: Callable[[float], T], verb: str, path: str, num_bytes: int = 0) -> T:
        name = f"{self.url}/{path}" if path else self.url
        return retry(action, verb=verb, name=name, policy=self._policy, num_bytes=num_bytes)

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _within(self, prefix: str) -> str | None:
        return (self._key(prefix) if prefix else self._prefix.rstrip("/")) or None


class _Burst:
    """A delay before a burst of writes until one random moment, so that the stores of many hosts don't start
    at the same time."""

    gap_seconds = 10.0

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._begin = self._last = float("-inf")

    def wait(self) -> None:
        if not self._max_seconds:
            return
        with self._lock:
            time_now = time.monotonic()
            if time_now > self._last + self.gap_seconds:
                self._begin = time_now + random.uniform(0.0, self._max_seconds)
            self._last = max(time_now, self._begin)
        time.sleep(max(self._begin - time_now, 0.0))

    def touch(self) -> None:
        with self._lock:
            self._last = max(self._last, time.monotonic())


def _length(path: str, start: int, stop: int) -> int:
    if not 0 <= start <= stop:
        raise StoreError(f"bytes {start} to {stop} of {path} can't be read; expected 0 <= start <= stop")
    return stop - start
