"""A store of another process, over the network: a server for a folder, and a store that connects to it.

HTTP, each request signed with a token that only the processes of one job know and that is never sent; one
that was overheard can't be sent again. It is for the memory of hosts, in their own fast network: requests are
not encrypted, and are retried once. Writes are checked by the server's checksum of the received bytes.
"""

import contextlib
import hashlib
import hmac
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import xxhash

from ..core.errors import StoreError
from ..system import json_reader
from ..system.json_reader import JsonError
from .local import LocalStore
from .store import Buffer, Entry, ObjectNotFoundError, Store, check_path

MAX_REQUEST_BYTES = 1 << 30
"""Maximum size of a response of unknown length: a listing, a manifest."""

MAX_ERROR_CHARACTERS = 1 << 16
"""Maximum size of an error response."""

_BLOCK = 2**22
_SCHEME = "Panax"
_SECONDS = 60.0


class PeerServer:
    """Server of a folder for clients with the token, in background threads, until it is closed.

    Attributes:
        address: `host:port`.
    """

    def __init__(self, store: LocalStore, token: str, host: str = "127.0.0.1", max_bytes: int = 2**40) -> None:
        """
        Args:
            host: The address to bind: loopback, or the job's own.
            max_bytes: The largest object that is accepted.
        """

        class Handler(_Handler):
            served, secret, limit = store, token, max_bytes

        self._server = _Server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="panax-peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """HTTP server with few and short unauthenticated connections, so that clients that only open them can't
    exhaust the host.

    If there are too many, a new one replaces the oldest, so that the job's own still succeed.
    """

    daemon_threads = True
    request_queue_size = 128
    max_waiting = 64
    waiting_seconds = 10.0
    max_nonces = 1 << 20

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._waiting: dict[socket.socket, float] = {}
        self._nonces: dict[str, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._waiting) >= self.max_waiting:
                self._hang_up(next(iter(self._waiting)))
            self._waiting[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that have waited too long; called twice a second."""
        late = time.monotonic() - self.waiting_seconds
        with self._lock:
            for request in [one for one, since in self._waiting.items() if since < late]:
                self._hang_up(request)

    def is_new(self, nonce: str) -> bool:
        """Return True if no request had this nonce, so that an overheard request can't be sent again."""
        with self._lock:
            if nonce in self._nonces:
                return False
            self._nonces[nonce] = None
            while len(self._nonces) > self.max_nonces:
                del self._nonces[next(iter(self._nonces))]
            return True

    def trust(self, request: Any) -> None:
        """Mark a connection as authenticated by the token."""
        with self._lock:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def _hang_up(self, request: socket.socket) -> None:
        del self._waiting[request]
        with contextlib.suppress(OSError):  # the other side was faster
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection: a peer that closed it reports its own error."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    served: LocalStore
    secret: str
    limit: int

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: object) -> None:
        """Discard a log message: requests are not logged."""

    def _answer(self, action: object) -> None:
        assert isinstance(self.server, _Server)
        scheme, _, credentials = self.headers.get("Authorization", "").partition(" ")
        nonce, _, proof = credentials.partition(" ")
        about = (self.command, self.path, self.headers.get("Content-Length", "0"), nonce)
        known = hmac.compare_digest(proof.encode(), _proof(self.secret, *about).encode())
        if scheme != _SCHEME or not known or not self.server.is_new(nonce):
            self._send(403, b"wrong token")
            return
        self.server.trust(self.request)
        try:
            action()  # type: ignore[operator]
        except ObjectNotFoundError as error:
            self._send(404, str(error).encode())
        except (StoreError, OSError, ValueError) as error:
            self._send(500, str(error).encode())

    def _get(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query, keep_blank_values=True)
        if "list" in query:
            entries: Sequence[object] = self.served.list(query["list"][0])
            self._send(200, json.dumps(entries).encode())
        elif "folders" in query:
            self._send(200, json.dumps(self.served.folders(query["folders"][0])).encode())
        else:
            start = int(query.get("start", ["0"])[0])
            stop = int(query["stop"][0]) if "stop" in query else None
            self._send(200, self.served.read(unquote(address.path[1:]), start, stop))

    def _put(self) -> None:
        size = int(self.headers["Content-Length"])
        if not 0 <= size <= self.limit:
            raise StoreError(f"{size} bytes; at most {self.limit} are taken")
        body = bytearray(size)
        view, done = memoryview(body), 0
        while done < size:
            count = self.rfile.readinto(view[done : done + _BLOCK])
            if not count:
                raise StoreError(f"the body ended after {done} of {size} bytes")
            done += count
        # Received whole before anything is written: a sender that dies leaves nothing.
        self.served.write(unquote(self.path[1:]), [body])
        self._send(200, xxhash.xxh3_64_hexdigest(body).encode())

    def _delete(self) -> None:
        self.served.delete([unquote(self.path[1:])])
        self._send(200, b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class PeerStore:
    """A store with the objects of a `PeerServer`."""

    writers = 2
    readers = 4

    def __init__(self, address: str, token: str) -> None:
        self.url = f"peer://{address}"
        self._address = address
        self._token = token

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        size = sum(len(part) for part in parts)
        received = self._ask("PUT", f"/{quote(check_path(path))}", parts, size)
        if received.decode() != digest.hexdigest():
            raise StoreError(f"{self.url}/{path} received other bytes than were sent")

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        end = "" if stop is None else f"&stop={stop}"
        max_bytes = MAX_REQUEST_BYTES if stop is None else max(stop - start, MAX_ERROR_CHARACTERS)
        return self._ask("GET", f"/{quote(check_path(path))}?start={start}{end}", max_bytes=max_bytes)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        found = self.read(path, start, start + len(target))
        if len(found) != len(target):
            raise StoreError(f"{self.url}/{path} gave {len(found)} bytes; expected {len(target)}")
        target[:] = found

    def folders(self, prefix: str = "") -> Sequence[str]:
        return [str(name) for name in self._listed("folders", prefix)]

    def list(self, prefix: str = "") -> Sequence[Entry]:
        try:
            return [Entry(check_path(path), int(size)) for path, size in self._listed("list", prefix)]
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self.url} sent no valid list of paths and sizes: {error}") from error

    def _listed(self, what: str, prefix: str) -> Sequence[Any]:
        try:
            return json_reader.parse_as(list, self._ask("GET", f"/?{what}={quote(prefix, safe='')}"))
        except JsonError as error:
            raise StoreError(f"{self.url} sent no valid list: {error}") from error

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._ask("DELETE", f"/{quote(check_path(path))}")

    def _ask(
        self, method: str, target: str, parts: Sequence[Buffer] = (), size: int = 0, max_bytes: int = MAX_REQUEST_BYTES
    ) -> bytes:
        for last in (False, True):
            try:
                return self._ask_once(method, target, parts, size, max_bytes)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, StoreError):
                    raise
                if last:
                    raise StoreError(f"{self.url} can't be reached: {error!r}; is the process there gone?") from error
        raise AssertionError("unreachable")

    def _ask_once(self, method: str, target: str, parts: Sequence[Buffer], size: int, max_bytes: int) -> bytes:
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=_SECONDS)) as connection:
            connection.putrequest(method, target)
            connection.putheader("Authorization", sign_request(self._token, method, target, size))
            connection.putheader("Content-Length", str(size))
            connection.endheaders()
            for part in parts:
                view = memoryview(part)
                for begin in range(0, len(view), _BLOCK):
                    connection.send(view[begin : begin + _BLOCK])
            response = connection.getresponse()
            body = response.read(max_bytes + 1)
        if len(body) > max_bytes:
            raise StoreError(f"{self.url} answered with more than {max_bytes:,} bytes, which were not asked for")
        if response.status == 404:
            raise ObjectNotFoundError(body.decode(errors="replace"))
        if response.status != 200:
            raise StoreError(f"{self.url} refused: {response.status} {body[:500].decode(errors='replace')}")
        return body


