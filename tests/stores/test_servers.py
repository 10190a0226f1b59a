"""The fault proxy follows its rules, and does nothing else; both servers end by themselves."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from servers import Fault, Faults

TESTS = Path(__file__).parents[1]


def start(*arguments: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "servers", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert process.stdout
    return process, json.loads(process.stdout.readline())["url"]


def ask(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_rules_choose_requests():
    faults = Faults(
        Fault(kind="500", method="PUT", path=r"/shard_\d+", first=2, times=2),
        Fault(kind="reset", path="manifest", times=None),
    )
    met = [faults.meet("PUT", f"/b/shard_{index}") for index in range(4)]
    assert [fault and fault.kind for fault in met] == [None, "500", "500", None]
    assert faults.meet("GET", "/b/shard_1") is None
    assert faults.meet("GET", "/b/manifest") and faults.meet("PUT", "/b/manifest")
    assert faults.counts.requests == {"PUT": 5, "GET": 2}
    assert faults.counts.faults == {"500": 2, "reset": 2}
    with pytest.raises(ValueError, match="expected one of 500"):
        Fault(kind="flood")


def test_bytes_are_counted_by_path(s3_server, proxy, bucket):
    from panax.stores import open_store

    store = open_store(bucket)
    store.write("a/x", [bytes(1000)])
    store.read("a/x", 100, 400)
    store.read("a/x")
    name = f"/{bucket[5:]}/a/x"
    assert proxy.faults.counts.bytes_written == {name: 1000}
    assert proxy.faults.counts.bytes_read == {name: 1300}
    proxy.faults.forget()
    assert proxy.faults.counts.bytes_read == {}


def test_another_process_sets_rules_and_reads_counts(s3_server, bucket, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([{"kind": "503", "method": "GET", "path": "x$"}]))
    process, url = start("proxy", "--upstream", s3_server.url, "--rules", str(rules))
    s3_server.put(f"{bucket[5:]}/x", b"body")
    headers = urllib.request.Request(f"{url}/{bucket[5:]}/x", headers={"Authorization": "AWS key:unchecked"})
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        urllib.request.urlopen(headers, timeout=10)
    caught.value.close()
    with urllib.request.urlopen(headers, timeout=10) as answer:
        assert answer.read() == b"body"
    assert ask(f"{url}/-/rules", "PUT", b'[{"kind": "404", "times": null}]') == (200, b"{}")
    assert ask(f"{url}/anything")[0] == 404
    assert ask(f"{url}/-/rules", "PUT", b'[{"kind": "none"}]')[0] == 400
    counts = json.loads(ask(f"{url}/-/counts")[1])
    assert counts["requests"] == {"GET": 3} and counts["faults"] == {"503": 1, "404": 1}
    assert ask(f"{url}/-/counts", "DELETE") == (200, b"{}")
    assert json.loads(ask(f"{url}/-/counts")[1])["requests"] == {}
    assert process.stdin and process.stdout
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def test_a_server_ends_with_its_time():
    process, _ = start("proxy", "--upstream", "http://127.0.0.1:9", "--seconds", "0.2")
    assert process.wait(10) == 0
    assert process.stdin and process.stdout
    process.stdin.close()
    process.stdout.close()
