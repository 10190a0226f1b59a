"""Each fault during each operation: the right bytes at the end, or one clear error; and never a secret in it."""

import dataclasses
import hashlib
import re
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import obstore
import pytest
from obstore.exceptions import GenericError
from servers import KINDS, Fault, FaultProxy
from servers.s3 import ACCESS_KEY, SECRET_KEY, client_environment

from panax.core import StoreError
from panax.stores import Entry, ObjectNotFoundError
from panax.stores.objects import ObjectStore
from panax.stores.retry import RetryPolicy

QUICK = RetryPolicy(
    stagger_seconds=0.0, base_seconds=0.01, cap_seconds=0.1, missing_seconds=0.02, request_seconds=0.3, deadline_seconds=20.0,
    slowest_bytes_per_second=1e9,
)  # fmt: skip
BRIEF = RetryPolicy(
    stagger_seconds=0.0, attempts=1000, base_seconds=0.02, cap_seconds=0.1, request_seconds=0.15, deadline_seconds=0.3,
    slowest_bytes_per_second=1e9,
)  # fmt: skip
PASSING = [kind for kind in KINDS if kind != "403"]
OLD, NEW = (np.random.default_rng(seed).bytes(300_000) for seed in (0, 1))
SAID = {
    "500": "status 500 InternalError", "502": "status 502 BadGateway", "503": "status 503 SlowDown",
    "504": "status 504 GatewayTimeout", "429": "status 429 TooManyRequests", "reset": "reset|connection broke|cut short",
    "lost": "reset|connection broke|cut short", "slow": "took too long", "cut": "cut short|reset|connection broke",
}  # fmt: skip


def opened(bucket: str, policy: RetryPolicy = QUICK) -> ObjectStore:
    """A store with one object `a/x` of the old bytes."""
    store = ObjectStore.open(f"{bucket}/run", policy)
    store.write("a/x", [OLD])
    return store


def stored(s3_server, bucket: str) -> bytes:
    return s3_server.get(f"{bucket.removeprefix('s3://')}/run/a/x")


@pytest.mark.parametrize("kind", PASSING)
def test_a_write_outlives_a_fault(s3_server, proxy, bucket, kind):
    store = opened(bucket)
    proxy.faults.set(Fault(kind=kind, seconds=0.6))
    store.write("a/x", [NEW[:1000], NEW[1000:]])
    assert sum(proxy.faults.counts.faults.values()) == 1
    assert stored(s3_server, bucket) == NEW


@pytest.mark.parametrize("kind", PASSING)
def test_a_read_outlives_a_fault(proxy, bucket, kind):
    store = opened(bucket)
    proxy.faults.set(Fault(kind=kind, seconds=0.6))
    assert store.read("a/x") == OLD
    if kind not in ("flip_read", "flip_write"):
        proxy.faults.set(Fault(kind=kind, seconds=0.6))
        target = bytearray(200_000)
        store.read_into("a/x", 50_000, memoryview(target))
        assert target == OLD[50_000:250_000]
        assert proxy.faults.counts.faults == {kind: 2}


@pytest.mark.parametrize("kind", [kind for kind in PASSING if "flip" not in kind])
def test_listing_and_removing_outlive_a_fault(proxy, bucket, kind):
    store = opened(bucket)
    proxy.faults.set(Fault(kind=kind, seconds=0.6))
    assert store.list() == [Entry("a/x", len(OLD))]
    proxy.faults.set(Fault(kind=kind, seconds=0.6))
    assert store.folders() == ["a"]
    proxy.faults.set(Fault(kind=kind, seconds=0.6))
    store.delete(["a/x", "a/nothing"])
    assert proxy.faults.counts.faults == {kind: 3}
    assert store.list() == []


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        pytest.param(kind, operation, marks=[] if operation == "write" or kind in ("503", "slow") else pytest.mark.slow)
        for kind in SAID
        for operation in ("write", "read", "list", "delete")
    ],
)
def test_a_fault_that_stays_ends_at_the_deadline(proxy, bucket, kind, operation):
    opened(bucket)
    store = ObjectStore.open(f"{bucket}/run", BRIEF)
    proxy.faults.set(Fault(kind=kind, times=None, seconds=2.0))
    act, name = {
        "write": (lambda: store.write("a/x", [NEW]), r"a/x can't be written"),
        "read": (lambda: store.read("a/x"), r"a/x can't be read"),
        "list": (lambda: store.list("a"), r"a can't be listed"),
        "delete": (lambda: store.delete(["a/x"]), r"a/x can't be removed"),
    }[operation]
    begun = time.monotonic()
    with pytest.raises(StoreError, match=f"^{bucket}/run/{name}: ") as caught:
        act()
    # No try begins after the deadline, and each has at most what is left of it; the rest is for a loaded machine.
    assert time.monotonic() - begun < BRIEF.deadline(2**24) + 1.5
    assert re.search(SAID[kind], str(caught.value)), caught.value
    assert re.search(r"\(\d+ (try|tries) in \d+\.\d s, where \d+ s is the deadline\); \w+", str(caught.value))
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_a_number_of_tries_is_kept(proxy, bucket):
    store = ObjectStore.open(bucket, RetryPolicy(attempts=4, base_seconds=0.01, stagger_seconds=0.0))
    proxy.faults.set(Fault(kind="503", times=None))
    with pytest.raises(StoreError, match=r"the server answers status 503 SlowDown \(4 tries in"):
        store.write("x", [b"1"])
    # One layer of retries: the library makes none of its own.
    assert proxy.faults.counts.requests == {"PUT": 4}
    with pytest.raises(StoreError, match="4 tries"):
        store.read("x")
    assert proxy.faults.counts.requests == {"PUT": 4, "GET": 4}