def sign_request(token: str, method: str, target: str, size: int) -> str:
    """Return the header that proves that the sender of one request has the token; valid once.

    Args:
        target: The request's path, as it is sent.
        size: Size of its body, in bytes.
    """
    nonce = secrets.token_hex(16)
    return f"{_SCHEME} {nonce} {_proof(token, method, target, str(size), nonce)}"


def _proof(token: str, method: str, target: str, size: str, nonce: str) -> str:
    """Return the proof that a request's sender has the token, which itself is never sent."""
    return hmac.new(token.encode(), "\n".join((method, target, size, nonce)).encode(), hashlib.sha256).hexdigest()


class UnionStore:
    """Objects in several stores, each read from a store that has it.

    Repeated reads of the same bytes go to the next store that has them: a reader that finds a wrong checksum
    need only read again.
    """

    writers = 1
    readers = 4

    def __init__(
        self, url: str, stores: Sequence[Store], holders: Mapping[str, Sequence[int]], sizes: Mapping[str, int]
    ) -> None:
        """
        Args:
            holders: Path to the indices of the stores that have it, the nearest first.
            sizes: Path to size in bytes.
        """
        self.url = url
        self._stores = stores
        self._holders = holders
        self._sizes = sizes
        self._asked: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        found = bytearray((self._sizes.get(path, 0) if stop is None else stop) - start)
        self.read_into(path, start, memoryview(found))
        return bytes(found)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        holders = self._holders.get(path, ())
        if not holders:
            raise ObjectNotFoundError(f"{self.url}/{path} is in no host's memory")
        with self._lock:
            turn = self._asked.get((path, start), 0)
            self._asked[path, start] = turn + 1
        for number in range(len(holders)):
            try:
                return self._stores[holders[(turn + number) % len(holders)]].read_into(path, start, target)
            except StoreError:
                if number + 1 == len(holders):
                    raise
        raise AssertionError("unreachable")

    def folders(self, prefix: str = "") -> Sequence[str]:
        below = f"{prefix}/" if prefix else ""
        inside = {p[len(below) :].split("/")[0] for p in self._sizes if p.startswith(below) and "/" in p[len(below) :]}
        return sorted(inside)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return sorted(Entry(p, n) for p, n in self._sizes.items() if not prefix or p.startswith(f"{prefix}/"))

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        raise StoreError(f"{self.url} is only for reading")

    def delete(self, paths: Iterable[str]) -> None:
        raise StoreError(f"{self.url} is only for reading")
