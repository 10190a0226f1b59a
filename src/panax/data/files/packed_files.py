"""Many small records in one file, with random access: the cached form of images from Parquet, tar shards and
object stores.

A directory of plain little-endian files:

    header.json         {"format": "panax-records", "version": 1, "num_records", "has_labels", "classes", "content",
                        "bad_records" (the location of each skipped record, and its error),
                        "checksums" (of the other files), "seal"}
    data.bin            the records, one after another
    names.bin           their names in UTF-8, one after another
    offsets.bin         2 * (num_records + 1) int64: the offset of each record in data.bin, then of each name
                        in names.bin
    labels.bin          only if has_labels: num_records int32
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from panax.core.errors import DataError

from ..text.corpus import BadRecord
from .checksums import read_sealed, write_sealed
from .files import read_error
from .memory_map import check_mapped, map_file

FORMAT_VERSION = 1
_FORMAT = "panax-records"
_REMOVE = "remove its folder, and it is made again"


class PackedRecord(NamedTuple):
    """One record.

    Attributes:
        name: Its name in messages; independent of records added later.
        data: Its bytes.
        label: Its class; None without classes.
    """

    name: str
    data: bytes
    label: str | None = None


class PackedFiles:
    """An open directory of records, memory-mapped.

    Attributes:
        labels: The class of each record; None if they have none.
        classes: The class name of each label.
        fingerprint: A hash of the records' content.
        bad: The records that were skipped when the directory was written.
    """

    def __init__(self, directory: Path, verified_dir: Path | None = None) -> None:
        """Open a directory.

        Args:
            verified_dir: As for `open_tokens`.

        Raises:
            DataError: The directory is not one of records, or is damaged.
        """
        path = directory / "header.json"
        try:
            header = read_sealed(path, verified_dir)
            if (header["format"], header["version"]) != (_FORMAT, FORMAT_VERSION):
                raise DataError(
                    f"{path} has format {header['format']!r} {header['version']}; remove it to have it rebuilt"
                )
            count = int(header["num_records"])
            self.fingerprint, self.classes = str(header["content"]), tuple(map(str, header["classes"]))
            offsets = self._map(directory / "offsets.bin", "<i8", 2 * (count + 1)).reshape(2, count + 1)
            self._starts, self._name_starts = offsets
            self._data = self._map(directory / "data.bin", "u1", int(self._starts[-1]))
            self._names = self._map(directory / "names.bin", "u1", int(self._name_starts[-1]))
            self.labels = self._map(directory / "labels.bin", "<i4", count) if header["has_labels"] else None
            if (np.diff(offsets) < 0).any() or (offsets[:, 0] != 0).any():
                raise DataError(f"{directory / 'offsets.bin'} is damaged: offsets don't rise from 0; {_REMOVE}")
            if self.labels is not None and (
                self.labels.min() < 0 or (self.classes and self.labels.max() >= len(self.classes))
            ):
                raise DataError(
                    f"{directory / 'labels.bin'} is damaged: a label is not in 0 to {len(self.classes) - 1}; {_REMOVE}"
                )
            self.bad = [BadRecord(str(where), str(reason)) for where, reason in header["bad_records"]]
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise read_error(directory, error) from error

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, number: int) -> bytes:
        check_mapped(self._starts, self._data)
        return self._data[self._starts[number] : self._starts[number + 1]].tobytes()

    def name(self, number: int) -> str:
        check_mapped(self._name_starts, self._names)
        name = self._names[self._name_starts[number] : self._name_starts[number + 1]].tobytes()
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the name of record {number} is damaged: {error}; {_REMOVE}") from error

    @staticmethod
    def _map(path: Path, dtype: str, count: int) -> npt.NDArray:
        return map_file(path, dtype, (count,), _REMOVE)


def pack(
    records: Iterable[PackedRecord | BadRecord],
    directory: Path,
    skip: Callable[[BadRecord], None],
    number_classes: Callable[[Sequence[str]], tuple[npt.NDArray[np.int32], tuple[str, ...]]],
) -> None:
    """Write records into an empty directory, one after another.

    Args:
        skip: Called with each bad record; raises if there are too many.
        number_classes: Returns the index of each label, and the class names by index.

    Raises:
        DataError: There is no record, or `skip` raised it.
    """
    starts, name_starts, labels, bad = [0], [0], [], []
    digest = xxhash.xxh3_128()
    with (directory / "data.bin").open("wb") as data, (directory / "names.bin").open("wb") as names:
        for record in records:
            if isinstance(record, BadRecord):
                skip(record)
                bad.append(record)
                continue
            name = record.name.encode()
            data.write(record.data)
            names.write(name)
            starts.append(starts[-1] + len(record.data))
            name_starts.append(name_starts[-1] + len(name))
            digest.update(b"%d %d " % (len(record.data), len(name)))
            digest.update(record.data)
            digest.update(name)
            if record.label is not None:
                labels.append(record.label)
                digest.update(record.label.encode())
        for file in (data, names):
            file.flush()
            os.fsync(file.fileno())
    if len(starts) == 1:
        raise DataError(f"there is no record to train on ({len(bad)} bad ones); expected at least one")
    (directory / "offsets.bin").write_bytes(np.array([starts, name_starts], "<i8").tobytes())
    classes: tuple[str, ...] = ()
    if labels:
        numbers, classes = number_classes(labels)
        (directory / "labels.bin").write_bytes(numbers.astype("<i4").tobytes())
    header = {
        "format": _FORMAT,
        "version": FORMAT_VERSION,
        "num_records": len(starts) - 1,
        "has_labels": bool(labels),
        "classes": classes,
        "bad_records": bad,
        "content": digest.hexdigest(),
    }
    files = ["data.bin", "names.bin", "offsets.bin", *(["labels.bin"] if labels else [])]
    write_sealed(directory / "header.json", header, files)
