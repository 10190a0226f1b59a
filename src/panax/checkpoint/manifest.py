"""The manifest: what a checkpoint holds, in JSON, with a format version of our own."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError

FORMAT = "panax-checkpoint"
VERSION = 1
"""Raised when a reader of the old version would misread the new one; readers accept every version up to theirs."""

FILE = "manifest.json"
ARRAYS = "arrays"


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array: where it stands below `arrays/`, and what it must be."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        arrays: Dotted name to entry; the name is also the folder's.
        host: What is not on devices, the position of the data; JSON values.
        metric: What "best" is judged by, lower being better; None if nothing was evaluated.
    """

    step: int
    arrays: Mapping[str, ArrayEntry]
    host: Mapping[str, Any]
    metric: float | None = None

    def to_json(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(body, indent=1)

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read `directory/manifest.json`.

        Raises:
            CheckpointError: It is missing, no manifest of ours, of a later version, or names a path outside the checkpoint.
        """
        path = directory / FILE
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory} is no checkpoint: it has no {FILE}") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a {FORMAT} manifest")
        if body.get("version", 0) > VERSION:
            raise CheckpointError(
                f"{path} has format version {body['version']}, this Panax reads up to {VERSION}; use a newer Panax"
            )
        try:
            arrays = {
                name: ArrayEntry(tuple(entry["shape"]), entry["dtype"], entry.get("key_impl"))
                for name, entry in body["arrays"].items()
            }
            manifest = cls(int(body["step"]), arrays, body["host"], body.get("metric"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        for name in arrays:
            if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
                raise CheckpointError(
                    f"{path} names the array {name!r}, which is not a plain name inside the checkpoint"
                )
        return manifest
