"""moto's S3 server as a process of its own, which ends with the one that started it."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote

ACCESS_KEY, SECRET_KEY = "AKIAFAKEKEYOFTHETESTS", "fake+secret/of/the/tests"


class S3Server:
    """An empty S3 server for as long as a `with` block lasts. It checks no signatures.

    Attributes:
        url: Its address.
    """

    def __init__(self, seconds: float = 1800.0) -> None:
        self._seconds = seconds

    def __enter__(self) -> "S3Server":
        tests = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "servers", "s3", "--seconds", str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(tests)},
        )
        assert self._process.stdout
        self.url: str = json.loads(self._process.stdout.readline())["url"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def make_bucket(self, name: str) -> str:
        """The address of a new bucket."""
        self.put(name, b"")
        return f"s3://{name}"

    def put(self, key: str, body: bytes) -> None:
        """Store an object past every proxy; `key` begins with the bucket."""
        self._request("PUT", key, body or None)

    def get(self, key: str) -> bytes:
        """The stored objects, past every proxy."""
        return self._request("GET", key)

    def _request(self, method: str, key: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/octet-stream", "Authorization": f"AWS {ACCESS_KEY}:unchecked"}
        request = urllib.request.Request(f"{self.url}/{quote(key)}", data=body, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()


def client_environment(endpoint: str) -> dict[str, str]:
    """The variables with which a client of S3 comes to `endpoint`."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
