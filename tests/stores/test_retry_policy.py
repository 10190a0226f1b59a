"""The policy of retries alone, on a clock of its own."""

import dataclasses
import itertools
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from obstore.exceptions import GenericError

from panax.core import StoreError
from panax.stores import ObjectNotFoundError
from panax.stores.failures import classify_failure
from panax.stores.objects import _Burst
from panax.stores.retry import RetryPolicy, retry

ROOT = Path(__file__).parents[2]
BUSY = "Error performing GET http://host/x in 1ms - Server returned non-2xx status code: 503 Service Unavailable: "


class Clock:
    """A clock that only waiting moves, and `cost` seconds for each request."""

    def __init__(self, cost: float = 0.0) -> None:
        self.now, self.cost, self.waits, self.given = 1000.0, cost, [], []

    def run(self, policy: RetryPolicy, outcomes, num_bytes: int = 0, verb: str = "read"):
        outcomes = iter(outcomes)

        def action(seconds: float):
            self.given.append(seconds)
            self.now += self.cost
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def sleep(seconds: float) -> None:
            self.waits.append(seconds)
            self.now += seconds

        return retry(
            action, verb=verb, name="s3://b/x", policy=policy, num_bytes=num_bytes, sleep=sleep, clock=lambda: self.now
        )


def test_waits_are_uniform_up_to_a_bound_that_doubles():
    policy = RetryPolicy(attempts=8, base_seconds=1.0, cap_seconds=10.0, deadline_seconds=1e6)
    waits = []
    for _ in range(400):
        clock = Clock()
        assert clock.run(policy, [*[GenericError(BUSY)] * 7, "done"]) == "done"
        waits.append(clock.waits)
    bounds = np.array([1, 2, 4, 8, 10, 10, 10])
    shares = np.array(waits) / bounds
    assert shares.min() >= 0 and shares.max() <= 1
    # Of 400 uniform draws the mean strays by 0.0144; five times that is never seen.
    np.testing.assert_allclose(shares.mean(0), 0.5, atol=0.073)
    np.testing.assert_allclose(shares.std(0), 12**-0.5, atol=0.05)


def test_the_deadline_bounds_everything():
    policy = RetryPolicy(attempts=10**6, base_seconds=0.5, cap_seconds=4.0, request_seconds=10.0, deadline_seconds=60.0)
    for cost in (0.0, 3.0, 10.0):
        clock = Clock(cost)
        with pytest.raises(StoreError, match=r"status 503 \(\d+ (try|tries) in .* s, where 60 s is the deadline\)"):
            clock.run(policy, itertools.repeat(GenericError(BUSY)))
        assert clock.now - 1000 <= 60 + cost
        assert max(clock.given) == 10.0
        assert all(seconds <= 60 for seconds in clock.given)


def test_the_last_request_gets_what_is_left():
    policy = RetryPolicy(base_seconds=0.0, request_seconds=10.0, deadline_seconds=25.0)
    clock = Clock(10.0)
    with pytest.raises(StoreError, match=r"3 tries in 30\.0 s, where 25 s is the deadline"):
        clock.run(policy, itertools.repeat(GenericError(BUSY)))
    assert clock.given == [10.0, 10.0, 5.0]


def test_large_bodies_have_more_time():
    policy = RetryPolicy(request_seconds=10.0, deadline_seconds=30.0, slowest_bytes_per_second=100.0)
    clock = Clock()
    clock.run(policy, ["done"], num_bytes=1000)
    assert clock.given == [20.0]
    assert policy.deadline(1000) == 60.0


def test_missing_is_tried_less_often():
    clock = Clock()
    with pytest.raises(ObjectNotFoundError, match=r"^s3://b/x does not exist \(3 tries"):
        clock.run(RetryPolicy(missing_seconds=0.4), itertools.repeat(FileNotFoundError("x")))
    assert len(clock.waits) == 2 and max(clock.waits) <= 0.4
    with pytest.raises(StoreError, match="can't be written: not found") as caught:
        Clock().run(RetryPolicy(), itertools.repeat(FileNotFoundError("x")), verb="written")
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_what_is_no_fault_of_the_store_is_raised_as_it_is():
    for error in (ZeroDivisionError(), MemoryError()):
        clock = Clock()
        with pytest.raises(type(error)):
            clock.run(RetryPolicy(), [error])
        assert clock.waits == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Server returned non-2xx status code: 408 Request Timeout: ", "again"),
        ("Server returned non-2xx status code: 400 Bad Request: <Code>RequestTimeout</Code>", "again"),
        ("Server returned non-2xx status code: 400 Bad Request: <Code>ExpiredToken</Code>", "final"),
        ("Server returned non-2xx status code: 403 Forbidden: <Code>SignatureDoesNotMatch</Code>", "final"),
        ("Server returned non-2xx status code: 501 Not Implemented: ", "final"),
        ("Server returned non-2xx status code: 301 Moved Permanently: ", "final"),
        ("Server returned non-2xx status code: 404 Not Found: <Code>ContainerNotFound</Code>", "final"),
        ("HTTP error: error sending request\n inner: Http(HttpError { kind: Timeout", "again"),
        ("HTTP error: error sending request\n source: Dns: dns error: failed to lookup address", "again"),
        ("HTTP error: error sending request\n InvalidCertificate(UnknownIssuer)", "final"),
        ("Got invalid list response: syntax error", "again"),
        ("Error performing token request: Error performing GET http://169.254.169.254/x - status code: 500", "unsure"),
        ("DeleteObjects request failed for key y: Access Denied (code: AccessDenied)", "final"),
    ],
)
def test_errors_are_understood(text, kind):
    failure = classify_failure(GenericError(text))
    assert failure is not None and failure.kind == kind
    assert failure.reason and failure.advice


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(RetryPolicy) if field.name != "slowest_bytes_per_second"]
)
def test_settings_that_make_no_sense_are_refused(field):
    value = type(getattr(RetryPolicy(), field))(-1)
    with pytest.raises(ValueError, match=f"{field}=-1"):
        RetryPolicy(**{field: value})


def test_the_page_has_every_setting_and_its_default():
    rows = re.findall(
        r"^\| (`[a-z_`, ]+`) \| ([\w., ]+) \|", (ROOT / "docs/runs/stores.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = {}
    for names, values in rows:
        values = [2.0**22 if value == "4 MiB" else float(value) for value in values.split(", ")]
        listed |= dict(zip(re.findall("[a-z_]+", names), values))
    assert listed == dataclasses.asdict(RetryPolicy())


def test_a_burst_waits_once_and_together():
    begun, begins = [], []
    for _ in range(12):
        burst, start = _Burst(0.06), time.monotonic()
        threads = [
            threading.Thread(target=lambda b=burst: (b.wait(), begins.append(time.monotonic()))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        begun.append(begins[-4] - start)
        again = time.monotonic()
        burst.wait()
        assert time.monotonic() - again < 0.05
    assert max(begun) - min(begun) > 0.01, "hosts begin at different moments"
    burst = _Burst(0.0)
    start = time.monotonic()
    burst.wait()
    assert time.monotonic() - start < 0.05


def test_stores_need_no_jax():
    code = "import sys, panax.stores.objects; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
