"""Retries of requests to an object store: full jitter, a deadline for each request, and one for all."""

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ..core.errors import StoreError
from ..core.validation import Validated
from .failures import classify_failure
from .store import ObjectNotFoundError

T = TypeVar("T")

_LEAST_SECONDS = 0.05

SILENT_SECONDS = 5.0
"""Time after which each further failure is a warning in the log, so that an unreachable store is not taken
for a hang."""

_LOG = logging.getLogger("panax.stores")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy(Validated):
    """Handling of transient faults: statuses 408, 429, 500, 502, 503 and 504, broken connections, time-outs,
    truncated bodies, and writes that did not arrive as they were sent. Everything else is an error at once.

    Attributes:
        attempts: Maximum number of tries of one operation.
        base_seconds: Maximum of the first wait; that of each further one is twice as long.
        cap_seconds: Maximum of any wait. Each wait is uniform between 0 and its maximum (full jitter), so
            that clients that failed together do not come back together.
        request_seconds: Deadline of one request.
        deadline_seconds: Deadline of an operation with all its tries.
        list_seconds: Deadline of a list with all its pages, each of which is an operation.
        slowest_bytes_per_second: Bodies extend the deadline of a request by the time that they take at this
            rate, and that of the operation in proportion.
        missing_attempts: Number of tries to read an object that is not found: one that was just listed may be
            missing once.
        missing_seconds: Maximum of each wait between these tries.
        stagger_seconds: Maximum wait of the first write of a burst, uniform from 0, so that a thousand hosts
            that reach a checkpoint in the same second do not all upload in it.
    """

    attempts: int = 12
    base_seconds: float = 0.25
    cap_seconds: float = 30.0
    request_seconds: float = 60.0
    deadline_seconds: float = 300.0
    list_seconds: float = 600.0
    slowest_bytes_per_second: float = 4.0 * 2**20
    missing_attempts: int = 3
    missing_seconds: float = 0.4
    stagger_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("attempts", "missing_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 1")
        for name in ("base_seconds", "cap_seconds", "missing_seconds", "stagger_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; expected 0 or more seconds")
        for name in ("request_seconds", "deadline_seconds", "list_seconds", "slowest_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}; expected more than 0")

    def max_seconds(self, failures: int) -> float:
        """Return the maximum wait after this many failures, in seconds.

        >>> [RetryPolicy().max_seconds(n) for n in (1, 2, 3, 20)]
        [0.25, 0.5, 1.0, 30.0]
        """
        return min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))

    def request_deadline(self, num_bytes: int = 0) -> float:
        """Return the deadline of a request with a body of this size, in seconds.

        >>> RetryPolicy().request_deadline(2**26)
        76.0
        """
        return self.request_seconds + num_bytes / self.slowest_bytes_per_second

    def deadline(self, num_bytes: int = 0) -> float:
        """Return the deadline of an operation on this many bytes, in seconds.

        >>> RetryPolicy().deadline(2**26)
        380.0
        """
        return self.deadline_seconds * self.request_deadline(num_bytes) / self.request_seconds


def retry(
    action: Callable[[float], T],
    *,
    verb: str,
    name: str,
    policy: RetryPolicy,
    num_bytes: int = 0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `action` until it succeeds, and return its result.

    Args:
        action: Called with the seconds that its request may take.
        verb: The operation, as in "can't be read".
        name: The object's name in errors.
        num_bytes: The size of the body, with which the deadlines grow.

    Raises:
        ObjectNotFoundError: The object does not exist.
        StoreError: The action did not succeed; the message has none of the server's text, so that no secret
            gets into a log.
    """
    start = clock()
    end = start + policy.deadline(num_bytes)
    tries = unsure = 0
    while True:
        tries += 1
        try:
            return action(max(min(policy.request_deadline(num_bytes), end - clock()), _LEAST_SECONDS))
        except Exception as error:
            failure = classify_failure(error)
            if failure is None:
                raise
        unsure += failure.kind == "unsure"
        spent = failure.kind == "final" or tries >= policy.attempts or unsure >= policy.missing_attempts
        wait = random.uniform(0.0, policy.missing_seconds if failure.kind == "unsure" else policy.max_seconds(tries))
        late = not spent and clock() + wait >= end
        if spent or late:
            # Raised outside of `except`: the library's error, with the server's text, must not be the context
            # of this one.
            took = f"{tries} {'try' if tries == 1 else 'tries'} in {clock() - start:.1f} s"
            if late:
                took += f", where {policy.deadline(num_bytes):.0f} s is the deadline"
            if failure.missing and verb == "read":
                raise ObjectNotFoundError(f"{name} does not exist ({took})")
            raise StoreError(f"{name} can't be {verb}: {failure.reason} ({took}); {failure.advice}")
        if clock() - start > SILENT_SECONDS:
            _LOG.warning("%s can't be %s yet: %s (%d tries); trying again", name, verb, failure.reason, tries)
        sleep(wait)