@pytest.mark.parametrize("operation", ["write", "read", "list", "delete"])
def test_lost_permission_is_reported_at_once_and_without_secrets(proxy, bucket, operation):
    store = opened(bucket)
    proxy.faults.forget()
    proxy.faults.set(Fault(kind="403", times=None))
    act = {
        "write": lambda: store.write("a/x", [NEW]),
        "read": lambda: store.read("a/x"),
        "list": lambda: store.list(),
        "delete": lambda: store.delete(["a/x"]),
    }[operation]
    with pytest.raises(
        StoreError, match=r"permission denied \(status 403 AccessDenied\) \(1 try in .* give these"
    ) as caught:
        act()
    assert sum(proxy.faults.counts.requests.values()) == 1
    assert_nothing_secret(caught.value)
    proxy.faults.set()
    assert store.read("a/x") == OLD


@pytest.mark.parametrize("kind", ["503", "404", "429", "reset"])
def test_no_error_holds_a_secret(proxy, bucket, kind):
    """The proxy's answers repeat the request's Authorization header, as some servers do."""
    store = ObjectStore.open(bucket, dataclasses.replace(QUICK, attempts=2, missing_attempts=1))
    proxy.faults.set(Fault(kind=kind, times=None))
    for act in (lambda: store.write("x", [b"1"]), lambda: store.read("x"), lambda: store.folders()):
        with pytest.raises(StoreError) as caught:
            act()
        assert_nothing_secret(caught.value)


def assert_nothing_secret(error: BaseException) -> None:
    shown = "".join(traceback.format_exception(error)) + repr(vars(error))
    link: BaseException | None = error
    while link is not None:
        shown, link = shown + str(link), link.__context__ or link.__cause__
    for secret in (ACCESS_KEY, SECRET_KEY, "Signature", "Credential="):
        assert secret not in shown


def test_a_missing_object_is_looked_for_briefly(proxy, bucket):
    store = ObjectStore.open(bucket, RetryPolicy())
    begun = time.monotonic()
    with pytest.raises(ObjectNotFoundError, match=rf"{bucket}/x does not exist \(3 tries in"):
        store.read("x")
    assert time.monotonic() - begun < 1.5
    assert proxy.faults.counts.requests == {"GET": 3}


def test_no_such_bucket(proxy):
    store = ObjectStore.open("s3://not-there/x", QUICK)
    for act in (lambda: store.write("y", [b"1"]), lambda: store.read("y"), store.list, lambda: store.delete(["y"])):
        with pytest.raises(
            StoreError, match=r"no such bucket .*NoSuchBucket\) \(1 try .*create it, or correct"
        ) as caught:
            act()
        assert not isinstance(caught.value, ObjectNotFoundError)


def test_no_credentials(monkeypatch):
    for name in client_environment(""):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"no credentials were found .*check the credentials in the environment"):
        ObjectStore.open("s3://bucket", QUICK).read("x")


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("az://container/x", {}),
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_NAME": "name", "AZURE_STORAGE_ACCOUNT_KEY": "!SECRET!"}),
        ("gs://bucket/x", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "SECRET"'}),
    ],
)
def test_settings_that_are_missing_or_wrong_are_reported_when_it_is_opened(monkeypatch, url, settings):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        StoreError, match=r"can't be opened: .* missing or not understood; check the credentials"
    ) as caught:
        ObjectStore.open(url)
    assert caught.value.__context__ is None
    assert "SECRET" not in str(caught.value)


