"""The manifest: the contents of a checkpoint, down to each chunk and its checksum, in JSON with its own
checksum."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from ..core.errors import CheckpointError, DamagedError, PanaxError
from ..stores import Buffer, check_path
from ..system import json_reader
from ..system.sealed_json import json_checksum
from .slices import ArraySlice, is_exact_cover

FORMAT = "panax-checkpoint"
VERSION = 2
"""Incremented when a reader of the old version would misread the new one. Version 1, from before the first
release, is not read."""

_MOST_DIMS = 64
_VERSIONS = 1000
_MOST_BYTES = 1 << 30
"""Sanity limits of dimensions, version number and size: larger values mean damage."""

MANIFEST_FILE = "manifest.json"
"""Name of the file that commits a checkpoint; it lists arrays, chunks and checksums."""


def compute_checksum(data: Buffer) -> str:
    """Compute the xxh3 hash of bytes, 16 hexadecimal digits: 13 GB/s on one core, where crc32c made 4 and
    sha256 1."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A slice of an array, row-major and little-endian, at `offset` of a file."""

    box: ArraySlice
    file: str
    offset: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array: shape and dtype, and its chunks, which cover it once.

    Attributes:
        key_impl: The generator's name if this is a random key, which is stored as its words.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...] = ()
    key_impl: str | None = None

    def check_covered(self, name: str) -> None:
        """Raise a DamagedError unless the chunks hold each value once: a value without a chunk would be
        uninitialized memory."""
        try:
            covered = is_exact_cover(self.shape, [chunk.box for chunk in self.chunks])
        except ValueError as error:
            raise DamagedError(f"{name} can't be used: {error}") from error
        if not covered:
            num_stored = sum(chunk.box.size for chunk in self.chunks)
            raise DamagedError(
                f"{name} has {math.prod(self.shape)} values, its chunks hold {num_stored}, some twice or not at all"
                if num_stored == math.prod(self.shape)
                else f"{name} has {math.prod(self.shape)} values, its chunks hold {num_stored}"
            )

    @property
    def itemsize(self) -> int:
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file that is stored as it is: the model's description, the tokenizer."""

    file: str
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, or one process's part of it.

    Attributes:
        arrays: Dotted name to entry.
        files: Path below the checkpoint's folder to size in bytes, of every file of the checkpoint.
        attachments: File name to the entry stored under that name.
        host: State that is not on devices, such as the position of the data; JSON values.
        metric: The metric that determines "best", lower being better; None if nothing was evaluated.
        saved: Time of saving, in seconds since 1970.
    """

    step: int
    arrays: Mapping[str, ArrayEntry]
    files: Mapping[str, int]
    attachments: Mapping[str, FileEntry]
    host: Mapping[str, Any]
    metric: float | None = None
    saved: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.arrays.values())

    def to_json(self) -> str:
        files = sorted(self.files)
        number = {file: i for i, file in enumerate(files)}
        body = {
            "step": self.step,
            "saved": self.saved,
            "metric": self.metric,
            "host": self.host,
            "files": [[file, self.files[file]] for file in files],
            "attachments": {name: [number[a.file], a.checksum] for name, a in self.attachments.items()},
            "arrays": {
                name: {
                    "shape": entry.shape,
                    "dtype": entry.dtype,
                    "key_impl": entry.key_impl,
                    "chunks": [[c.box.start, c.box.shape, number[c.file], c.offset, c.checksum] for c in entry.chunks],
                }
                for name, entry in self.arrays.items()
            },
        }
        return json.dumps({"format": FORMAT, "version": VERSION, "checksum": json_checksum(body), "body": body})

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Manifest":
        """Read the JSON that `to_json` wrote.

        Args:
            where: The location, for errors.

        Raises:
            CheckpointError: The manifest is of another version.
            DamagedError: The text is not a manifest, has changed since it was sealed, or names a path outside
                the checkpoint or bytes beyond a file's end.
        """
        try:
            outer = json_reader.parse(text, max_bytes=_MOST_BYTES, constants=True)
        except ValueError as error:
            raise DamagedError(f"{where} is damaged: it is not valid JSON ({error})") from error
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise DamagedError(
                f"{where} is damaged, or is not a {FORMAT} manifest: its header does not name the format"
            )
        body, version = outer.get("body"), outer.get("version")
        try:
            sealed = isinstance(body, dict) and json_checksum(body) == outer.get("checksum")
            # Later versions must compute this checksum in another way: if it holds, only the version number
            # has changed.
            if version != VERSION and not sealed and type(version) is int and 0 < version < _VERSIONS:
                raise CheckpointError(
                    f"{where} has format version {version}, this Panax reads version {VERSION}; use the Panax that wrote it"
                )
            if version != VERSION or not sealed:
                raise DamagedError(f"{where} is damaged: its {'version' if sealed else 'checksum'} does not match")
            return cls._from_body(body or {})
        except CheckpointError:
            raise
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
            PanaxError,
        ) as error:
            raise DamagedError(f"{where} can't be used: {error}") from error

    @classmethod
    def _from_body(cls, body: Mapping[str, Any]) -> "Manifest":
        files = [(check_path(path), _count(size)) for path, size in body["files"]]
        sizes = dict(files)
        arrays = {}
        for name, entry in body["arrays"].items():
            shape, itemsize = tuple(map(_count, entry["shape"])), numpy_dtype(entry["dtype"]).itemsize
            if len(shape) > _MOST_DIMS or math.prod(max(n, 1) for n in shape) * itemsize >= 2**63:
                raise ValueError(f"{name} has the shape {shape}, which is not a valid shape")
            if not (entry["key_impl"] is None or isinstance(entry["key_impl"], str)):
                raise ValueError(f"{name} is a random key of the kind {entry['key_impl']!r}")
            chunks = []
            for start, lengths, number, offset, digest in entry["chunks"]:
                file, size = files[_count(number)]
                box = ArraySlice(tuple(map(_count, start)), tuple(map(_count, lengths)))
                if len(box.start) != len(shape) or any(s + n > m for s, n, m in zip(*box, shape)):
                    raise ValueError(f"a chunk of {name} lies outside the array: {box} of {shape}")
                if _count(offset) + box.size * itemsize > size:
                    raise ValueError(f"a chunk of {name} reaches beyond the end of {file}")
                chunks.append(Chunk(box, file, offset, str(digest)))
            arrays[name] = ArrayEntry(shape, entry["dtype"], tuple(chunks), entry["key_impl"])
        attachments = {
            check_path(name): FileEntry(files[_count(number)][0], str(digest))
            for name, (number, digest) in body["attachments"].items()
        }
        metric = None if body["metric"] is None else float(body["metric"])
        return cls(_count(body["step"]), arrays, sizes, attachments, dict(body["host"]), metric, float(body["saved"]))

    def check_covered(self) -> None:
        """Raise a DamagedError unless the chunks of each array hold each of its values once."""
        for name, entry in self.arrays.items():
            entry.check_covered(name)


def merge_manifests(parts: Iterable[Manifest]) -> Manifest:
    """Merge every process's part into one manifest; fields common to all are taken from the first.

    Raises:
        CheckpointError: The parts are not of the same arrays.
    """
    first, *others = parts
    chunks = {name: list(entry.chunks) for name, entry in first.arrays.items()}
    files = dict(first.files)
    kinds = {name: (entry.shape, entry.dtype, entry.key_impl) for name, entry in first.arrays.items()}
    for part in others:
        for name in kinds.keys() | part.arrays.keys():
            entry = part.arrays.get(name)
            if entry is None or kinds.get(name) != (entry.shape, entry.dtype, entry.key_impl):
                raise CheckpointError(f"the parts of processes differ in {name}: all must save the same arrays")
        files |= part.files
        for name, entry in part.arrays.items():
            chunks[name] += entry.chunks
    arrays = {
        name: dataclasses.replace(entry, chunks=tuple(sorted(chunks[name], key=lambda c: c.box)))
        for name, entry in first.arrays.items()
    }
    return dataclasses.replace(first, arrays=arrays, files=files)


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype of a name in a manifest.

    Raises:
        ValueError: The name is not that of a numeric dtype.
    """
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    except TypeError as error:
        raise ValueError(f"{name!r} is not a dtype") from error
    if dtype.hasobject or dtype.name != name:
        raise ValueError(f"{name!r} is not a dtype of numbers")
    return dtype


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number of at least 0, got {value!r}")
    return value
