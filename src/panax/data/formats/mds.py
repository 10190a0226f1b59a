"""A corpus of MDS shards, the format of MosaicML's streaming datasets.

A folder has an `index.json`, which lists the shards with their columns, sizes and hashes. A shard is
little-endian:

    uint32              the number of samples, n
    uint32[n + 1]       the beginning of each sample, and the end of the last one, in bytes from the shard's
                        beginning
    (JSON)              the columns again
    samples             each: a uint32 for each column of varying size, then the values, one column after another

Source: the format that `streaming.MDSWriter` writes, version 2.
"""

import bz2
import dataclasses
import gzip
import hashlib
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from panax.core.errors import DataError, RecipeError
from panax.core.validation import Validated
from panax.stores import is_remote

from ...system import json_reader
from ...system.binary_reader import BinaryReader, check_count, read_number
from ..files.bounds import MAX_RECORD_BYTES, check_positive, describe_oversize
from ..files.files import (
    DataFile,
    cache_identity,
    decode_utf8,
    find_files,
    fingerprint,
    open_each_local,
    read_bytes,
    read_error,
)
from ..text.corpus import BadRecord, Document
from .fields import Fields, describe_missing_field, missing_library_error

_INDEX = "index.json"
_MOST_INDEX_BYTES = 1 << 30
_NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}
_ARRAY_DTYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
_WIDTHS = ("u1", "<u2", "<u4", "<u8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mds(Validated):
    """A folder of MDS shards, with its `index.json`, plain or compressed, read one shard at a time.

    Shards compressed with zstd, brotli or snappy need pyarrow (`pip install 'panax-jax[parquet]'`). A shard's
    hash is verified if the index has one. Columns of pickled values are rejected: nothing from a file is ever
    unpickled.

    Attributes:
        path: The folder, local or in an object store.
        text: The column that holds the document.
        prompt: The column with the text before the answer, which carries no loss; needs `answer`.
        answer: The column with the text to learn; needs `prompt`.
        max_record_bytes: A larger sample, all its columns together, is a bad record.
        max_shard_bytes: A larger shard, decompressed, is an error; a shard is read whole.
    """

    path: str
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES
    max_shard_bytes: int = 2**30

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes", "max_shard_bytes")
        self._fields.check()

    def documents(self) -> Iterator[Document | BadRecord]:
        fields = self._fields
        shards = self._shards()
        opened = open_each_local([shard.file for shard in shards])
        for shard, (name, path) in zip(shards, opened, strict=True):
            for name_of in fields.names:
                if name_of not in shard.columns:
                    raise DataError(str(describe_missing_field(name_of, list(shard.columns), name)))
                check_encoding(shard.columns[name_of][0], f"{name}, column {name_of!r}")
            self._check_size(shard, path, name)
            for number, sample in enumerate(shard.samples(read_bytes(path), fields.names, self.max_record_bytes)):
                where = f"{name}, sample {number}"
                if isinstance(sample, str):
                    yield BadRecord(where, sample)
                else:
                    yield fields.document(sample, where)

    def _check_size(self, shard: "MdsShard", path: Path, name: str) -> None:
        for size in (shard.num_bytes, path.stat().st_size):
            if size > self.max_shard_bytes:
                raise DataError(f"{name}: {describe_oversize(size, self.max_shard_bytes, 'max_shard_bytes')}")

    def fingerprint(self) -> str:
        files = [self._index(), *(shard.file for shard in self._shards())]
        return fingerprint("mds", self.text, self.prompt, self.answer, *cache_identity(files))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)

    def _index(self) -> DataFile:
        return find_files((f"{self.path.rstrip('/')}/{_INDEX}",), ())[0]

    def _shards(self) -> list["MdsShard"]:
        index = self._index()
        with index.open_local() as path:
            text = decode_utf8(read_bytes(path), index.name)
        try:
            listed = json_reader.parse(text, max_bytes=_MOST_INDEX_BYTES)["shards"]
            shards = [_shard(entry, index.name) for entry in listed]
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{index.name} is not an index of MDS shards ({error!r}); expected the index of MDSWriter"
            ) from None
        folder = self.path.rstrip("/")
        names = [shard.file.name for shard in shards]
        if is_remote(folder):
            present = {file.name: file for file in find_files((folder,), ("**/*",))}
        else:
            present = {f"{folder}/{name}": find_files((f"{folder}/{name}",), ())[0] for name in names}
        lacking = [name for name in names if f"{folder}/{name}" not in present]
        if lacking:
            raise DataError(f"{folder} lacks {lacking[0]}, which {_INDEX} lists; expected all {len(names)} shards")
        return [shard._replace(file=present[f"{folder}/{name}"]) for shard, name in zip(shards, names, strict=True)]


