"""A corpus that is already tokenized: Panax's files, or a flat file of ids with a separately stored index."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from panax.core.errors import DataError, RecipeError
from panax.core.validation import Validated
from panax.system.files import expand_user

from ..files.cache import read_or_build
from ..files.checksums import VERIFIED_FOLDER
from ..files.files import cache_identity, fingerprint
from ..files.memory_map import check_mapped, map_file
from .tokens import (
    BUFFER_TOKENS,
    DTYPES,
    FORMAT_VERSION,
    HEADER,
    LARGEST_VOCABULARY,
    TokenStore,
    open_tokens,
    write_header,
)


def check_ids(corpus: Any) -> None:
    """Raise a RecipeError if `end_of_document` is not an id, or `vocab_size` not a number of ids."""
    for name, least in (("end_of_document", 0), ("vocab_size", 1)):
        value = getattr(corpus, name)
        if value is not None and value < least:
            raise RecipeError(f"{name}={value}; expected {least} or more, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile(Validated):
    """A corpus that is already tokenized: a token file in Panax's format, or a flat file of ids.

    Attributes:
        path: A directory that `TokenWriter` wrote (or the `tokens.bin` in it), or a flat file of unsigned
            integers.
        dtype: Dtype of a flat file (not allowed otherwise): "uint16" or "uint32", little-endian.
        end_of_document: For a flat file only: the id that ends each document. None: it is one document.
        vocab_size: For a flat file only. None: one more than its largest id.
    """

    path: str
    dtype: str | None = None
    end_of_document: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_ids(self)

    def fingerprint(self) -> str:
        path = expand_user(self.path)
        files = [path / HEADER if path.is_dir() else path]
        return fingerprint("token_file", self.dtype, self.end_of_document, self.vocab_size, *cache_identity(files))

    def open(self, cache: Path) -> TokenStore:
        """Open the file; a flat file is scanned once, and the result is stored in the directory `cache`.

        Raises:
            DataError: The file can't be read, is damaged, or does not match the settings.
        """
        path = expand_user(self.path)
        directory = path if path.is_dir() else path.parent
        if (directory / HEADER).is_file() and (path.is_dir() or path.name == "tokens.bin"):
            setting_names = [
                name for name in ("dtype", "end_of_document", "vocab_size") if getattr(self, name) is not None
            ]
            if setting_names:
                raise RecipeError(
                    f"{', '.join(setting_names)} has no effect: {directory / HEADER} states it; remove it"
                )
            return open_tokens(directory, verified_dir=cache / VERIFIED_FOLDER)
        if not path.is_file():
            raise DataError(f"{path} is not a token file; expected a directory with {HEADER}, or a flat file of ids")
        if self.dtype not in DTYPES:
            raise RecipeError(f"dtype={self.dtype!r} for the flat token file {path}; expected {' or '.join(DTYPES)}")
        return read_or_build(
            cache,
            f"index-v{FORMAT_VERSION}-{self.fingerprint()}",
            build=lambda target: self._index(path, target),
            read=lambda entry: open_tokens(entry, tokens=path, verified_dir=cache / VERIFIED_FOLDER),
        )

    def _index(self, path: Path, target: Path) -> None:
        dtype = DTYPES[self.dtype or ""]
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes; expected one or more ids of {dtype.itemsize} bytes ({self.dtype})"
            )
        tokens = map_file(path, dtype, (size // dtype.itemsize,), "write it again")
        counts = np.zeros(self.vocab_size or 1, np.int64)
        digest, checksum = hashlib.blake2b(digest_size=16), xxhash.xxh3_128()
        ends: list[npt.NDArray[np.int64]] = []
        for begin in range(0, len(tokens), BUFFER_TOKENS):
            check_mapped(tokens)
            block = tokens[begin : begin + BUFFER_TOKENS].copy()
            digest.update(block.data)
            checksum.update(block.data)
            check_range(block, begin, self.vocab_size, str(path))
            block_counts = np.bincount(block)
            counts = np.pad(counts, (0, max(0, len(block_counts) - len(counts))))
            counts[: len(block_counts)] += block_counts
            if self.end_of_document is not None:
                ends.append(np.flatnonzero(block == self.end_of_document) + (begin + 1))
        offsets = np.unique(np.concatenate([[0], *ends, [len(tokens)]]).astype("<i8"))
        if self.end_of_document is not None and len(offsets) == 2 and tokens[-1] != self.end_of_document:
            raise DataError(
                f"{path} nowhere holds end_of_document={self.end_of_document}; pass the id it uses, or None"
            )
        counts -= np.bincount(tokens[offsets[:-1]], minlength=len(counts))  # a document's first token is not a target
        write_index(
            target,
            offsets,
            counts,
            checksum.hexdigest(),
            dtype=self.dtype,
            num_blank_documents=0,
            end_of_document=self.end_of_document,
            content=fingerprint(digest.hexdigest(), self.end_of_document),
        )


def check_range(block: npt.NDArray[np.unsignedinteger], begin: int, vocab_size: int | None, name: str) -> None:
    """Raise a DataError if an id is outside the vocabulary, or, if that is unknown, beyond the largest
    possible one.

    Args:
        block: Ids from token `begin` on.
    """
    largest = int(block.max())
    if largest >= (vocab_size or LARGEST_VOCABULARY):
        where = begin + int(block.argmax())
        known = (
            f"vocab_size={vocab_size}, or"
            if vocab_size
            else "larger than any vocabulary: damaged? Else give vocab_size=;"
        )
        raise DataError(f"{name}: id {largest} at token {where}; {known} wrong dtype")


def write_index(
    directory: Path,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    tokens_checksum: str,
    **fields: Any,
) -> None:
    """Write the index files of a token file for ids in another program's file."""
    checksums = {"tokens": tokens_checksum}
    for name, values in (("offsets", offsets), ("target_counts", counts)):
        data = values.astype("<i8").tobytes()
        (directory / f"{name}.bin").write_bytes(data)
        checksums[name] = xxhash.xxh3_128_hexdigest(data)
    write_header(
        directory,
        num_tokens=int(offsets[-1]),
        num_documents=len(offsets) - 1,
        vocab_size=len(counts),
        has_loss_mask=False,
        checksums=checksums,
        **fields,
    )
