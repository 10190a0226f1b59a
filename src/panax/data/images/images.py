"""Sources of images: folders, Parquet tables and WebDataset shards, local or in an object store."""

import csv
import dataclasses
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError
from panax.stores import is_remote

from ...system import json_reader
from ...system.files import expand_user
from ..files.bounds import MAX_RECORD_BYTES, check_positive, describe_oversize
from ..files.cache import read_or_build
from ..files.checksums import VERIFIED_FOLDER
from ..files.files import (
    BadRecordError,
    DataFile,
    cache_identity,
    decode_utf8,
    find_files,
    fingerprint,
    open_each_local,
    read_bytes,
    read_error,
    stat_files,
)
from ..files.magic import is_image
from ..files.packed_files import FORMAT_VERSION, PackedFiles, PackedRecord, pack
from ..files.skipped_files import describe_skipped_files
from ..formats.columns import ARROW_ERRORS, check_buffers, read_parquet_batches
from ..formats.fields import missing_library_error
from ..formats.webdataset import SHARD_PATTERNS as SHARD_PATTERNS
from ..formats.webdataset import ShardSample, read_samples
from ..loading.examples import BadRecordLog, describe_skipped_records
from ..tables.categories import category_text, is_empty
from ..text.corpus import BadRecord
from .encoded_images import ImageDecoder, Images, number_classes