class MdsShard(NamedTuple):
    """A shard, as the index describes it.

    Attributes:
        file: The shard's file.
        num_samples: Number of samples.
        num_bytes: Uncompressed size.
        compression: The compression format; None: not compressed.
        hashes: Hashes of the stored file, by the name of the algorithm.
        columns: The encoding of each column, and its size in bytes; None if the size varies.
    """

    file: DataFile
    num_samples: int
    num_bytes: int
    compression: str | None
    hashes: dict[str, str]
    columns: dict[str, tuple[str, int | None]]

    def samples(
        self, data: bytes, columns: list[str], max_record_bytes: int = MAX_RECORD_BYTES
    ) -> Iterator[dict[str, Any] | str]:
        """Yield the values of some columns, sample by sample; an error message in place of an unusable
        sample.

        Args:
            max_record_bytes: Maximum size of a record, in bytes.

        Raises:
            DataError: The shard is damaged.
        """
        name = self.file.name
        for algorithm, expected in self.hashes.items():
            make = _HASHES.get(algorithm)
            if make is not None and make(data).hexdigest() != expected:
                raise DataError(f"{name} is damaged: its {algorithm} is not the one in {_INDEX}; download it again")
        if self.compression is not None:
            data = _decompress(data, self.compression, self.num_bytes, name)
        head = 4 * (self.num_samples + 2)
        if len(data) != self.num_bytes or len(data) < head:
            raise DataError(f"{name} has {len(data):,} bytes; {_INDEX} states {self.num_bytes:,}: it is cut short")
        count, *offsets = np.frombuffer(data, "<u4", self.num_samples + 2).tolist()
        rises = offsets[0] >= head and offsets[-1] == len(data) and (np.diff(offsets) >= 0).all()
        if count != self.num_samples or not rises:
            raise DataError(f"{name} is damaged: its samples do not follow one another; download it again")
        for begin, end in itertools.pairwise(offsets):
            if end - begin > max_record_bytes:
                yield describe_oversize(end - begin, max_record_bytes)
                continue
            try:
                yield self._decode(memoryview(data)[begin:end], columns)
            except (ValueError, TypeError, OverflowError, IndexError, KeyError) as error:
                yield f"a value can't be decoded ({error}); expected its column's encoding"

    def _decode(self, sample: memoryview, wanted: list[str]) -> dict[str, Any]:
        sizes, at = {}, 0
        for column, (_, size) in self.columns.items():
            if size is None:
                size = read_number(sample, at, "<I")
                at += 4
            sizes[column] = size
        if at + sum(sizes.values()) != len(sample):
            raise ValueError(f"its columns take {at + sum(sizes.values())} bytes, it has {len(sample)}")
        values = {}
        for column, (encoding, _) in self.columns.items():
            if column in wanted:
                values[column] = decode(encoding, bytes(sample[at : at + sizes[column]]))
            at += sizes[column]
        return values


def check_encoding(encoding: str, where: str) -> None:
    """Raise an error if an encoding is not supported.

    Raises:
        RecipeError: The column holds pickled values, or images.
    """
    kind = encoding.partition(":")[0]
    if kind == "pkl":
        raise RecipeError(f"{where} holds pickled values, which are never loaded: write the column as 'json' or 'str'")
    if kind not in {"str", "bytes", "int", "json", "ndarray", "str_int", "str_float", "str_decimal"} | _NUMBERS:
        raise RecipeError(f"{where} has the encoding {encoding!r}; expected text: name another column")


def decode(encoding: str, data: bytes) -> Any:
    """Decode one value.

    Raises:
        ValueError: The data does not match the encoding.

    >>> decode("int", (5).to_bytes(8, "little")), decode("str_int", b"12"), decode("ndarray:uint8:2,2", b"abcd").shape
    (5, 12, (2, 2))
    """
    kind, _, settings = encoding.partition(":")
    match kind:
        case "str" | "str_decimal":
            return data.decode()
        case "bytes":
            return data
        case "json":
            return json_reader.parse(data.decode(), constants=True)
        case "str_int":
            return int(data.decode())
        case "str_float":
            return float(data.decode())
        case "ndarray":
            return _array(data, *settings.split(":")) if settings else _array(data)
    dtype = np.dtype("int64" if kind == "int" else kind).newbyteorder("<")
    (value,) = np.frombuffer(data, dtype)
    return value.item()


