"""The memory of another host as a store: the same bytes, whole or not at all, for those who know the token."""

import contextlib
import http.client
import socket
import threading
import time

import pytest

from panax.core import StoreError
from panax.stores import LocalStore, ObjectNotFoundError
from panax.stores import peer as peer_module
from panax.stores.peer import PeerServer, PeerStore, UnionStore, sign_request


@pytest.fixture
def served(tmp_path):
    local = LocalStore(tmp_path / "served")
    server = PeerServer(local, "secret")
    yield local, server
    server.close()


@pytest.fixture
def peer(served):
    return PeerStore(served[1].address, "secret")


def test_binds_loopback_alone(served):
    assert served[1].address.startswith("127.0.0.1:")


def test_writes_reads_lists_and_deletes(served, peer):
    local, _ = served
    data = bytes(range(256)) * 50_000
    peer.write("a b/c#1.bin", [data[:7], memoryview(data)[7:]])
    assert local.read("a b/c#1.bin") == data == peer.read("a b/c#1.bin")
    assert peer.read("a b/c#1.bin", 3, 9) == data[3:9]
    target = bytearray(1000)
    peer.read_into("a b/c#1.bin", 5, memoryview(target))
    assert target == data[5:1005]
    assert peer.list() == local.list() and peer.folders() == ["a b"]
    assert [entry.path for entry in peer.list("a b")] == ["a b/c#1.bin"]
    peer.delete(["a b/c#1.bin", "never there"])
    assert peer.list() == []


def test_many_threads_at_once(peer):
    def write(number: int) -> None:
        peer.write(f"{number}", [bytes([number]) * 100_000])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [peer.read(f"{n}") for n in range(8)] == [bytes([n]) * 100_000 for n in range(8)]


def test_what_is_missing_or_cut_short_is_an_error(peer):
    with pytest.raises(ObjectNotFoundError, match="does not exist"):
        peer.read("nothing")
    peer.write("short", [b"123"])
    with pytest.raises(StoreError, match="cut short"):
        peer.read_into("short", 1, memoryview(bytearray(9)))


def test_a_wrong_token_gets_nothing(served):
    local, server = served
    local.write("x", [b"1"])
    stranger = PeerStore(server.address, "guess")
    for attempt in (lambda: stranger.read("x"), lambda: stranger.write("y", [b"2"]), lambda: stranger.delete(["x"])):
        with pytest.raises(StoreError, match="403 wrong token"):
            attempt()
    assert [entry.path for entry in local.list()] == ["x"]


def test_a_request_that_was_overheard_is_good_for_nothing_else(served):
    local, server = served
    local.write("x", [b"1"])
    signed = sign_request("secret", "DELETE", "/other", 0)
    assert "secret" not in signed

    def asked(method, path, size=0):
        connection = http.client.HTTPConnection(server.address, timeout=10)
        connection.request(
            method, path, body=b"1" * size, headers={"Authorization": signed, "Content-Length": str(size)}
        )
        with contextlib.closing(connection.getresponse()) as response:
            status = response.status
        connection.close()
        return status

    assert asked("DELETE", "/x") == asked("GET", "/other") == asked("DELETE", "/other", 1) == 403
    assert asked("DELETE", "/other") == 200
    assert asked("DELETE", "/other") == 403  # again
    assert local.read("x") == b"1"


@pytest.mark.parametrize("path", ["/../outside", "/%2e%2e/outside", "/a/../../outside"])
def test_no_path_leads_outside(served, tmp_path, path):
    _, server = served
    (tmp_path / "outside").write_text("mine")
    for method in ("GET", "PUT", "DELETE"):
        connection = http.client.HTTPConnection(server.address, timeout=10)
        connection.request(method, path, body=b"1", headers={"Authorization": sign_request("secret", method, path, 1)})
        with contextlib.closing(connection.getresponse()) as response:
            assert response.status == 500
        connection.close()
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_sender_that_dies_leaves_nothing(served):
    local, server = served
    connection = http.client.HTTPConnection(server.address, timeout=10)
    connection.putrequest("PUT", "/half")
    connection.putheader("Authorization", sign_request("secret", "PUT", "/half", 1000))
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    connection.send(b"x" * 10)
    connection.close()
    # The next answer comes after the server has seen the end of that one, or while it still waits for it: nothing either way.
    PeerStore(server.address, "secret").write("other", [b"1"])
    assert [entry.path for entry in local.list()] == ["other"]


def test_too_large_a_body_is_refused(tmp_path):
    server = PeerServer(LocalStore(tmp_path), "secret", max_bytes=100)
    try:
        with pytest.raises(StoreError):
            PeerStore(server.address, "secret").write("x", [b"1" * 101])
    finally:
        server.close()


def test_a_peer_that_is_gone_is_an_error(served, peer):
    served[1].close()
    with pytest.raises(StoreError, match="can't be reached"):
        PeerStore(served[1].address, "secret").read("x")


def test_a_union_asks_the_next_holder_when_asked_again(tmp_path):
    first, second = LocalStore(tmp_path / "1"), LocalStore(tmp_path / "2")
    first.write("f", [b"flipped"])
    second.write("f", [b"perfect"])
    union = UnionStore("both", [first, second], {"f": [0, 1]}, {"f": 7})
    assert [union.read("f") for _ in range(3)] == [b"flipped", b"perfect", b"flipped"]
    first.delete(["f"])
    assert union.read("f") == b"perfect" == union.read("f")
    with pytest.raises(ObjectNotFoundError, match="in no host's memory"):
        union.read("g")
    with pytest.raises(StoreError, match="only for reading"):
        union.write("f", [b""])


def test_connections_without_the_token_are_few_and_short(served, peer, monkeypatch):
    _, server = served
    monkeypatch.setattr(server._server, "max_waiting", 8)
    monkeypatch.setattr(server._server, "waiting_seconds", 0.3)
    host, port = server.address.split(":")
    before = threading.active_count()
    opened = [socket.create_connection((host, int(port)), timeout=20) for _ in range(40)]
    opened[-1].sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
    peer.write("a", [b"x" * 10])
    assert peer.read("a") == b"x" * 10  # the job's own requests come through
    assert threading.active_count() - before <= 8 + 2
    for connection in opened:
        assert connection.recv(100) == b""  # all are hung up
        connection.close()
    peer.write("b", [b"y"])
    assert not server._server._waiting or peer.read("b") == b"y"


def test_an_authenticated_connection_is_not_closed(served, monkeypatch):
    local, server = served
    monkeypatch.setattr(server._server, "waiting_seconds", 0.2)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        signed = sign_request("secret", "PUT", "/slow", 4)
        head = f"PUT /slow HTTP/1.1\r\nAuthorization: {signed}\r\nContent-Length: 4\r\n\r\n"
        connection.sendall(head.encode() + b"ab")
        time.sleep(1.5)
        connection.sendall(b"cd")
        assert b" 200 " in connection.recv(1000)
    assert local.read("slow") == b"abcd"


def test_an_answer_larger_than_what_was_asked_for_is_not_taken(served, peer, monkeypatch):
    peer.write("a/b", [b"x" * 100_000])
    assert len(peer.read("a/b")) == 100_000
    monkeypatch.setattr(peer_module, "MAX_ERROR_CHARACTERS", 10)
    assert len(peer.read("a/b", 5, 50)) == 45
    monkeypatch.setattr(peer_module, "MAX_REQUEST_BYTES", 1000)
    with pytest.raises(StoreError, match="answered with more than 1,000 bytes"):
        peer.read("a/b")
