"""Token files: a corpus as one memory-mapped array of ids, which opens at once whatever its size.

The format is a directory of plain little-endian arrays and one JSON header:

    header.json         {"format": "panax-tokens", "version": 1, "dtype": "uint16" or "uint32", "num_tokens",
                        "num_documents", "num_blank_documents", "num_bad_records", "num_filtered_documents",
                        "vocab_size", "end_of_document" (an id, or null), "has_loss_mask", "content"}
    tokens.bin          num_tokens ids; each document is followed by the end-of-document id
    offsets.bin         num_documents + 1 int64: document d is tokens[offsets[d]:offsets[d + 1]], its end included
    target_counts.bin   vocab_size int64: how often each id is a target that carries loss
    loss_mask.bin       only if has_loss_mask: num_tokens uint8, 1 where the id, as a target, carries loss
    bad_records.jsonl   only if num_bad_records: {"where", "reason"} of each record that was skipped

`content` is a hash of the ids, the offsets and the mask: the same on every machine, whenever the file was written.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.validated import Validated

from .cache import cached
from .files import decode_utf8, file_marks, fingerprint, read_bytes, unreadable

FORMAT_VERSION = 1
_BUFFER_TOKENS = 2**20
_FORMAT = "panax-tokens"
_HEADER = "header.json"
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_MAPPED_DTYPES = {**_DTYPES, "uint8": np.dtype("u1"), "uint64": np.dtype("<u8")}
"""What ids may be that lie elsewhere; this format itself has two kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """An open token file.

    Attributes:
        tokens: All ids, memory-mapped.
        offsets: Where each document begins, and where the last one ends.
        loss_mask: 1 where an id carries loss as a target; None when all do.
        target_counts: How often each id is a target that carries loss.
        vocab_size: One more than the largest id there may be.
        end_of_document: The id that ends each document; None when they end without one.
        num_blank_documents: How many documents of the corpus held nothing and were left out.
        num_bad_records: How many records of the corpus could not be used and were skipped.
        num_filtered_documents: How many documents of the corpus a filter left out.
        content: A hash of what the file holds.
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


class TokenWriter:
    """Writes a token file, one document after another, holding a few million tokens in memory.

    Attributes:
        num_tokens: How many are appended, ends of documents included.
        num_documents: How many are appended.
        num_bad_records: How many were skipped as unusable; for the header.
        num_filtered_documents: How many a filter left out; for the header.

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

    def __init__(self, directory: str | Path, *, vocab_size: int, end_of_document: int) -> None:
        """Begin a token file in `directory`, which is made when it is missing.

        Args:
            vocab_size: One more than the largest id; up to 65,536 an id takes two bytes, above that four.
            end_of_document: The id that is put after each document.
        """
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._vocab_size = vocab_size
        self._end = end_of_document
        self._dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        self._files: dict[str, BinaryIO] = {}
        self._hashes = {name: hashlib.blake2b(digest_size=16) for name in ("tokens", "offsets", "loss_mask")}
        self._counts = np.zeros(vocab_size, np.int64)
        self._ids: list[npt.NDArray[np.int64]] = []
        self._lengths: list[int] = []
        self._num_prompt_tokens: list[int] = []
        self._num_written = 0
        self._masked = False
        self._num_blank = 0
        self.num_tokens = 0
        self.num_documents = 0
        self.num_bad_records = 0
        self.num_filtered_documents = 0

    def append(self, ids: Sequence[int] | npt.NDArray[np.integer], *, num_prompt_tokens: int = 0) -> None:
        """Add a document, without its end; of its tokens the first `num_prompt_tokens` carry no loss.

        Raises:
            DataError: An id is outside the vocabulary (found when the buffer is written, so perhaps later).
        """
        self._ids += [np.asarray(ids, np.int64), np.array([self._end])]
        self._lengths.append(len(ids) + 1)
        self._num_prompt_tokens.append(num_prompt_tokens)
        self.num_tokens += len(ids) + 1
        self.num_documents += 1
        if self.num_tokens - self._num_written >= _BUFFER_TOKENS:
            self._flush()

    def skip(self) -> None:
        """Count a document that holds nothing."""
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
        data = values.tobytes()
        self._files[name].write(data)
        if name in self._hashes:
            self._hashes[name].update(data)

    def _flush(self) -> None:
        if not self._lengths:
            return
        ids = np.concatenate(self._ids)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = int(ids.max() if ids.min() >= 0 else ids.min())
            raise DataError(
                f"token id {wrong} is outside the vocabulary of {self._vocab_size}; give the right vocab_size"
            )
        lengths = np.array(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        mask = np.ones(len(ids), np.uint8)
        prompts = np.array(self._num_prompt_tokens, np.int64)
        if prompts.any():
            inside = np.arange(len(ids)) - np.repeat(starts, lengths)
            mask[inside < np.repeat(prompts, lengths)] = 0
            if not self._masked:
                self._masked = True
                for begin in range(0, self._num_written, _BUFFER_TOKENS):
                    self._write("loss_mask", np.ones(min(_BUFFER_TOKENS, self._num_written - begin), np.uint8))
        self._write("tokens", ids.astype(_DTYPES[self._dtype]))
        self._write("offsets", (ends + self._num_written).astype("<i8"))
        if self._masked:
            self._write("loss_mask", mask)
        mask[starts] = 0  # nothing predicts a document's first token
        self._counts += np.bincount(ids[mask == 1], minlength=self._vocab_size)
        self._num_written += len(ids)
        self._ids, self._lengths, self._num_prompt_tokens = [], [], []

    def _finish(self) -> None:
        self._write("tokens", np.zeros(0, _DTYPES[self._dtype]))
        self._write("target_counts", self._counts.astype("<i8"))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        _write_header(
            self._directory,
            dtype=self._dtype,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_blank_documents=self._num_blank,
            num_bad_records=self.num_bad_records,
            num_filtered_documents=self.num_filtered_documents,
            vocab_size=self._vocab_size,
            end_of_document=self._end,
            has_loss_mask=self._masked,
            content=fingerprint(*(self._hashes[name].hexdigest() for name in ("tokens", "offsets", "loss_mask"))),
        )


def _write_header(directory: Path, **fields: Any) -> None:
    header = {"format": _FORMAT, "version": FORMAT_VERSION, **fields}
    with (directory / _HEADER).open("w", encoding="utf-8") as file:
        file.write(json.dumps(header, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def open_tokens(directory: str | Path, *, tokens: Path | None = None) -> TokenStore:
    """Open a token file.

    Args:
        directory: Where it is.
        tokens: Where its ids are, when they are not in the directory.

    Raises:
        DataError: It is not a token file, of another version, or damaged: a file's size is not what the header says.
    """
    directory = Path(directory)
    path = directory / _HEADER
    try:
        header = json.loads(decode_utf8(read_bytes(path), str(path)))
        if header["format"] != _FORMAT or header["version"] != FORMAT_VERSION:
            raise DataError(
                f"{path}: format {header['format']!r} version {header['version']!r}; "
                f"expected {_FORMAT!r} version {FORMAT_VERSION}: write the token file again"
            )
        num_tokens, num_documents = int(header["num_tokens"]), int(header["num_documents"])
        dtypes = _DTYPES if tokens is None else _MAPPED_DTYPES
        dtype, vocab_size, content = dtypes[header["dtype"]], int(header["vocab_size"]), str(header["content"])
        masked, end = bool(header["has_loss_mask"]), header["end_of_document"]
        blank = int(header["num_blank_documents"])
        # Files of earlier versions of Panax have neither.
        bad, filtered = int(header.get("num_bad_records", 0)), int(header.get("num_filtered_documents", 0))
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); write the token file again") from error
    if num_documents == 0:
        raise DataError(f"{directory} holds no document; expected at least one")
    offsets = _map(directory / "offsets.bin", np.dtype("<i8"), num_documents + 1)
    if offsets[0] != 0 or offsets[-1] != num_tokens or not (np.diff(offsets) > 0).all():
        raise DataError(f"{directory / 'offsets.bin'} is damaged: offsets don't rise to {num_tokens}; write it again")
    return TokenStore(
        tokens=_map(tokens or directory / "tokens.bin", dtype, num_tokens),
        offsets=offsets,
        loss_mask=_map(directory / "loss_mask.bin", np.dtype("u1"), num_tokens) if masked else None,
        target_counts=_map(directory / "target_counts.bin", np.dtype("<i8"), vocab_size),
        vocab_size=vocab_size,
        end_of_document=end,
        num_blank_documents=blank,
        num_bad_records=bad,
        num_filtered_documents=filtered,
        content=content,
    )


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            expected = f"expected {count * dtype.itemsize} ({count} of {dtype.name})"
            raise DataError(f"{path} has {size} bytes; {expected}: it is damaged or cut short; write it again")
        return np.memmap(path, dtype, mode="r").view(np.ndarray)
    except OSError as error:
        raise unreadable(path, error) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile(Validated):
    """A corpus that is already tokens: a token file in Panax's format, or a flat file of ids.

    Attributes:
        path: A directory that `TokenWriter` wrote (or the `tokens.bin` in it), or a flat file of unsigned integers.
        dtype: Of a flat file, and only there: "uint16" or "uint32", little-endian.
        end_of_document: Of a flat file, and only there: the id that ends each document. None: it is one document.
        vocab_size: Of a flat file, and only there. None: one more than the largest id in it.
    """

    path: str
    dtype: str | None = None
    end_of_document: int | None = None
    vocab_size: int | None = None

    def fingerprint(self) -> str:
        path = Path(self.path).expanduser()
        files = [path / _HEADER if path.is_dir() else path]
        return fingerprint("token_file", self.dtype, self.end_of_document, self.vocab_size, *file_marks(files))

    def open(self, cache: Path) -> TokenStore:
        """Open it; a flat file is read through once, and what was found in it is kept in the directory `cache`.

        Raises:
            DataError: It can't be read, is damaged, or its settings don't fit it.
        """
        path = Path(self.path).expanduser()
        directory = path if path.is_dir() else path.parent
        if (directory / _HEADER).is_file() and (path.is_dir() or path.name == "tokens.bin"):
            given = [name for name in ("dtype", "end_of_document", "vocab_size") if getattr(self, name) is not None]
            if given:
                raise RecipeError(f"{', '.join(given)} has no effect: {directory / _HEADER} says it; leave it out")
            return open_tokens(directory)
        if not path.is_file():
            raise DataError(f"{path} is not a token file; expected a directory with {_HEADER}, or a flat file of ids")
        if self.dtype not in _DTYPES:
            raise RecipeError(f"dtype={self.dtype!r} for the flat token file {path}; expected {' or '.join(_DTYPES)}")
        return cached(
            cache,
            f"index-v{FORMAT_VERSION}-{self.fingerprint()}",
            build=lambda target: self._index(path, target),
            read=lambda entry: open_tokens(entry, tokens=path),
        )

    def _index(self, path: Path, target: Path) -> None:
        dtype = _DTYPES[self.dtype or ""]
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes; expected one or more ids of {dtype.itemsize} bytes ({self.dtype})"
            )
        tokens = _map(path, dtype, size // dtype.itemsize)
        counts = np.zeros(self.vocab_size or 1, np.int64)
        digest = hashlib.blake2b(digest_size=16)
        ends: list[npt.NDArray[np.int64]] = []
        for begin in range(0, len(tokens), _BUFFER_TOKENS):
            block = tokens[begin : begin + _BUFFER_TOKENS]
            digest.update(block.tobytes())
            found = np.bincount(block)
            if self.vocab_size is not None and len(found) > self.vocab_size:
                where = begin + int(np.argmax(block))
                raise DataError(
                    f"{path}: id {len(found) - 1} at token {where}; vocab_size={self.vocab_size}, or wrong dtype"
                )
            counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
            counts[: len(found)] += found
            if self.end_of_document is not None:
                ends.append(np.flatnonzero(block == self.end_of_document) + (begin + 1))
        offsets = np.unique(np.concatenate([[0], *ends, [len(tokens)]]).astype("<i8"))
        if self.end_of_document is not None and len(offsets) == 2 and tokens[-1] != self.end_of_document:
            raise DataError(
                f"{path} nowhere holds end_of_document={self.end_of_document}; give the id it uses, or None"
            )
        counts -= np.bincount(tokens[offsets[:-1]], minlength=len(counts))  # nothing predicts a document's first token
        (target / "offsets.bin").write_bytes(offsets.tobytes())
        (target / "target_counts.bin").write_bytes(counts.astype("<i8").tobytes())
        _write_header(
            target,
            dtype=self.dtype,
            num_tokens=len(tokens),
            num_documents=len(offsets) - 1,
            num_blank_documents=0,
            vocab_size=len(counts),
            end_of_document=self.end_of_document,
            has_loss_mask=False,
            content=fingerprint(digest.hexdigest(), self.end_of_document),
        )
