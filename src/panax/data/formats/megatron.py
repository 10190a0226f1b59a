"""Tokens prepared by Megatron: `.bin` and `.idx` files, memory-mapped without conversion.

The index is little-endian:

    9 bytes             b"MMIDIDX" and two zero bytes
    uint64              version, 1
    uint8               the dtype of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6, 7: floats)
    uint64              num_sequences
    uint64              num_indices
    int32[sequences]    the length of each sequence, in tokens
    int64[sequences]    the offset of each in the .bin file, in bytes
    int64[indices]      the number of sequences before each document, and before the end
    int8[sequences]     only in multi-modal files: the mode of each sequence

The fairseq index that Megatron-LM also supported (b"TNTIDX") is rejected.

Source: the format that Megatron-Core's `IndexedDataset` writes.
"""

import contextlib
import dataclasses
import hashlib
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from panax.core.errors import DataError, RecipeError
from panax.stores import is_remote

from ...system.binary_reader import BinaryReader
from ...system.files import expand_user
from ..files.cache import read_or_build
from ..files.checksums import VERIFIED_FOLDER
from ..files.files import DataFile, cache_identity, find_files, fingerprint, read_error
from ..files.memory_map import check_mapped, map_file
from ..text.token_file import TokenFile, check_ids, check_range, write_index
from ..text.tokens import FORMAT_VERSION, TokenStore, open_tokens

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX"
_HEADER_BYTES = 34
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK_TOKENS = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronTokens(TokenFile):
    """Tokens that Megatron's `preprocess_data.py` wrote: `PATH.bin` and `PATH.idx`.

    Attributes:
        path: The common prefix of both files' names, local or in an object store; or one of the names.
        dtype: Not used, since the index stores the dtype.
        end_of_document: The id that ends each document, if `--append-eod` was given; None: no such id.
        vocab_size: None: one more than the largest id in the file.
    """

    def __post_init__(self) -> None:
        check_ids(self)
        if self.dtype is not None:
            raise RecipeError(f"dtype={self.dtype!r} has no effect: the .idx file states the dtype; remove it")

    def fingerprint(self) -> str:
        return fingerprint("megatron", self.end_of_document, self.vocab_size, *cache_identity(self._files()))

    def open(self, cache: Path) -> TokenStore:
        """Open the files; they are scanned once, and the result is stored in the directory `cache`.

        Raises:
            DataError: The files can't be read, are damaged, or do not match the settings.
        """
        with contextlib.ExitStack() as leases:
            tokens_path, index_path = (leases.enter_context(file.open_local()) for file in self._files())
            names = [file.name for file in self._files()]
            index = read_index(index_path, names[1])
            tokens = _map_tokens(tokens_path, index, names[0])
            store = read_or_build(
                cache,
                f"index-v{FORMAT_VERSION}-{self.fingerprint()}",
                build=lambda target: self._build(tokens, index, target, names[0]),
                read=lambda entry: open_tokens(entry, tokens=tokens_path, verified_dir=cache / VERIFIED_FOLDER),
            )
            # Cached copies of remote files stay as long as the tokens are in use.
            weakref.finalize(store.tokens, leases.pop_all().close)
            return store

    def _files(self) -> list[DataFile]:
        prefix = self.path.removesuffix(".bin").removesuffix(".idx")
        found = []
        for suffix in (".bin", ".idx"):
            name = prefix + suffix
            if not is_remote(name) and not expand_user(name).is_file():
                raise DataError(f"{name} does not exist; expected {prefix}.bin and {prefix}.idx")
            found += find_files((name,), ())
        return found

    def _build(self, tokens: npt.NDArray[np.unsignedinteger], index: "Index", target: Path, name: str) -> None:
        counts = np.zeros(self.vocab_size or 1, np.int64)
        digest, checksum = hashlib.blake2b(digest_size=16), xxhash.xxh3_128()
        for begin in range(0, len(tokens), _BLOCK_TOKENS):
            check_mapped(tokens)
            block = tokens[begin : begin + _BLOCK_TOKENS].copy()
            digest.update(block.data)
            checksum.update(block.data)
            largest = int(block.max())
            if largest > np.iinfo(index.dtype).max:  # negative values, read as unsigned
                where = begin + int(np.argmax(block))
                raise DataError(f"{name}: token {where} is negative; expected ids: is it tokens at all?")
            check_range(block, begin, self.vocab_size, name)
            block_counts = np.bincount(block.astype(np.int64))
            counts = np.pad(counts, (0, max(0, len(block_counts) - len(counts))))
            counts[: len(block_counts)] += block_counts
        offsets = index.offsets[np.concatenate([[True], np.diff(index.offsets) > 0])]
        num_blank = len(index.offsets) - len(offsets)
        lasts = tokens[offsets[1:] - 1]
        if self.end_of_document is not None and (lasts != self.end_of_document).any():
            which = int(np.argmax(lasts != self.end_of_document))
            raise DataError(
                f"{name}: document {which} ends with id {lasts[which]}, not with "
                f"end_of_document={self.end_of_document}; pass the id they end with, or None if they end without one"
            )
        counts -= np.bincount(tokens[offsets[:-1]].astype(np.int64), minlength=len(counts))
        digest.update(offsets.astype("<i8").tobytes())
        write_index(
            target,
            offsets,
            counts,
            checksum.hexdigest(),
            dtype=f"uint{8 * tokens.itemsize}",
            num_blank_documents=num_blank,
            end_of_document=self.end_of_document,
            content=fingerprint(digest.hexdigest(), self.end_of_document),
        )


