"""Models of a hub by name: from the cache, from a server on loopback, or one clear message."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from panax.adapters.huggingface import hub
from panax.adapters.huggingface.hub import find_here, find_model, parse_hub_name
from panax.core import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def put(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one complete snapshot of org/tiny, its main branch."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--tiny"
    put(repository / "snapshots" / COMMIT, {"config.json": "{}", "model.safetensors": ""})
    put(repository / "refs", {"main": COMMIT, "v1": COMMIT + "\n", "out": f"../../{COMMIT}", "none": OTHER})
    # What is not complete is not taken.
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {
        "config.json": "{}",
        "model.safetensors.index.json": json.dumps(index),
        "model-00001-of-00002.safetensors": "",
    }
    put(repository / "snapshots" / OTHER, files)
    return tmp_path / "hub"


def test_names_and_paths() -> None:
    assert parse_hub_name("org/tiny") == ("org", "tiny", "main")
    assert parse_hub_name(f"org/tiny.v2@{COMMIT}") == ("org", "tiny.v2", COMMIT)
    for path in (
        "./org/tiny",
        "/org/tiny",
        "~/tiny",
        "tiny",
        "a/b/c",
        "../tiny",
        "org/..",
        "org/tiny@../x",
        "org/tiny@",
        "",
    ):
        assert parse_hub_name(path) is None, path


@pytest.mark.parametrize("where", ["org/tiny", "org/tiny@v1", f"org/tiny@{COMMIT}"])
def test_a_cached_model_needs_no_network(where: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_downloaded", lambda name: pytest.fail("asked the network"))
    found = find_model(where)
    assert found.folder == cache / "models--org--tiny" / "snapshots" / COMMIT and found.where == f"org/tiny@{COMMIT}"
    assert find_here(where) == found.folder


@pytest.mark.parametrize(
    "where", ["org/tiny@out", "org/tiny@none", f"org/tiny@{OTHER}", "org/tiny@absent", "org/absent"]
)
def test_what_the_cache_lacks_or_has_in_part_is_not_taken(where: str, cache: Path) -> None:
    assert find_here(where) is None


def test_a_folder_comes_before_a_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert find_model("org/tiny").where == "org/tiny"


def test_without_the_library_the_message_explains_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        CheckpointError, match=r"org/absent is neither a folder .* not installed: pip install huggingface_hub, or"
    ):
        find_model("org/absent")


SCRIPT = """
import sys
from panax.adapters.huggingface.hub import find_model
from panax.core import CheckpointError
try:
    found = find_model(sys.argv[1])
    print("found", found.where, sorted(file.name for file in found.folder.iterdir()))
except CheckpointError as error:
    print("error", error)
"""


def in_a_process(where: str, cache: Path, **settings: str) -> str:
    """What is found there; the library reads its settings when it is imported."""
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(cache),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_DISABLE_XET": "1",
        # The suite is offline.
        "HF_HUB_OFFLINE": "0",
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.full
def test_offline_is_one_clear_message(tmp_path: Path) -> None:
    said = in_a_process("org/absent", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("error org/absent@main is neither a folder here nor in the cache")
    assert "can't be downloaded" in said and "hf download org/absent --local-dir DIR" in said and "\n" not in said


FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "modeling_tiny.py": b"raise SystemExit('code was run')",
    "pytorch_model.bin": b"pickled",
}


class Hub(BaseHTTPRequestHandler):
    """The part of a hub's protocol that a download needs."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/tiny/revision/") or path == "/api/models/org/tiny":
            siblings = [{"rfilename": each} for each in FILES]
            self.answer(
                json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode(), "application/json"
            )
        elif path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": each, "size": len(data), "oid": each} for each, data in FILES.items()]
            self.answer(json.dumps(tree).encode(), "application/json")
        elif path.startswith("/org/tiny/resolve/") and name in FILES:
            self.answer(FILES[name], "application/octet-stream", ETag=f'"{name}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(200)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.full
def test_a_download_takes_weights_and_settings_and_no_code(tmp_path: Path) -> None:
    with serving() as address:
        said = in_a_process("org/tiny", tmp_path, HF_ENDPOINT=address)
        assert said == f"found org/tiny@{COMMIT} ['config.json', 'model.safetensors', 'tokenizer.json']"
        assert "RepositoryNotFoundError" in in_a_process("org/absent", tmp_path, HF_ENDPOINT=address)
    # The second time nobody answers, and nobody is asked.
    assert in_a_process("org/tiny", tmp_path, HF_ENDPOINT=address).startswith(f"found org/tiny@{COMMIT}")
