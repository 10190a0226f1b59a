"""Files of object stores: the objects that an address or a glob matches, and local copies of them."""

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from panax.core.errors import DataError, StoreError
from panax.stores import ObjectNotFoundError, Store, is_remote, open_store, redact_address

from .file_cache import FileCache

PART_BYTES = 2**24
"""Size of the parts in which a copy is read, several at once."""

_READS_AT_ONCE = 4
_TRIES = 4
_GLOB = re.compile(r"[*?\[]")
_MD5 = re.compile(r"[0-9a-f]{32}")


class RemoteObject(NamedTuple):
    """An object of a store.

    Attributes:
        url: Its address.
        path: Its path below the root of `store`.
        size: Size in bytes.
        tag: Changes when the content does: the store's tag, or the time of the last change if it has none.
        store: The store of the object.
        clients: Clients of its bucket.
    """

    url: str
    path: str
    size: int
    tag: str
    store: Store
    clients: Any

    @contextlib.contextmanager
    def open_local(self, *, wait: bool = True) -> Iterator[Path]:
        """Yield a local copy, which exists as long as the block lasts.

        Args:
            wait: True to wait for room in the cache.

        Raises:
            StoreError: The object can't be read, after all of the store's retries.
            DataError: The object has changed since it was listed, or there is no room for the copy.
        """
        # The suffix is preserved: readers detect the compression from it.
        key = hashlib.sha256(repr((self.url, self.size, self.tag)).encode()).hexdigest()[:32]
        suffix = re.sub(r"[^A-Za-z0-9.]", "", PurePosixPath(self.path).suffix)
        with FileCache.default(wait=wait).lease(f"{key}{suffix}", self.size, self._copy, self.url) as path:
            yield path

    def _copy(self, descriptor: int) -> None:
        """Copy the object, and verify the store's tag if it is the MD5 of the content."""
        unlike: set[str] = set()
        for _ in range(_TRIES):
            copy, starts = functools.partial(self._copy_part, descriptor), range(0, self.size, PART_BYTES)
            if len(starts) <= 1:
                all(map(copy, starts))
            else:
                with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
                    all(pool.map(copy, starts))
            if stat_object(self).tag != self.tag:
                raise DataError(f"{self.url} was replaced while it was read; run the same again")
            checksum = _md5(descriptor)
            # The same bytes twice show that the tag is not an MD5, for example if the server encrypts with a
            # key.
            if not _MD5.fullmatch(self.tag) or checksum == self.tag or checksum in unlike:
                return
            unlike.add(checksum)
        raise StoreError(f"{self.url} does not match its checksum, in {_TRIES} tries; check whether it is damaged")

    def _copy_part(self, descriptor: int, start: int) -> bool:
        part = bytearray(min(PART_BYTES, self.size - start))
        self.store.read_into(self.path, start, memoryview(part))
        done = 0
        while done < len(part):
            done += os.pwrite(descriptor, memoryview(part)[done:], start + done)
        return True


def find_objects(url: str, patterns: Sequence[str]) -> list[RemoteObject]:
    """Find the objects of an address: one object, those of a folder that match a pattern, or those that match
    a glob.

    Hidden objects, and objects in hidden folders, are skipped.

    Raises:
        DataError: No object was found.
        StoreError: The store can't be listed.
    """
    scheme, _, rest = url.partition("://")
    parts = rest.rstrip("/").split("/")
    fixed = next((i for i, part in enumerate(parts) if _GLOB.search(part)), len(parts))
    if fixed == 0:
        raise DataError(
            f"{redact_address(url)} names no bucket; expected a glob inside one, as in {scheme}://bucket/*.jsonl"
        )
    root = f"{scheme}://{'/'.join(parts[:fixed])}"
    if fixed < len(parts):
        patterns_of_glob = [_regex("/".join(parts[fixed:]))]
        matches = _matching(list_objects(root), patterns_of_glob)
        if not matches:
            raise DataError(f"{url} matches nothing; expected a glob that matches objects under {root}")
        return matches
    listed = list_objects(root)
    if not listed and fixed > 1:
        parent, _, name = root.rpartition("/")
        with contextlib.suppress(ObjectNotFoundError):
            return [stat_object(RemoteObject(root, name, 0, "", open_store(parent), _clients(root)))]
    matches = _matching(listed, [_regex(pattern) for pattern in patterns])
    if not listed:
        raise DataError(f"{url} does not exist; expected an object, a folder of some, or a glob that matches some")
    if not matches:
        raise DataError(f"no object in {url} matches {' or '.join(patterns)}; name another folder")
    return matches