_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
_READS_AT_ONCE = 16
_FILES_AT_ONCE = 256
_ROWS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageDecoder):
    """Images in a folder, local or in an object store; images of an object store are copied into the cache
    once.

    Attributes:
        path: The folder, searched at any depth, for files with the names or first bytes of images; hidden
            files are skipped.
        label: "folder": an image's class is its top-level folder in `path`. "none": images without labels.
            Otherwise the name of a CSV file with a header and the columns `file` (below `path`) and `label`.
        max_record_bytes: A larger file is a bad record.
    """

    path: str
    label: str = "folder"
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_record_bytes")

    def open(self, root: Path, max_bad_records: int) -> Images:
        """Find the images. Raises DataError if there are none, or one has no label."""
        files = self._files()
        names = [self._below(file) for file in files]
        labels, notes = self._labels(names)
        skipped = BadRecordLog(max_bad_records)
        if is_remote(self.path):
            name = fingerprint("image_folder", self.label, labels, *stat_files(files))
            notes = (*describe_skipped_files((self.path,), files), *notes)
            return _packed(root, name, lambda: _read_all(files, labels, self.max_record_bytes), self, skipped, notes)
        numbers, classes = (None, ()) if labels is None else number_classes(labels)
        encoded = _Files(expand_user(self.path), names, files, numbers, self.max_record_bytes)
        notes = (*describe_skipped_files((self.path,), files), *notes)
        return _with_configured_classes(Images(encoded, self, skipped, classes=classes, notes=notes), self)

    def _files(self) -> list[DataFile]:
        if not is_remote(self.path) and not expand_user(self.path).is_dir():
            raise DataError(f"{self.path} is not a directory; expected one with images in it")
        # One walk for all kinds: folders of images are large.
        every = find_files((self.path,), ("**/*",))
        found = [file for file in every if file.suffix[1:].lower() in _SUFFIXES or _holds_image(file)]
        if not found:
            raise DataError(f"{self.path} holds no image; expected files that end in {', '.join(_SUFFIXES)}")
        return found

    def _below(self, file: DataFile) -> str:
        base = self.path.rstrip("/") if is_remote(self.path) else str(expand_user(self.path))
        return file.name.removeprefix(base).lstrip("/")

    def _labels(self, names: list[str]) -> tuple[list[str] | None, tuple[str, ...]]:
        """Return the label of each image, and notes for the user."""
        if self.label == "none":
            return None, ()
        if self.label == "folder":
            lone = next((name for name in names if "/" not in name), None)
            if lone is not None:
                raise DataError(
                    f"{lone} is in {self.path} itself; expected each image in the folder of its class, or "
                    f"label='none', or a CSV file with the columns file and label"
                )
            return [name.partition("/")[0] for name in names], ()
        (file,) = find_files((self.label,), ())
        with file.open_local() as path:
            text = decode_utf8(read_bytes(path), file.name)
        try:
            return self._labels_of(names, csv.DictReader(io.StringIO(text, newline="")), file.name)
        except csv.Error as error:
            raise DataError(f"{file.name}: {error}; expected CSV: repair it") from None

    def _labels_of(self, names: list[str], rows: csv.DictReader, name: str) -> tuple[list[str], tuple[str, ...]]:
        if not {"file", "label"} <= set(rows.fieldnames or ()):
            raise DataError(f"{name} has the columns {rows.fieldnames}; expected file and label among them")
        if len({"file", "label"}) < sum(column in ("file", "label") for column in rows.fieldnames or ()):
            raise DataError(f"{name} has the columns {rows.fieldnames}; expected file and label once each")
        labels: dict[str, str] = {}
        for row in rows:
            if labels.setdefault(row["file"], row["label"]) != row["label"]:
                raise DataError(
                    f"{name}, line {rows.line_num}: {row['file']} has the labels {labels[row['file']]!r} and {row['label']!r}; "
                    f"expected one"
                )
        lacking = next((one for one in names if not labels.get(one)), None)
        if lacking is not None:
            raise DataError(f"{name} has no label for {lacking}; expected one for each image in {self.path}")
        absent = len(labels.keys() - set(names))
        note = f"{name} has labels for {absent:,} files that are not in {self.path}; they are ignored"
        return [labels[one] for one in names], (note,) if absent else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetImages(ImageDecoder):
    """Encoded images in a column of Parquet files, in the layout of Hugging Face's datasets. Needs pyarrow.

    They are copied into the cache once, which gives random access.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        image: The column of the images: bytes, or a struct with `bytes` in it.
        label: The column of the labels, numbers from 0 or names; None: images without labels.
        max_record_bytes: A larger encoded image is a bad record; a page more than four times as large is an
            error.
    """

    paths: tuple[str, ...]
    image: str = "image"
    label: str | None = "label"
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_record_bytes")

    def open(self, root: Path, max_bad_records: int) -> Images:
        """Open the copy; build it first if it does not exist. Raises DataError if a file can't be read."""
        files = find_files(self.paths, ("**/*.parquet",))
        name = fingerprint("parquet_images", self.image, self.label, *cache_identity(files))
        notes = describe_skipped_files(self.paths, files)
        return _packed(root, name, lambda: self._records(files), self, BadRecordLog(max_bad_records), notes)

    def _records(self, files: list[DataFile]) -> Iterator[PackedRecord | BadRecord]:
        try:
            import pyarrow as arrow
        except ImportError as error:
            raise missing_library_error("pyarrow", "Parquet", "parquet") from error
        columns = [self.image] if self.label is None else [self.image, self.label]
        for name, path in open_each_local(files):
            try:
                row = 0
                for batch in read_parquet_batches(
                    path,
                    name,
                    columns,
                    max_record_bytes=self.max_record_bytes,
                    rows=_ROWS_AT_ONCE,
                    check=self._check_columns,
                ):
                    for column in batch.columns:
                        check_buffers(column)
                    for values in itertools.chain.from_iterable(part.to_pylist() for part in _row_by_row(batch)):
                        try:
                            yield self._record(values, f"{name}, row {row}")
                        except BadRecordError as error:
                            yield BadRecord(error.where, error.reason)
                        row += 1
            except DataError:
                raise
            except (*ARROW_ERRORS, arrow.ArrowException) as error:
                raise read_error(name, error) from error

    def _check_columns(self, present: Sequence[str], name: str) -> None:
        for column in (self.image, self.label):
            if column is not None and column not in present:
                raise DataError(f"{name} has no column {column!r}; it has {present}: name it with image=, label=")

    def _record(self, values: Mapping[str, Any], where: str) -> PackedRecord | BadRecord:
        image = values[self.image]
        data = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(data, bytes):
            return BadRecord(
                where, f"column {self.image!r} holds {type(data).__name__}; expected the bytes of an image"
            )
        if len(data) > self.max_record_bytes:
            return BadRecord(where, describe_oversize(len(data), self.max_record_bytes))
        if self.label is None:
            return PackedRecord(where, data)
        return PackedRecord(where, data, _label(values[self.label], f"column {self.label!r}", where))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebDatasetImages(ImageDecoder):
    """Images in WebDataset shards. They are copied into the cache once, which gives random access.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        label: The file of a sample with its class, a number from 0 or a name: `cls`, or `json.FIELD` for a
            field of its `.json` file. None: images without labels.
        max_record_bytes: A larger sample, all its files together, is a bad record.
    """

    paths: tuple[str, ...]
    label: str | None = "cls"
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "max_record_bytes")

    def open(self, root: Path, max_bad_records: int) -> Images:
        """Open the copy; build it first if it does not exist. Raises DataError if a file can't be read."""
        files = find_files(self.paths, SHARD_PATTERNS)
        name = fingerprint("webdataset_images", self.label, *cache_identity(files))
        notes = describe_skipped_files(self.paths, files)
        return _packed(root, name, lambda: self._records(files), self, BadRecordLog(max_bad_records), notes)

    def _records(self, files: list[DataFile]) -> Iterator[PackedRecord | BadRecord]:
        for name, path in open_each_local(files):
            for sample in read_samples(path, name, self.max_record_bytes):
                try:
                    yield sample if isinstance(sample, BadRecord) else self._record(sample)
                except BadRecordError as error:
                    yield BadRecord(error.where, error.reason)

    def _record(self, sample: ShardSample) -> PackedRecord:
        data = next((sample.files[suffix] for suffix in _SUFFIXES if suffix in sample.files), None)
        if data is None:
            raise BadRecordError(sample.where, f"no image; the sample has {sorted(sample.files)}")
        if self.label is None:
            return PackedRecord(sample.where, data)
        if not self.label.startswith("json."):
            return PackedRecord(sample.where, data, sample.text(self.label).strip())
        field = self.label.removeprefix("json.")
        try:
            label = json_reader.parse(sample.text("json"), constants=True)[field]
        except (ValueError, KeyError, TypeError):
            raise BadRecordError(
                sample.where, f"no field {field!r} in its .json file; name another with label="
            ) from None
        return PackedRecord(sample.where, data, _label(label, f"the field {field!r} of its .json file", sample.where))


