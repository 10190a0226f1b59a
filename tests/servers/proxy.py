"""An HTTP proxy on 127.0.0.1 before a server, which injects the requested faults. Bodies are streamed."""

import contextlib
import dataclasses
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO
from urllib.parse import urlsplit

from .faults import WRONG_ANSWERS, Fault, Faults

_PIECE_BYTES = 2**18
_CODES = {
    403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 500: "InternalError", 502: "BadGateway",
    503: "SlowDown", 504: "GatewayTimeout",
}  # fmt: skip
_OWN_HEADERS = ("connection", "transfer-encoding", "keep-alive")


class FaultProxy:
    """A proxy before `upstream` for as long as a `with` block lasts.

    Its own pages, for other processes: PUT /-/rules (a JSON list), GET /-/counts, DELETE /-/counts.

    Attributes:
        faults: The rules and counts.
        url: Its address.
    """

    def __init__(
        self, upstream: str, faults: Faults | None = None, *, port: int = 0, opaque_tags: bool = False
    ) -> None:
        """`opaque_tags`: entity tags look like MD5s and are none, as those of a server that encrypts with a key."""
        self.faults = faults or Faults()
        where = urlsplit(upstream)
        assert where.hostname and where.port, upstream
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.faults, self._server.upstream = self.faults, (where.hostname, where.port)
        self._server.opaque_tags = opaque_tags
        self._server.first_answers = {}
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    faults: Faults
    upstream: tuple[str, int]
    opaque_tags: bool
    first_answers: dict[str, bytes]
    """By path with query: the bodies of lists, for "stale"."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what this is for."""


class _Broken(Exception):
    """The connection was ended on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    upstream: http.client.HTTPConnection | None = None

    disable_nagle_algorithm = True  # Each answer would wait 40 ms for the client's acknowledgement.

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do(self) -> None:
        self.size = int(self.headers.get("Content-Length", 0))
        if self.path.startswith("/-/"):
            return self._own_page()
        self._serve(self.server.faults.meet(self.command, self.path))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def _serve(self, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        try:
            if fault and kind.isdigit():
                self._refuse(int(kind))
            elif kind == "reset":
                self._reset()
            elif kind in WRONG_ANSWERS:
                self._say(200, WRONG_ANSWERS[kind])
            elif kind == "stale" and self.path in self.server.first_answers:
                self._say(200, self.server.first_answers[self.path])
            else:
                # Counted until the answer is there: the client may send its next request as soon as it has it.
                with self.server.faults.request():
                    answer = self._forward(fault if self.size else None)
                if kind == "lost":
                    answer.read()
                    self._reset()
                self._answer(answer, fault)
        except (_Broken, OSError, http.client.HTTPException):
            self.close_connection = True
            self._hang_up()

    def _forward(self, fault: Fault | None) -> http.client.HTTPResponse:
        """Send the request on, with its body changed by the fault."""
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(*self.server.upstream, timeout=120)
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _OWN_HEADERS:
                self.upstream.putheader(name, value)
        self.upstream.endheaders()
        bends = fault and (fault.kind in ("slow", "cut", "flip_write"))
        for piece in bent(self._body(), self.size, fault if bends else None):
            self.upstream.send(piece)
        return self.upstream.getresponse()

    def _body(self) -> Iterator[bytes]:
        left = self.size
        while left:
            piece = self.rfile.read(min(left, _PIECE_BYTES))
            if not piece:
                raise _Broken
            left -= len(piece)
            self.server.faults.count("bytes_written", self.path, len(piece))
            yield piece

    def _answer(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        length = answer.getheader("Content-Length")
        is_list = "list-type=" in self.path
        body = answer.read() if length is None or is_list else None
        if is_list and body is not None:
            self.server.first_answers.setdefault(self.path, body)
        size = int(length) if length is not None else len(body or b"")
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() == "etag" and self.server.opaque_tags:
                value = f'"{value.strip(chr(34))[::-1]}"'
            if name.lower() not in (*_OWN_HEADERS, "content-length"):
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.flush()
        if self.command == "HEAD":
            return
        bends = fault and (fault.kind == "flip_read" or (fault.kind in ("slow", "cut") and not self.size))
        pieces = iter([body]) if body else _pieces(answer)
        for piece in bent(pieces, size, fault if bends else None):
            # Before the client has it, and may ask for the counts.
            self.server.faults.count("bytes_read", self.path, len(piece))
            self.wfile.write(piece)

    def _refuse(self, status: int) -> None:
        for _ in self._body():
            pass
        # As some servers do, it repeats what it was sent, to see that no client shows it.
        said = f"<Message>{self.headers.get('Authorization', '')}</Message>"
        self._say(status, f'<?xml version="1.0"?><Error><Code>{_CODES[status]}</Code>{said}</Error>'.encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _Broken

    def _hang_up(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
            self.upstream = None

    def finish(self) -> None:
        self._hang_up()
        with contextlib.suppress(OSError):
            super().finish()

    def _own_page(self) -> None:
        body = self.rfile.read(self.size)
        faults, status, said = self.server.faults, 200, b"{}"
        try:
            match self.command, self.path:
                case "PUT", "/-/rules":
                    faults.set_json(body.decode())
                case "GET", "/-/counts":
                    said = json.dumps(dataclasses.asdict(faults.counts)).encode()
                case "DELETE", "/-/counts":
                    faults.forget()
                case _:
                    status = 404
        except (ValueError, TypeError) as error:
            status, said = 400, str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


def bent(pieces: Iterator[bytes], size: int, fault: Fault | None) -> Iterator[bytes]:
    """A body as it is, or with a fault at byte `fault.at * size`."""
    at, done = int(fault.at * size) if fault else size, 0
    for piece in pieces:
        if fault and done <= at < done + len(piece):
            cut = at - done
            if fault.kind == "slow":
                yield piece[:cut]
                time.sleep(fault.seconds)
                piece, done = piece[cut:], at
            elif fault.kind == "cut":
                yield piece[:cut]
                raise _Broken
            else:
                piece = piece[:cut] + bytes([piece[cut] ^ 0x10]) + piece[cut + 1 :]
        yield piece
        done += len(piece)
    if fault and fault.kind == "slow" and not size:
        time.sleep(fault.seconds)


def _pieces(stream: BinaryIO | http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := stream.read(_PIECE_BYTES):
        yield piece