def test_azure_takes_the_environment(monkeypatch):
    for name, value in {
        "ENDPOINT": "http://127.0.0.1:9",
        "ALLOW_HTTP": "true",
        "STORAGE_ACCOUNT_KEY": "c2VjcmV0",
    }.items():
        monkeypatch.setenv(f"AZURE_{name}", value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with pytest.raises(StoreError, match=r"az://container/x/y can't be read: (the connection was|no connection)"):
        ObjectStore.open("az://container/x", BRIEF).read("y")


def test_stores_that_state_not_found_when_removing(tmp_path, monkeypatch):
    """As Google and Azure do."""
    store = ObjectStore.open(f"memory://{tmp_path.name}", QUICK)
    store.write("a", [b"1"])
    store.write("c", [b"1"])
    original = obstore.delete

    def strict(client, paths):
        for path in paths:
            obstore.head(client, path)
            original(client, [path])

    monkeypatch.setattr("panax.stores.objects.obstore.delete", strict)
    store.delete(["a", "b", "c"])
    assert store.list() == []


@pytest.mark.parametrize(
    ("code", "said"),
    [("AccessDenied", r"permission denied \(AccessDenied\) \(1 try"), ("InternalError", r"InternalError \(2 tries")],
)
def test_one_object_of_many_that_is_not_removed_is_an_error(monkeypatch, code, said):
    """S3 answers 200 and lists in the body the keys that it did not remove."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            error = f"<Error><Key>y</Key><Code>{code}</Code><Message>No.</Message></Error>"
            self.wfile.write(f"<DeleteResult><Deleted><Key>x</Key></Deleted>{error}</DeleteResult>".encode())

        def log_message(self, format, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        serving.start()
        for name, value in client_environment(f"http://127.0.0.1:{server.server_address[1]}").items():
            monkeypatch.setenv(name, value)
        store = ObjectStore.open("s3://bucket", dataclasses.replace(QUICK, attempts=2, request_seconds=5.0))
        with pytest.raises(StoreError, match=f"s3://bucket/x and 1 more can't be removed: .*{said}"):
            store.delete(["x", "y"])
        server.shutdown()
        serving.join()


def test_plain_http_is_refused_unless_allowed(proxy, bucket, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StoreError, match=r"not allowed \(1 try .*AWS_ALLOW_HTTP=true"):
        ObjectStore.open(bucket, QUICK).read("x")


def test_nobody_listens(proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"connection (was refused|could be made) \(\d+ tries"):
        ObjectStore.open(bucket, BRIEF).read("x")


@pytest.mark.parametrize("opaque_tags", [False, True])
def test_bits_that_always_flip_are_never_left_in_place_silently(s3_server, proxy, bucket, monkeypatch, opaque_tags):
    with FaultProxy(s3_server.url, opaque_tags=opaque_tags) as second:
        monkeypatch.setenv("AWS_ENDPOINT_URL", second.url)
        store = opened(bucket)
        second.faults.set(Fault(kind="flip_write"))
        store.write("a/x", [NEW])
        assert stored(s3_server, bucket) == NEW
        second.faults.set(Fault(kind="flip_write", method="PUT", times=None))
        store = ObjectStore.open(f"{bucket}/run", RetryPolicy(attempts=3, base_seconds=0.01, stagger_seconds=0.0))
        with pytest.raises(
            StoreError, match=r"other bytes than were sent \(3 tries .*other bytes was there, it was removed"
        ):
            store.write("a/x", [OLD])
        assert store.list() == []
        second.faults.set(
            Fault(kind="flip_write", method="PUT", times=None), Fault(kind="503", method="POST|DELETE", times=None)
        )
        with pytest.raises(StoreError, match="it could not be removed: don't use it"):
            store.write("a/x", [OLD])


def test_opaque_tags_cost_a_read_and_no_retry(s3_server, proxy, bucket, monkeypatch):
    with FaultProxy(s3_server.url, opaque_tags=True) as second:
        monkeypatch.setenv("AWS_ENDPOINT_URL", second.url)
        store = opened(bucket)
        assert second.faults.counts.requests == {"PUT": 1, "GET": 1}
        second.faults.forget()
        # The tag looks like an MD5 and is none: the same bytes again are believed.
        assert store.read("a/x") == OLD
        assert second.faults.counts.requests == {"GET": 2}


@pytest.mark.parametrize("at", [0.0, 0.5, 0.99])
def test_a_read_that_breaks_off_continues_from_there(proxy, bucket, monkeypatch, at):
    monkeypatch.setattr("panax.stores.objects._CHUNK_BYTES", 2**12)
    store = ObjectStore.open(bucket, RetryPolicy(stagger_seconds=0.0, base_seconds=0.01))
    bytes_ = np.random.default_rng(2).bytes(2**22)
    store.write("x", [bytes_])
    proxy.faults.set(Fault(kind="cut", at=at, times=3))
    target = bytearray(len(bytes_))
    store.read_into("x", 0, memoryview(target))
    assert target == bytes_
    assert proxy.faults.counts.requests["GET"] == 4
    # What comes again is what the library had not yet handed on: less than half of each of the three.
    assert sum(proxy.faults.counts.bytes_read.values()) < 2.5 * len(bytes_)


def test_a_read_of_what_is_replaced_begins_again(s3_server, proxy, bucket, monkeypatch):
    monkeypatch.setattr("panax.stores.objects._CHUNK_BYTES", 2**12)
    store = ObjectStore.open(bucket, RetryPolicy(stagger_seconds=0.0, base_seconds=0.25))
    old, new = bytes(2**21), bytes([1]) * 2**21
    store.write("x", [old])
    target = bytearray(len(old))
    proxy.faults.set(Fault(kind="cut", at=0.9))
    replaced = threading.Thread(
        target=lambda: (_wait_for(lambda: proxy.faults.counts.faults), s3_server.put(f"{bucket[5:]}/x", new))
    )
    monkeypatch.setattr("panax.stores.retry.random.uniform", lambda low, high: high)
    replaced.start()
    store.read_into("x", 0, memoryview(target))
    replaced.join()
    assert target == new


def _wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def test_large_objects_go_in_parts_and_are_verified(s3_server, proxy, bucket, monkeypatch):
    monkeypatch.setattr("panax.stores.objects.ONE_PUT_BYTES", 2**20)
    monkeypatch.setattr("panax.stores.objects.PART_BYTES", 5 * 2**20)
    monkeypatch.setattr("panax.stores.objects._FIRST_READ_BYTES", 2**20)
    store = ObjectStore.open(f"{bucket}/run", RetryPolicy(stagger_seconds=0.0, base_seconds=0.01))
    bytes_ = np.random.default_rng(3).bytes(12 * 2**20 + 5)
    parts = [bytes_[:7_000_000], bytes_[7_000_000:7_000_001], bytes_[7_000_001:]]
    store.write("a/x", parts)
    # Created, three parts, completed; the tag of parts is the MD5 of their MD5s, so nothing is read back.
    assert proxy.faults.counts.requests == {"POST": 2, "PUT": 3}
    assert store.read("a/x") == bytes_
    for fault in (Fault(kind="flip_write", method="PUT"), Fault(kind="503", method="PUT")):
        proxy.faults.set(fault)
        store.write("a/x", parts)
        assert hashlib.md5(stored(s3_server, bucket)).digest() == hashlib.md5(bytes_).digest()
    assert sum(proxy.faults.counts.faults.values()) == 2


def test_a_list_continues_where_it_broke_off(tmp_path, monkeypatch):
    store = ObjectStore.open(f"memory://{tmp_path.name}/run", QUICK)
    for index in range(120):
        store.write(f"{index:03d}", [b"1"])
    original, offsets = obstore.list, []

    def breaking(*arguments, offset, **options):
        offsets.append(offset)
        for number, page in enumerate(original(*arguments, offset=offset, **options)):
            if number == 1 and len(offsets) == 1:
                raise GenericError("connection reset: ConnectionReset")
            yield page

    monkeypatch.setattr("panax.stores.objects.obstore.list", breaking)
    assert store.list() == [Entry(f"{index:03d}", 1) for index in range(120)]
    assert offsets == [None, "run/049"]


@pytest.mark.slow
def test_a_long_list_continues_where_it_broke_off(s3_server, proxy, bucket):
    name = bucket.removeprefix("s3://")
    for index in range(1003):
        s3_server.put(f"{name}/run/{index:04d}/x", b"1")
    s3_server.put(f"{name}/run/", b"")
    store = ObjectStore.open(f"{bucket}/run", dataclasses.replace(QUICK, request_seconds=30.0, deadline_seconds=60.0))
    proxy.faults.set(Fault(kind="503", first=2), Fault(kind="cut", first=3))
    assert store.list() == [Entry(f"{index:04d}/x", 1) for index in range(1003)]
    assert proxy.faults.counts.requests == {"GET": 4}
    proxy.faults.forget()
    proxy.faults.set(Fault(kind="503", first=2))
    assert len(store.folders()) == 1003
    proxy.faults.forget()
    paths = [entry.path for entry in store.list()]
    proxy.faults.set(Fault(kind="reset", first=2, method="POST"))
    store.delete(paths)
    assert proxy.faults.counts.requests["POST"] == 3
    assert store.list() == []


def test_no_more_requests_at_once_than_configured(proxy, bucket):
    store = ObjectStore.open(bucket, RetryPolicy(stagger_seconds=0.0))
    proxy.faults.set(Fault(kind="slow", times=None, seconds=0.03))
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda index: store.write(f"{index}", [b"12"]), range(32)))
    assert 2 <= proxy.faults.counts.max_at_once <= store.writers
