"""Models of a hub by name: found in the local cache of `huggingface_hub`, else downloaded by that library if
installed. Weights, settings and tokenizers are downloaded, and never code."""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

from ...core.errors import CheckpointError, RecipeError
from ...system import json_reader
from ...system.files import expand_user

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt", "*.tiktoken")
"""Files that are downloaded: no code, and nothing that would be unpickled."""

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*?)(?:@([A-Za-z0-9][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A model on a hub: its organization and name, and a branch, a tag or a commit."""

    organization: str
    name: str
    revision: str = "main"

    @property
    def repository(self) -> str:
        return f"{self.organization}/{self.name}"


class LocalModel(NamedTuple):
    """A folder with a model.

    Attributes:
        where: Text by which the model can be found again: the folder, or the name with the commit.
    """

    folder: Path
    where: str


def parse_hub_name(where: str) -> HubName | None:
    """Parse ORG/NAME or ORG/NAME@REVISION; None for another form, such as a path.

    >>> parse_hub_name("Qwen/Qwen3-0.6B@v1")
    HubName(organization='Qwen', name='Qwen3-0.6B', revision='v1')
    >>> parse_hub_name("./models/mine"), parse_hub_name("a/b/c"), parse_hub_name("a/..")
    (None, None, None)
    """
    found = _NAME.fullmatch(where)
    if found is None or ".." in where:
        return None
    organization, name, revision = found.groups()
    return HubName(organization, name, revision or "main")


def find_model(where: str) -> LocalModel:
    """Find a model: a folder, or ORG/NAME[@REVISION] of a hub.

    A name is looked for in the local cache first, so that a run needs no network twice; then `huggingface_hub`
    downloads it, from the address in HF_ENDPOINT if that is set.

    Raises:
        CheckpointError: There is no such folder, and no such model in the cache or on the hub.
    """
    folder = expand_user(where)
    name = parse_hub_name(where)
    if folder.is_dir() or name is None:
        return LocalModel(folder, where)
    snapshot = _cached(name) or _downloaded(name)
    return LocalModel(snapshot, f"{name.repository}@{snapshot.name}")


def find_here(where: str) -> Path | None:
    """Find a model as `find_model` does, on this machine only; None if it is not found."""
    folder, name = expand_user(where), parse_hub_name(where)
    if folder.is_dir() or name is None:
        return folder if folder.is_dir() else None
    return _cached(name)


def cache_folder() -> Path:
    """Return the local cache that `huggingface_hub` uses."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return expand_user(cache)
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return expand_user(home) / "hub"


def _cached(name: HubName) -> Path | None:
    """Return a complete snapshot in the cache."""
    folder = cache_folder() / f"models--{name.organization}--{name.name}"
    commit = name.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / name.revision).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and _is_complete(snapshot) else None


def _is_complete(snapshot: Path) -> bool:
    """Return True if a snapshot has its settings and all files of its weights."""
    if not (snapshot / CONFIG).is_file():
        return False
    if (snapshot / SINGLE).is_file():
        return True
    try:
        files = set(json_reader.read(snapshot / INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(file, str) and (snapshot / file).is_file() for file in files)


def _downloaded(name: HubName) -> Path:
    elsewhere = f"on a machine with a network: `hf download {name.repository} --local-dir DIR`; then pass hf:DIR"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(
            f"{name.repository} is neither a folder here nor in the cache ({cache_folder()}), and huggingface_hub, which would "
            f"download it, is not installed: pip install huggingface_hub, or {elsewhere}"
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name.repository, revision=name.revision, allow_patterns=list(PATTERNS))
    except Exception as error:  # its errors have no common base: of HTTP, of the network, of files
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{name.repository}@{name.revision} is neither a folder here nor in the cache ({cache_folder()}), and can't be "
            f"downloaded: {type(error).__name__}: {reason}. If there is no network here, download it {elsewhere}"
        ) from error
    snapshot = Path(folder)
    if not _COMMIT.fullmatch(snapshot.name):
        raise RecipeError(f"{snapshot} was downloaded, and its folder is not named by a commit; pass hf:{snapshot}")
    return snapshot