class Index(NamedTuple):
    """Content of an `.idx` file.

    Attributes:
        dtype: Dtype of the tokens.
        offsets: The beginning of each document, in tokens, and the end of the last one.
    """

    dtype: np.dtype
    offsets: npt.NDArray[np.int64]


def read_index(path: Path, name: str) -> Index:
    """Read an `.idx` file; every size in it is checked before use.

    Raises:
        DataError: The file is not an index, or is of another version, multi-modal, damaged or truncated.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise read_error(name, error) from error
    if not len(data):
        raise DataError(f"{name} can't be read: it is empty; write it again")
    head = data[:_HEADER_BYTES].tobytes()
    if head.startswith(_OLD_MAGIC):
        raise DataError(f"{name} is an index of the older kind (TNTIDX); convert it with Megatron's own tools")
    if len(head) < _HEADER_BYTES or not head.startswith(_MAGIC):
        raise DataError(f"{name} is not an index of Megatron; expected it to begin with {_MAGIC!r}")
    reader = BinaryReader(head, len(_MAGIC))
    version, code, num_sequences, num_indices = (reader.number(kind) for kind in ("<Q", "<B", "<Q", "<Q"))
    if version != 1:
        raise DataError(f"{name} has version {version}; expected 1: write it with a Megatron that writes that")
    if code not in _DTYPES:
        raise DataError(f"{name} has the dtype code {code}; expected one of integers, {sorted(_DTYPES)}")
    expected = _HEADER_BYTES + num_sequences * (4 + 8) + num_indices * 8
    if len(data) == expected + num_sequences and num_sequences:
        raise DataError(f"{name} is multi-modal: it gives each sequence a mode; expected text alone")
    if len(data) != expected:
        raise DataError(
            f"{name} has {len(data):,} bytes; expected {expected:,} for {num_sequences:,} sequences and {num_indices:,} "
            "indices: it is damaged or cut short"
        )
    dtype = np.dtype(_DTYPES[code])
    pieces = np.split(data[_HEADER_BYTES:], np.cumsum([num_sequences * 4, num_sequences * 8]))
    lengths, pointers, indices = (
        np.frombuffer(piece, kind) for piece, kind in zip(pieces, ("<i4", "<i8", "<i8"), strict=True)
    )
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or (pointers != ends[:-1] * dtype.itemsize).any():
        raise DataError(f"{name} is damaged: its sequences do not follow one another; write it again")
    rises = len(indices) and indices[0] == 0 and indices[-1] == num_sequences and (np.diff(indices) >= 0).all()
    if not rises:
        raise DataError(f"{name} is damaged: its documents do not rise from 0 to {num_sequences}; write it again")
    if not ends[-1]:
        raise DataError(f"{name} holds no token; expected at least one document")
    return Index(dtype, ends[indices])


def _map_tokens(path: Path, index: Index, name: str) -> npt.NDArray[np.unsignedinteger]:
    size, expected = path.stat().st_size, int(index.offsets[-1]) * index.dtype.itemsize
    if size != expected:
        raise DataError(f"{name} has {size:,} bytes; its index states {expected:,}: it is damaged or of another index")
    return map_file(path, f"<u{index.dtype.itemsize}", (int(index.offsets[-1]),), "write it again")