def _array(data: bytes, dtype: str = "", shape: str = "") -> np.ndarray:
    at = 0
    if dtype:
        kind = np.dtype(dtype).newbyteorder("<")
    else:
        kind, at = np.dtype(_ARRAY_DTYPES[data[0]]), 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        dimensions, width = data[at] >> 2, np.dtype(_WIDTHS[data[at] & 3])
        check_count(data, at + 1, dimensions, width.itemsize)
        sizes = np.frombuffer(data, width, dimensions, at + 1).tolist()
        at += 1 + dimensions * width.itemsize
    return np.frombuffer(data, kind, offset=at).reshape(sizes)


_HASHES: dict[str, Callable[[bytes], Any]] = {
    "md5": lambda data: hashlib.md5(data, usedforsecurity=False),
    "sha1": lambda data: hashlib.sha1(data, usedforsecurity=False),
    "sha256": hashlib.sha256,
    "xxh32": xxhash.xxh32,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh128,
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
}


def _shard(entry: dict[str, Any], index: str) -> MdsShard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise DataError(
            f"{index} lists a shard of format {entry['format']!r}, version {entry['version']}; expected 'mds', version 2"
        )
    columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True)
    stored = entry["zip_data"] or entry["raw_data"]
    compression = entry["compression"].partition(":")[0] if entry["zip_data"] else None
    basename = str(stored["basename"])
    if any(type(size) is not int or size < 0 for size in (entry["samples"], entry["raw_data"]["bytes"])):
        raise ValueError(f"sizes of {basename}")
    for name, encoding, size in zip(
        *(entry[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True
    ):
        if not (
            isinstance(name, str) and isinstance(encoding, str) and (size is None or (type(size) is int and size >= 0))
        ):
            raise ValueError(f"a column {name!r} of the encoding {encoding!r} and the size {size!r}")
    if "/" in basename or basename.startswith("."):
        raise DataError(f"{index} names the shard {basename!r}; expected a file's name, in the same folder")
    return MdsShard(
        file=DataFile(basename),
        num_samples=int(entry["samples"]),
        num_bytes=int(entry["raw_data"]["bytes"]),
        compression=compression,
        hashes=dict(stored["hashes"]),
        columns={name: (encoding, size or None) for name, encoding, size in columns},
    )


def _decompress(data: bytes, compression: str, num_bytes: int, name: str) -> bytes:
    try:
        match compression:
            case "gz":
                return _inflate(gzip.GzipFile(fileobj=io.BytesIO(data)), num_bytes, name)
            case "bz2":
                return _inflate(bz2.BZ2File(io.BytesIO(data)), num_bytes, name)
            case "zstd" | "br" | "snappy":
                try:
                    import pyarrow as arrow
                except ImportError as error:
                    raise missing_library_error(
                        "pyarrow", f"an MDS shard compressed with {compression}", "parquet"
                    ) from error
                if compression == "snappy":
                    # Arrow returns a buffer of the requested size whatever is decompressed into it; the part
                    # that is not filled holds stale memory. The data's real size is stored in its header.
                    if _snappy_size(data) != num_bytes:
                        raise ValueError(
                            f"it decompresses to {_snappy_size(data):,} bytes; {_INDEX} states {num_bytes:,}"
                        )
                    return arrow.decompress(data, num_bytes, codec="snappy", asbytes=True)
                with arrow.input_stream(
                    arrow.BufferReader(data), {"br": "brotli"}.get(compression, compression)
                ) as stream:
                    return _of_size(stream.read(num_bytes + 1), num_bytes, name)
            case _:
                expected = "expected zstd, gz, bz2, br or snappy"
                raise DataError(f"{name} is compressed with {compression!r}; {expected}: write it with one of these")
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise read_error(name, error) from error


def _snappy_size(data: bytes) -> int:
    """Return the decompressed size of snappy data, as stored in its header.

    Raises:
        ValueError: The header is invalid.
    """
    return BinaryReader(data).varint()


def _inflate(file: gzip.GzipFile | bz2.BZ2File, num_bytes: int, name: str) -> bytes:
    """Decompress at most `num_bytes` bytes, the expected size of a file's content."""
    return _of_size(file.read(num_bytes + 1), num_bytes, name)


def _of_size(data: bytes, num_bytes: int, name: str) -> bytes:
    if len(data) > num_bytes:
        raise DataError(
            f"{name} is larger than the {num_bytes:,} bytes that {_INDEX} states; download it and the index again"
        )
    return data
