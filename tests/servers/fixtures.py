"""Fixtures of the servers; a conftest.py imports those that its tests use."""

import itertools
from collections.abc import Iterator

import pytest

from .proxy import FaultProxy
from .s3 import S3Server, client_environment

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy without rules before the S3 server; the environment leads clients to it."""
    with FaultProxy(s3_server.url) as proxy:
        for name, value in client_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def bucket(s3_server: S3Server, proxy: FaultProxy) -> str:
    """The address of a new bucket, reached through the proxy."""
    return s3_server.make_bucket(f"bucket{next(_numbers)}")
