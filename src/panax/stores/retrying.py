"""How a request to an object store is tried again: full jitter, a deadline for each request, one for all of them together."""

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
"""After so long each further failure is a warning in the log: nobody should take a store that is away for a hang."""

_LOG = logging.getLogger("panax.stores")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy(Validated):
    """What a store does about faults that pass: statuses 408, 429, 500, 502, 503 and 504, broken connections, time-outs, bodies
    that were cut short, and writes that did not arrive as they were sent. Everything else is an error at once.

    Attributes:
        attempts: The most tries of one operation.
        base_seconds: The most that the first wait may take; each further one may take twice as much.
        cap_seconds: The most that any wait may take. Each wait is uniform between 0 and its most (full jitter), so that
            clients which failed together do not come back together.
        request_seconds: How long one request may take.
        deadline_seconds: How long an operation may take with all its tries.
        list_seconds: How long a list may take with all its pages, each of which is an operation.
        slowest_bytes_per_second: Bodies give a request as much more time as they take at this rate, and the operation
            in proportion.
        missing_attempts: How often an object that is to be read is looked for: one that was just listed may be missing once.
        missing_seconds: The most that each wait between these takes.
        stagger_seconds: The most that the first write of a burst waits, uniformly from 0, so that a thousand hosts that
            reach a checkpoint in the same second do not all upload in it.
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
        """The most that the wait after this many failures may take.

        >>> [RetryPolicy().most_seconds(n) for n in (1, 2, 3, 20)]
        [0.25, 0.5, 1.0, 30.0]
        """
        return min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))

    def request_deadline(self, num_bytes: int = 0) -> float:
        """How long a request with a body of this size may take.

        >>> RetryPolicy().request_deadline(2**26)
        76.0
        """
        return self.request_seconds + num_bytes / self.slowest_bytes_per_second

    def deadline(self, num_bytes: int = 0) -> float:
        """How long an operation on this many bytes may take.

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
    """What `action` gives, tried until it does.

    Args:
        action: Takes the seconds that its request may use.
        verb: What is being done, as in "can't be read".
        name: The object, as errors name it.
        num_bytes: The size of the body, which the deadlines grow with.

    Raises:
        MissingError: There is no such object.
        StoreError: It did not succeed; the message has no text of the server's, so that no secret gets into a log.
    """
    begun = clock()
    end = begun + policy.deadline(num_bytes)
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
            # Raised outside of `except`: the library's error, with the server's text, must not be the context of this one.
            took = f"{tries} {'try' if tries == 1 else 'tries'} in {clock() - begun:.1f} s"
            if late:
                took += f", where {policy.deadline(num_bytes):.0f} s is the deadline"
            if failure.missing and verb == "read":
                raise ObjectNotFoundError(f"{name} does not exist ({took})")
            raise StoreError(f"{name} can't be {verb}: {failure.reason} ({took}); {failure.advice}")
        if clock() - begun > SILENT_SECONDS:
            _LOG.warning("%s can't be %s yet: %s (%d tries); trying again", name, verb, failure.reason, tries)
        sleep(wait)
