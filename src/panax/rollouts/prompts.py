"""Prompts to which answers are drawn: records with a prompt, and whatever the rewards need of it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.errors import DataError
from ..core.protocols import Axes
from ..core.validation import Validated
from ..data.files.bounds import MAX_RECORD_BYTES
from ..data.files.files import find_files, fingerprint
from ..data.formats.json_records import JSON_PATTERNS, JSONL_PATTERNS, read_records
from ..data.text.corpus import BadRecord

PROMPT = "prompt"
"""Leaf with the index of each prompt, and the field of a record with its text or messages."""

Record = Mapping[str, Any]
"""JSON values by name; `prompt` is a text, or the messages of a conversation."""


class Prompts:
    """Prompts as examples, so that a source draws them in a random order and resumes exactly.

    Attributes:
        records: All records, those that are held out included.
        num_examples: Number of prompts.
    """

    def __init__(self, records: Sequence[Record], numbers: npt.NDArray[np.int64] | None = None):
        self.records = records
        self._numbers = np.arange(len(records)) if numbers is None else numbers
        self.num_examples = len(self._numbers)
        self.axes: Mapping[str, Axes] = {PROMPT: ("batch",)}
        self._keys = np.array([_hash(record) for record in records], np.uint64)
        self.fingerprint = fingerprint("prompts", self.keys().tolist())

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        """Return the indices of prompts among all records."""
        return {PROMPT: self._numbers[numbers].astype(np.int32)}

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return a hash of each prompt's record."""
        return self._keys[self._numbers]

    def take(self, numbers: npt.NDArray[np.int64]) -> "Prompts":
        """Return the subset with these indices."""
        return Prompts(self.records, self._numbers[numbers])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFiles(Validated):
    """Files of JSON lines with a record for each prompt: `prompt` is a text, or the messages of a conversation; the
    other fields are for the rewards.

    Attributes:
        paths: Files, folders and globs, as for `panax.data.Jsonl`.
    """

    paths: tuple[str, ...]

    def open(self, root: Path, max_bad_records: int) -> Prompts:
        """Read all records.

        Args:
            root: Folder for cached results; not used.
            max_bad_records: Maximum number of records that are no prompts, and skipped.

        Raises:
            DataError: A file can't be read, there are no prompts, or too many bad records.
        """
        records, bad = [], []
        for file in find_files(self.paths, (*JSONL_PATTERNS, *JSON_PATTERNS)):
            with file.open_local() as path:
                for where, record in read_records(path, file.name, MAX_RECORD_BYTES):
                    reason = record.reason if isinstance(record, BadRecord) else _describe_fault(record)
                    if reason is None:
                        records.append(record)
                        continue
                    bad.append(f"{where}: {reason}")
                    if len(bad) > max_bad_records:
                        raise DataError(f"{bad[0]}; fix it, or allow bad records to be skipped with max_bad_records")
        if not records:
            raise DataError(f'{", ".join(self.paths)} holds no prompt; expected records such as {{"prompt": "..."}}')
        return Prompts(records)


def _describe_fault(record: Record) -> str | None:
    """Return why a record lacks a prompt; None if it has one."""
    prompt = record.get(PROMPT)
    if isinstance(prompt, str) and prompt:
        return None
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return None
    return f'expected "prompt" with a text or a list of messages, got {json.dumps(prompt)[:80]}'


def _hash(record: Record) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(record, sort_keys=True).encode())