def list_objects(root: str) -> list[RemoteObject]:
    """List every object below an address, in the order of their names.

    Raises:
        StoreError: The store can't be listed, or its credentials are missing.
    """
    import obstore

    store, prefix, clients = open_store(root), _prefix(root), _clients(root)

    def every(client: Any) -> list[Any]:
        return [meta for page in obstore.list(client, prefix or None) for meta in page]

    metas: Any = _requested(root, "listed", clients, every)
    objects = []
    for meta in metas:
        path = meta["path"].removeprefix(f"{prefix}/") if prefix else meta["path"]
        if (not prefix or meta["path"].startswith(f"{prefix}/")) and meta["size"]:
            objects.append(RemoteObject(f"{root.rstrip('/')}/{path}", path, meta["size"], _tag(meta), store, clients))
    return sorted(objects, key=lambda each: each.path.split("/"))


def stat_object(listed: RemoteObject) -> RemoteObject:
    """Return the object's current description.

    Raises:
        ObjectNotFoundError: The object does not exist.
        StoreError: The store can't be reached.
    """
    import obstore

    key = _prefix(listed.url)
    meta: Any = _requested(listed.url, "read", listed.clients, lambda client: obstore.head(client, key))
    return listed._replace(size=meta["size"], tag=_tag(meta))


def _clients(url: str) -> Any:
    from panax.stores.clients import Clients, parse_address
    from panax.stores.retry import RetryPolicy

    clients = Clients(parse_address(url))
    clients.check(url, RetryPolicy().request_seconds)
    return clients


def _requested(url: str, verb: str, clients: Any, request: Callable[[Any], Any]) -> Any:
    from panax.stores.retry import RetryPolicy, retry

    policy = RetryPolicy(missing_attempts=1) if url.startswith("memory://") else RetryPolicy()
    return retry(lambda seconds: request(clients.get(seconds)), verb=verb, name=url, policy=policy)


def _prefix(url: str) -> str:
    assert is_remote(url)
    return url.partition("://")[2].rstrip("/").partition("/")[2]


def _tag(meta: Any) -> str:
    return (meta["e_tag"] or "").strip('"') or meta["last_modified"].isoformat()


def _matching(objects: list[RemoteObject], patterns: list[re.Pattern[str]]) -> list[RemoteObject]:
    return [
        each
        for each in objects
        if any(pattern.fullmatch(each.path) for pattern in patterns)
        and not any(part.startswith(".") for part in each.path.split("/"))
    ]


def _regex(pattern: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression; `**` is any number of folders.

    >>> bool(_regex("**/*.jsonl").fullmatch("a/b.jsonl")), bool(_regex("*.jsonl").fullmatch("a/b.jsonl"))
    (True, False)
    """
    parts = pattern.split("/")
    regexes = []
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            regexes.append(".*" if last else "(?:[^/]+/)*")
        else:
            regexes.append(_regex_of_part(part) + ("" if last else "/"))
    return re.compile("".join(regexes))


def _regex_of_part(part: str) -> str:
    regex, rest = "", part
    while rest:
        if choice := re.match(r"\[(!?)([^]]+)\]", rest):
            inside = choice[2].replace("\\", r"\\").replace("^", r"\^")
            regex, rest = f"{regex}[{'^' if choice[1] else ''}{inside}]", rest[choice.end() :]
            continue
        regex += {"*": "[^/]*", "?": "[^/]"}.get(rest[0], re.escape(rest[0]))
        rest = rest[1:]
    return regex


def _md5(descriptor: int) -> str:
    digest, start = hashlib.md5(usedforsecurity=False), 0
    while block := os.pread(descriptor, PART_BYTES, start):
        digest.update(block)
        start += len(block)
    return digest.hexdigest()
