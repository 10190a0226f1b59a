"""`Chats`: a corpus of conversations, from JSON records or Parquet."""

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panax.core.errors import DataError, RecipeError
from panax.core.validation import Validated

from ...system.files import expand_user
from ..files.bounds import MAX_RECORD_BYTES, check_positive
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
)
from ..formats.columns import ARROW_ERRORS, read_nested_rows
from ..formats.fields import missing_library_error
from ..formats.json_records import JSON_PATTERNS, JSONL_PATTERNS, read_records
from ..text.corpus import BadRecord, Document
from .conversation import Conversation
from .layouts import field_names, read_conversation

_PARQUET = (".parquet",)
_ROWS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chats(Validated):
    """Conversations of JSON lines, JSON arrays or Parquet files, rendered by the tokenizer's chat template.

    A record has OpenAI's `messages` (or the same list as `conversations`), ShareGPT's `conversations` with `from` and `value`,
    `prompt` and `completion`, or Alpaca's `instruction`, `input` and `output`; each record is recognized by its fields. `tools`
    and `chat_template_kwargs` are given to the template. Only answers carry loss, with the token that ends each.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        field: The field that holds the messages, if it has another name.
        template: A file with a chat template; None: the tokenizer's own.
        date: The day, YYYY-MM-DD, for templates that print today's date.
        max_record_bytes: A larger record is a bad record.
    """

    paths: tuple[str, ...]
    field: str = ""
    template: str | None = None
    date: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes")
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                raise RecipeError(f"date={self.date!r}; expected a day as YYYY-MM-DD, for example 2026-11-28") from None

    def documents(self) -> Iterator[Document | BadRecord]:
        for where, record in self.records(field_names(self.field)):
            yield record if isinstance(record, BadRecord) else self._conversation(record, where)

    def records(self, fields: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Yield each record of the files, or a `BadRecord`, with its location.

        Args:
            fields: The fields to read of Parquet files.
        """
        for name, path in open_each_local(self.files()):
            yield from self._rows(path, name, fields) if name.lower().endswith(_PARQUET) else self._records(path, name)

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        files_by_name: dict[str, DataFile] = {}
        for path in self.paths:
            try:
                each = find_files((path,), (*JSONL_PATTERNS, "**/*.parquet"))
            except DataError:
                if not expand_user(path).is_dir():
                    raise
                each = find_files((path,), JSON_PATTERNS)
            files_by_name.update((file.name, file) for file in each)
        return list(files_by_name.values()) if self.paths else find_files((), ())

    def fingerprint(self) -> str:
        return fingerprint("chats", self.field, *cache_identity(self.files()))

    def encoder(self, tokenizer: Any) -> Any:
        """Return the encoder of the conversations.

        Raises:
            DataError: There is no chat template, or it is not valid.
        """
        from .encoder import ChatEncoder
        from .template import ChatTemplate

        templates, name = tokenizer.chat_templates, "the tokenizer"
        if self.template is not None:
            path = expand_user(self.template)
            templates, name = {"default": decode_utf8(read_bytes(path), str(path))}, self.template
        if "default" not in templates:
            raise DataError(
                "conversations need a chat template, and the tokenizer has none; name a file with one in "
                "data.corpus.template, or use the tokenizer of the model's instruct version"
            )
        compiled = {
            key: ChatTemplate(templates[key], name=name, tokens=tokenizer.role_tokens, date=self.date)
            for key in ("default", "tool_use")
            if key in templates
        }
        return ChatEncoder(tokenizer, compiled["default"], compiled.get("tool_use"))

    def _records(self, path: Path, name: str) -> Iterator[tuple[str, Any]]:
        yield from read_records(path, name, self.max_record_bytes)

    def _rows(self, path: Path, name: str, fields: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        try:
            import pyarrow as arrow
        except ImportError as error:
            raise missing_library_error("pyarrow", "conversations in Parquet files", "parquet") from error
        try:
            yield from read_nested_rows(path, name, fields, self.max_record_bytes, _ROWS_AT_ONCE)
        except (*ARROW_ERRORS, arrow.ArrowException) as error:
            raise read_error(name, error) from error

    def _conversation(self, record: Any, where: str) -> Conversation | BadRecord:
        try:
            return read_conversation(record, where, self.field)
        except BadRecordError as error:
            return BadRecord(error.where, error.reason)
