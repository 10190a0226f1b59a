"""Rename identifiers with Pyright's language server: it knows types, so that attributes and keywords follow."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMAND = (str(Path(sys.executable).with_name("pyright-langserver")), "--stdio")

Edit = tuple[tuple[int, int], tuple[int, int], str]
"""Start and end as (line, UTF-16 column) from 0, and the text between them."""


class LanguageServer:
    """A running language server of one workspace; requests are answered one at a time."""

    def __init__(self, root: Path, process: subprocess.Popen[bytes]):
        self.root = root
        self._process = process
        self._number = 0

    def request(self, method: str, params: dict[str, Any]) -> Any:
        """Send a request and return its result.

        Raises:
            RuntimeError: The server answered with an error, or ended.
        """
        self._number += 1
        self._send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message and "id" in message:
                # The server asks for its configuration, which the project's own file holds.
                items = message.get("params", {}).get("items", ())
                result = [None] * len(items) if message["method"] == "workspace/configuration" else None
                self._send({"jsonrpc": "2.0", "id": message["id"], "result": result})
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error'].get('message')}")
                return message.get("result")

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification, which has no answer."""
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def open(self, path: Path) -> None:
        """Have the server read a file that it shall answer about."""
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": path.read_text("utf-8")}
        self.notify("textDocument/didOpen", {"textDocument": document})

    def close(self, path: Path) -> None:
        """Let the server take the file from the disk again."""
        self.notify("textDocument/didClose", {"textDocument": {"uri": path.as_uri()}})

    def rename(self, path: Path, line: int, column: int, new: str) -> dict[Path, list[Edit]]:
        """Edits that rename the identifier at a position, by file; nothing is written."""
        self.open(path)
        where = {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": column}}
        answer = self.request("textDocument/rename", {**where, "newName": new}) or {}
        self.close(path)
        edits: dict[Path, list[Edit]] = {}
        for change in answer.get("documentChanges", ()):
            edits.setdefault(_path(change["textDocument"]["uri"]), []).extend(map(_edit, change["edits"]))
        for uri, changes in answer.get("changes", {}).items():
            edits.setdefault(_path(uri), []).extend(map(_edit, changes))
        return edits

    def changed(self, paths: list[Path]) -> None:
        """Report files that were written, so that the next answer is about them."""
        changes = [{"uri": path.as_uri(), "type": 2} for path in paths]
        self.notify("workspace/didChangeWatchedFiles", {"changes": changes})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline():
            if line == b"\r\n":
                return json.loads(self._process.stdout.read(length))
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        raise RuntimeError(f"{COMMAND[0]} ended with code {self._process.wait()}")


@contextmanager
def whole_workspace(root: Path, folders: Sequence[str]) -> Iterator[None]:
    """Have the server look at these folders, by a `pyrightconfig.json` that is removed afterwards.

    Raises:
        FileExistsError: The folder has such a file already.
    """
    prefix = Path(sys.prefix)
    settings = {
        "include": list(folders),
        "extraPaths": ["src", "tests"],
        "venvPath": str(prefix.parent),
        "venv": prefix.name,
        "typeCheckingMode": "standard",
    }
    path = root / "pyrightconfig.json"
    with path.open("x", encoding="utf-8") as file:
        json.dump(settings, file)
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def language_server(root: Path) -> Iterator[LanguageServer]:
    """Start Pyright's language server for a folder, and end it afterwards."""
    with subprocess.Popen(
        COMMAND, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        server = LanguageServer(root, process)
        folder = {"uri": root.as_uri(), "name": root.name}
        abilities = {
            "workspace": {
                "configuration": True,
                "workspaceEdit": {"documentChanges": True},
                "didChangeWatchedFiles": {"dynamicRegistration": True},
            }
        }
        start = {"processId": None, "rootUri": root.as_uri(), "workspaceFolders": [folder], "capabilities": abilities}
        try:
            server.request("initialize", start)
            server.notify("initialized", {})
            yield server
        finally:
            process.kill()


def apply_edits(edits: dict[Path, list[Edit]]) -> None:
    """Write edits into their files."""
    for path, changes in edits.items():
        lines = path.read_text("utf-8").splitlines(keepends=True)
        for start, end, text in sorted(set(changes), reverse=True):
            if start[0] != end[0]:
                raise RuntimeError(f"{path}:{start[0] + 1}: an identifier over several lines")
            line = lines[start[0]]
            first, last = _offset(line, start[1]), _offset(line, end[1])
            lines[start[0]] = line[:first] + text + line[last:]
        path.write_text("".join(lines), "utf-8")


def _offset(line: str, units: int) -> int:
    """The index in a line of a column in UTF-16 code units."""
    return len(line.encode("utf-16-le")[: 2 * units].decode("utf-16-le"))


def _path(uri: str) -> Path:
    return Path(unquote(urlparse(uri).path))


def _edit(change: dict[str, Any]) -> Edit:
    start, end = change["range"]["start"], change["range"]["end"]
    return (start["line"], start["character"]), (end["line"], end["character"]), change["newText"]
