"""Token files: a corpus as one memory-mapped array of ids, which opens instantly at any size.

The format is a directory of plain little-endian arrays and one JSON header:

    header.json         {"format": "panax-tokens", "version": 1, "dtype": "uint16" or "uint32", "num_tokens",
                        "num_documents", "num_blank_documents", "num_bad_records", "num_filtered_documents",
                        "num_empty_answers", "num_with_special_tokens", "tokenizer" (a hash of the one that made the ids, or ""),
                        "vocab_size", "end_of_document" (an id, or null), "has_loss_mask", "content",
                        "checksums" (of each .bin file, by its name), "seal"}
    tokens.bin          num_tokens ids; each document is followed by the end-of-document id, if there is one
    offsets.bin         num_documents + 1 int64: document d is tokens[offsets[d]:offsets[d + 1]], its end included
    target_counts.bin   vocab_size int64: how often each id is a target that carries loss
    loss_mask.bin       only if has_loss_mask: num_tokens uint8, above 0 if the id, as a target, carries loss
    bad_records.jsonl   only if num_bad_records: {"where", "reason"} of each record that was skipped

`content` is a hash of the ids, the offsets and the mask: the same on every machine, whenever the file was
written. `checksums` are xxh3, 128 bits; `seal` is xxh3, 64 bits, of all other fields as sorted, compact JSON.
Files of Panax 0.1 have neither.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from panax.core.errors import DataError

from ...system import json_reader
from ..files.checksums import checksum_error, compute_checksum, compute_seal, verify_once
from ..files.files import decode_utf8, fingerprint, read_bytes
from ..files.memory_map import check_mapped, map_file

FORMAT_VERSION = 1
BUFFER_TOKENS = 2**20
_FORMAT = "panax-tokens"
_HASHED = ("tokens", "offsets", "loss_mask")
LARGEST_VOCABULARY = 2**24
"""Limit of ids if the vocabulary size is unknown: counts are stored for each id below the largest."""

_AGAIN = "write the token file again"
HEADER = "header.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_MAPPED_DTYPES = {**DTYPES, "uint8": np.dtype("u1"), "uint64": np.dtype("<u8")}
"""Dtypes of ids in external files; Panax's format has two."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """An open token file.

    Attributes:
        tokens: All ids, memory-mapped.
        offsets: Start of each document, and the end of the last one.
        loss_mask: Above 0 if an id carries loss as a target; None if all do.
        target_counts: How often each id is a target that carries loss.
        vocab_size: One more than the largest possible id.
        end_of_document: The id that ends each document; None if documents end without an id.
        num_blank_documents: Number of empty documents that were skipped.
        num_bad_records: Number of unusable records that were skipped.
        num_filtered_documents: Number of documents that a filter removed.
        num_empty_answers: Number of prompts with an empty answer.
        num_with_special_tokens: Number of documents that spell one of the tokenizer's special tokens.
        tokenizer: The fingerprint of the tokenizer that made the ids; "" if unknown.
        content: A hash of the file's content.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    offsets: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.uint8] | None
    target_counts: npt.NDArray[np.int64]
    vocab_size: int
    end_of_document: int | None
    num_blank_documents: int
    content: str
    num_bad_records: int = 0
    num_filtered_documents: int = 0
    num_empty_answers: int = 0
    num_with_special_tokens: int = 0
    tokenizer: str = ""

    def check(self) -> None:
        """Raise a DataError if one of the files was truncated after it was opened."""
        check_mapped(self.tokens, self.offsets, self.loss_mask, self.target_counts)


