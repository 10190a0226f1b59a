"""Which request meets which fault, and what was asked for: shared by a proxy's threads and the test that set it."""

import collections
import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

KINDS = ("500", "502", "503", "504", "429", "404", "403", "reset", "lost", "slow", "cut", "flip_read", "flip_write")
"""Statuses answered without asking the server; the connection reset before it is asked, or after it has done what was asked
and before it answers (lost); a pause in mid-body; the body cut there; one bit flipped in a read or written body."""

WRONG_ANSWERS = {
    "page": b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Sign in to the network</body></html>",
    "error": b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>InternalError</Code><Message>Try again</Message></Error>',
    "empty": b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>",
    "repeated": b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<KeyCount>1</KeyCount><IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken><Contents>"
    b"<Key>run/step_00000001/x</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
    b"</ListBucketResult>",
}
"""Bodies that are answered with status 200 in place of what was asked for. "stale" answers what the same request was answered
when it was first made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault for some of the requests that match.

    Attributes:
        kind: One of KINDS.
        method: A regular expression that the whole method matches.
        path: A regular expression that is found in the path with its query, both unquoted.
        first: Which of the matching requests meets it first, from 1.
        times: How many meet it, from there on; None for all.
        seconds: How long "slow" pauses.
        at: Where in the body it happens, as a fraction of its length.
    """

    kind: str
    method: str = ".*"
    path: str = ""
    first: int = 1
    times: int | None = 1
    seconds: float = 5.0
    at: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, *WRONG_ANSWERS, "stale"):
            raise ValueError(f"kind={self.kind!r}; expected one of {', '.join((*KINDS, *WRONG_ANSWERS, 'stale'))}")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Requests seen by a proxy.

    Attributes:
        requests: By method.
        faults: By kind: how many requests met it.
        bytes_read: By path without query: bytes of answers' bodies that were sent on.
        bytes_written: By path without query: bytes of requests' bodies that were received.
        max_at_once: How many requests there were at the same time.
    """

    requests: dict[str, int]
    faults: dict[str, int]
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    max_at_once: int


class Faults:
    """The rules in force and the counts, for any number of threads."""

    def __init__(self, *rules: Fault) -> None:
        self._lock = threading.Lock()
        names = ("requests", "faults", "bytes_read", "bytes_written")
        self._counters = {name: collections.Counter() for name in names}
        self._now = self._most = 0
        self.set(*rules)

    def set(self, *rules: Fault) -> None:
        """Put these rules in place of all; their counting of requests begins now."""
        with self._lock:
            self._rules = [(rule, re.compile(rule.method), re.compile(rule.path)) for rule in rules]
            self._matched = [0] * len(rules)

    def set_json(self, text: str) -> None:
        """The same from a JSON list of objects with the fields of `Fault`."""
        self.set(*(Fault(**fields) for fields in json.loads(text)))

    def load(self, file: str | Path) -> None:
        self.set_json(Path(file).read_text(encoding="utf-8"))

    def meet(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets: of the rules that it matches, the first that is due."""
        with self._lock:
            self._counters["requests"][method] += 1
            path, met = unquote(path), None
            for index, (rule, methods, paths) in enumerate(self._rules):
                if methods.fullmatch(method) and paths.search(path):
                    self._matched[index] += 1
                    since = self._matched[index] - rule.first
                    if met is None and since >= 0 and (rule.times is None or since < rule.times):
                        met = rule
            if met:
                self._counters["faults"][met.kind] += 1
            return met

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as long as it lasts."""
        with self._lock:
            self._now += 1
            self._most = max(self._most, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def count(self, what: str, path: str, num_bytes: int) -> None:
        with self._lock:
            self._counters[what][unquote(path.partition("?")[0])] += num_bytes

    @property
    def counts(self) -> Counts:
        """What was seen up to now."""
        with self._lock:
            return Counts(**{name: dict(counter) for name, counter in self._counters.items()}, max_at_once=self._most)

    def forget(self) -> None:
        """Begin all counts at 0."""
        with self._lock:
            for counter in self._counters.values():
                counter.clear()
            self._most = self._now