def _label(label: Any, what: str, where: str) -> str:
    """Convert a label to the name of a class; equal whole numbers of any type are one class.

    Raises:
        BadRecordError: The label is missing, a fraction, or not a single value.
    """
    text = "" if is_empty(label) or isinstance(label, list | dict) else category_text(label, what, where)
    if not text or (isinstance(label, float) and not text.lstrip("-").isdigit()):
        raise BadRecordError(where, f"{what} holds {label!r}; expected a number from 0, or a name")
    return text


def _with_configured_classes(images: Images, decoding: ImageDecoder) -> Images:
    """Return images with the classes of their settings, if there are any."""
    return images.with_classes(decoding.classes, "classes=") if decoding.classes else images


def _holds_image(file: DataFile) -> bool:
    """Return True if a local file is an image, whatever its name (`.jfif`, `.jpe`, or none)."""
    if file.remote is not None:
        return False
    try:
        with open(file.name, "rb") as opened:
            return is_image(opened.read(16))
    except OSError as error:
        raise read_error(file.name, error) from error


def _row_by_row(batch: Any) -> Iterator[Any]:
    """Yield the rows one by one: each may be large, and many rows may share one value of a dictionary."""
    return (batch.slice(row, 1) for row in range(batch.num_rows))


class _Files:
    """Images that are local files."""

    def __init__(
        self,
        folder: Path,
        names: list[str],
        files: list[DataFile],
        labels: npt.NDArray[np.int32] | None,
        max_record_bytes: int,
    ) -> None:
        self._most = max_record_bytes
        self._folder, self._names, self.labels = folder, names, labels
        label_list = None if labels is None else labels.tolist()
        self.fingerprint = fingerprint("files", label_list, *stat_files(files))

    def __len__(self) -> int:
        return len(self._names)

    def read(self, number: int) -> bytes:
        path = self._folder / self._names[number]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise read_error(path, error) from error
        if size > self._most:
            raise BadRecordError(self._names[number], describe_oversize(size, self._most))
        return read_bytes(path)

    def name(self, number: int) -> str:
        return self._names[number]


def _packed(
    root: Path, name: str, records: Any, decoding: ImageDecoder, skipped: BadRecordLog, notes: Sequence[str] = ()
) -> Images:
    """Return images from the records in the cache entry `name`; build the entry if it is missing."""
    counted = BadRecordLog(skipped.limit)
    packed = read_or_build(
        root,
        f"images-v{FORMAT_VERSION}-{name}",
        build=lambda directory: pack(records(), directory, counted.add, number_classes),
        read=lambda directory: PackedFiles(directory, root / VERIFIED_FOLDER),
    )
    # Also count those that were skipped when the entry was made, perhaps under a higher limit.
    skipped.begin(packed.bad)
    notes = (*notes, *describe_skipped_records(packed.bad))
    return _with_configured_classes(Images(packed, decoding, skipped, classes=packed.classes, notes=notes), decoding)


def _read_all(
    files: Sequence[DataFile], labels: list[str] | None, max_record_bytes: int
) -> Iterator[PackedRecord | BadRecord]:
    """Read many small objects, several at once."""

    def read(file: DataFile) -> bytes | BadRecord:
        assert file.remote is not None
        if file.remote.size > max_record_bytes:
            return BadRecord(file.name, describe_oversize(file.remote.size, max_record_bytes))
        return file.remote.store.read(file.remote.path)

    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        numbered = iter(enumerate(files))
        while block := list(itertools.islice(numbered, _FILES_AT_ONCE)):
            for (number, file), data in zip(block, pool.map(read, (file for _, file in block)), strict=True):
                label = None if labels is None else labels[number]
                yield data if isinstance(data, BadRecord) else PackedRecord(file.name, data, label)