class TokenWriter:
    """Writer of a token file, one document after another, with a few million tokens in memory.

    Attributes:
        num_tokens: Number of appended tokens, including ends of documents.
        num_documents: Number of appended documents.
        num_bad_records: Number of records skipped as unusable; for the header.
        num_filtered_documents: Number of documents dropped by a filter; for the header.
        num_empty_answers: Number of prompts with an empty answer; for the header.
        num_with_special_tokens: Number of documents that spell a special token; for the header.
        tokenizer: The fingerprint of the tokenizer that makes the ids; for the header.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with TokenWriter(directory, vocab_size=10, end_of_document=9) as writer:
    ...     writer.append([1, 2, 3])
    ...     writer.append([4, 5], num_prompt_tokens=1)
    >>> store = open_tokens(directory)
    >>> store.tokens.tolist(), store.offsets.tolist()
    ([1, 2, 3, 9, 4, 5, 9], [0, 4, 7])
    >>> store.loss_mask.tolist()
    [1, 1, 1, 1, 0, 1, 1]
    """

    def __init__(self, directory: str | Path, *, vocab_size: int, end_of_document: int | None) -> None:
        """Start a token file in `directory`, which is created if missing.

        Args:
            vocab_size: One more than the largest id; up to 65,536 an id takes two bytes, above that four.
            end_of_document: The id that is put after each document; None if documents end by themselves.
        """
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._vocab_size = vocab_size
        self._end = end_of_document
        self._dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self._files: dict[str, BinaryIO] = {}
        self._hashes = {name: hashlib.blake2b(digest_size=16) for name in _HASHED}
        self._checksums: dict[str, xxhash.xxh3_128] = {}
        self._counts = np.zeros(vocab_size, np.int64)
        self._ids: list[npt.NDArray[np.int64]] = []
        self._lengths: list[int] = []
        self._num_prompt_tokens: list[int] = []
        self._losses: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._num_written = 0
        self._masked = False
        self._num_blank = 0
        self.num_tokens = 0
        self.num_documents = 0
        self.num_bad_records = 0
        self.num_filtered_documents = 0
        self.num_empty_answers = 0
        self.num_with_special_tokens = 0
        self.tokenizer = ""

    def append(
        self,
        ids: Sequence[int] | npt.NDArray[np.integer],
        *,
        num_prompt_tokens: int = 0,
        loss: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Add a document, without its end; of its tokens the first `num_prompt_tokens` carry no loss.

        Args:
            loss: For each id, 1 if it carries loss as a target, in place of `num_prompt_tokens`.

        Raises:
            DataError: An id is outside the vocabulary (found when the buffer is written, so perhaps later).
        """
        self._ids.append(np.asarray(ids, np.int64))
        length = len(ids)
        if self._end is not None:
            self._ids.append(np.array([self._end]))
            length += 1
        if loss is not None:
            self._losses.append((len(self._lengths), loss))
        self._lengths.append(length)
        self._num_prompt_tokens.append(num_prompt_tokens)
        self.num_tokens += length
        self.num_documents += 1
        if self.num_tokens - self._num_written >= BUFFER_TOKENS:
            self._flush()

    def skip(self) -> None:
        """Count an empty document."""
        self._num_blank += 1

    def __enter__(self) -> "TokenWriter":
        self._write("offsets", np.zeros(1, "<i8"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
                self._finish()
        finally:
            for file in self._files.values():
                file.close()

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self._directory / f"{name}.bin").open("wb")
            self._checksums[name] = xxhash.xxh3_128()
        data = values.tobytes()
        self._files[name].write(data)
        self._checksums[name].update(data)
        if name in self._hashes:
            self._hashes[name].update(data)

    def _flush(self) -> None:
        if not self._lengths:
            return
        ids = np.concatenate(self._ids)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = int(ids.max() if ids.min() >= 0 else ids.min())
            raise DataError(
                f"token id {wrong} is outside the vocabulary of {self._vocab_size}; pass the right vocab_size"
            )
        lengths = np.array(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        mask = np.ones(len(ids), np.uint8)
        prompts = np.array(self._num_prompt_tokens, np.int64)
        if prompts.any() or self._losses:
            inside = np.arange(len(ids)) - np.repeat(starts, lengths)
            mask[inside < np.repeat(prompts, lengths)] = 0
            for document, loss in self._losses:
                mask[starts[document] : starts[document] + len(loss)] = loss
            if not self._masked:
                self._masked = True
                for begin in range(0, self._num_written, BUFFER_TOKENS):
                    self._write("loss_mask", np.ones(min(BUFFER_TOKENS, self._num_written - begin), np.uint8))
        self._write("tokens", ids.astype(DTYPES[self._dtype]))
        self._write("offsets", (ends + self._num_written).astype("<i8"))
        if self._masked:
            self._write("loss_mask", mask)
        mask[starts] = 0  # nothing predicts a document's first token
        self._counts += np.bincount(ids[mask != 0], minlength=self._vocab_size)
        self._num_written += len(ids)
        self._ids, self._lengths, self._num_prompt_tokens, self._losses = [], [], [], []

    def _finish(self) -> None:
        self._write("tokens", np.zeros(0, DTYPES[self._dtype]))
        self._write("target_counts", self._counts.astype("<i8"))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        write_header(
            self._directory,
            dtype=self._dtype,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_blank_documents=self._num_blank,
            num_bad_records=self.num_bad_records,
            num_filtered_documents=self.num_filtered_documents,
            num_empty_answers=self.num_empty_answers,
            num_with_special_tokens=self.num_with_special_tokens,
            tokenizer=self.tokenizer,
            vocab_size=self._vocab_size,
            end_of_document=self._end,
            has_loss_mask=self._masked,
            content=fingerprint(*(self._hashes[name].hexdigest() for name in _HASHED)),
            checksums={name: digest.hexdigest() for name, digest in self._checksums.items()},
        )


def write_header(directory: Path, **fields: Any) -> None:
    """Write the header of a token file, sealed, once its other files are there."""
    header = {"format": _FORMAT, "version": FORMAT_VERSION, **fields}
    header["seal"] = compute_seal(header)
    with (directory / HEADER).open("w", encoding="utf-8") as file:
        file.write(json.dumps(header, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


class _Header(NamedTuple):
    """The fields of a header, each of its type."""

    dtype: np.dtype
    num_tokens: int
    num_documents: int
    vocab_size: int
    end_of_document: int | None
    masked: bool
    num_blank_documents: int
    num_bad_records: int
    num_filtered_documents: int
    num_empty_answers: int
    num_with_special_tokens: int
    tokenizer: str
    content: str
    checksums: dict[str, str] | None


def open_tokens(directory: str | Path, *, tokens: Path | None = None, verified_dir: Path | None = None) -> TokenStore:
    """Open a token file. It is read in full once, to verify checksums and that each id is in the vocabulary.

    Args:
        directory: The token file's directory.
        tokens: Path of the ids, if they are not in the directory.
        verified_dir: A directory that records verified files, so that they are not read again until they
            change. None: files are verified each time.

    Raises:
        DataError: The directory is not a token file, is of another version, or is damaged: a size, a checksum
            or an id is wrong.
    """
    directory = Path(directory)
    header = _read_header(directory / HEADER, elsewhere=tokens is not None)
    files = {
        "tokens": (tokens or directory / "tokens.bin", header.dtype, header.num_tokens),
        "offsets": (directory / "offsets.bin", np.dtype("<i8"), header.num_documents + 1),
        "target_counts": (directory / "target_counts.bin", np.dtype("<i8"), header.vocab_size),
    }
    if header.masked:
        files["loss_mask"] = (directory / "loss_mask.bin", np.dtype("u1"), header.num_tokens)
    arrays = {name: map_file(path, dtype, (count,), _AGAIN) for name, (path, dtype, count) in files.items()}
    paths = {name: path for name, (path, _, _) in files.items()}
    expected = {"checksums": header.checksums, "content": header.content, "vocab_size": header.vocab_size}
    offsets = arrays["offsets"]
    if offsets[0] != 0 or offsets[-1] != header.num_tokens or not (np.diff(offsets) > 0).all():
        raise DataError(f"{paths['offsets']} is damaged: offsets don't rise to {header.num_tokens}; {_AGAIN}")
    verify_once(list(paths.values()), expected, lambda: _check(paths, header), verified_dir)
    return TokenStore(
        tokens=arrays["tokens"],
        offsets=offsets,
        loss_mask=arrays.get("loss_mask"),
        target_counts=arrays["target_counts"],
        vocab_size=header.vocab_size,
        end_of_document=header.end_of_document,
        num_blank_documents=header.num_blank_documents,
        num_bad_records=header.num_bad_records,
        num_filtered_documents=header.num_filtered_documents,
        num_empty_answers=header.num_empty_answers,
        num_with_special_tokens=header.num_with_special_tokens,
        tokenizer=header.tokenizer,
        content=header.content,
    )


def _read_header(path: Path, *, elsewhere: bool) -> _Header:
    """Read the header; `elsewhere`: True if the ids are in another program's file."""
    try:
        header = json_reader.parse(decode_utf8(read_bytes(path), str(path)))
        if header["format"] != _FORMAT or header["version"] != FORMAT_VERSION:
            raise DataError(
                f"{path}: format {header['format']!r} version {header['version']!r}; "
                f"expected {_FORMAT!r} version {FORMAT_VERSION}: {_AGAIN}"
            )
        end, masked, checksums = header["end_of_document"], header["has_loss_mask"], header.get("checksums")
        parsed_header = _Header(
            dtype=(_MAPPED_DTYPES if elsewhere else DTYPES)[header["dtype"]],
            num_tokens=_count(header["num_tokens"]),
            num_documents=_count(header["num_documents"]),
            vocab_size=_count(header["vocab_size"]),
            end_of_document=None if end is None else _count(end),
            masked=bool(masked),
            num_blank_documents=_count(header["num_blank_documents"]),
            # Files of earlier versions of Panax have none of these.
            num_bad_records=_count(header.get("num_bad_records", 0)),
            num_filtered_documents=_count(header.get("num_filtered_documents", 0)),
            num_empty_answers=_count(header.get("num_empty_answers", 0)),
            num_with_special_tokens=_count(header.get("num_with_special_tokens", 0)),
            tokenizer=str(header.get("tokenizer", "")),
            content=str(header["content"]),
            checksums=None if checksums is None else {str(name): str(value) for name, value in checksums.items()},
        )
        if parsed_header.num_documents == 0:
            raise DataError(f"{path.parent} holds no document; expected at least one")
        if elsewhere and checksums is None:
            raise ValueError("it is of an earlier version and has no checksums")
        if checksums is not None and header.get("seal") != compute_seal(header):
            raise ValueError("its checksum does not match")
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); {_AGAIN}") from error
    return parsed_header


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"expected a whole number of at least 0, got {value!r}")
    return value


def _check(paths: Mapping[str, Path], header: _Header) -> None:
    """Raise a DataError if the files do not match their checksums, or an id is outside the vocabulary."""
    hashes = {name: hashlib.blake2b(digest_size=16) for name in _HASHED}

    def look(name: str, block: bytes, offset: int) -> None:
        if header.checksums is None and name in hashes:
            hashes[name].update(block)
        if name == "tokens":
            ids = np.frombuffer(block, header.dtype, len(block) // header.dtype.itemsize)
            if ids.size and int(ids.max()) >= header.vocab_size:
                where = offset // header.dtype.itemsize + int(ids.argmax())
                raise DataError(
                    f"{paths[name]}: id {int(ids.max())} at token {where} is outside the vocabulary of {header.vocab_size}: "
                    f"it is damaged, or its header is of another file; {_AGAIN}"
                )

    for name, path in paths.items():
        checksum = compute_checksum(path, functools.partial(look, name))
        if header.checksums is not None and header.checksums.get(name) != checksum:
            raise checksum_error(path, _AGAIN)
    if header.checksums is None and fingerprint(*(hashes[name].hexdigest() for name in _HASHED)) != header.content:
        raise checksum_error(paths["tokens"], _AGAIN)
