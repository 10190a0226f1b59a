"""Records of JSON files, one at a time: a JSON object on each line, or one array of objects."""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from panax.core.errors import DataError

from ..files.bounds import describe_oversize
from ..files.decompression import SUFFIXES, is_compressed, open_file
from ..files.files import BadRecordError, decode_utf8, read_error
from ..text.corpus import BadRecord

JSONL_PATTERNS = tuple(
    f"**/*{lines}{end}" for lines in (".jsonl", ".ndjson", ".JSONL", ".NDJSON") for end in ("", *SUFFIXES)
) + tuple(f"**/*.json{end}" for end in SUFFIXES)
"""Patterns of files in a directory."""

JSON_PATTERNS = ("**/*.json", "**/*.JSON")
"""Patterns for a directory without any of the others: `.json` files next to those usually describe a data set
instead of containing one."""

_SKIP_BYTES = 2**20
_CHUNK = 2**16
_SPACE = re.compile(r"[ \t\r\n]*")
_NEAR_THE_END = 16
"""Distance from the end of the text read so far within which an error may be an incomplete number, name or
escape."""

_BEGIN = re.compile(rb"(\xef\xbb\xbf)?[ \t\r\n]*")


class DuplicateKeysObject(dict):
    """A JSON object with duplicate names.

    Attributes:
        twice: The names that occur more than once.
    """

    twice: frozenset[str] = frozenset()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    record = DuplicateKeysObject(found)
    record.twice = frozenset(name for name, _ in pairs if name in seen or seen.add(name))
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def first_character(begin: bytes) -> bytes:
    """Return the first byte of a file's beginning that is neither white space nor part of a byte order mark;
    empty if there is none."""
    match = _BEGIN.match(begin)
    assert match is not None
    return begin[match.end() : match.end() + 1]


def is_json_records(begin: bytes) -> bool:
    """Return True if a file with this beginning holds JSON records: a whole object on its first line, or an
    array of objects.

    >>> [is_json_records(each) for each in (b'{"text": "a"}\\n', b'[\\n {"text"', b'{\\n "a": 1\\n}', b"[link](url)")]
    [True, True, False, False]
    """
    match = _BEGIN.match(begin)
    assert match is not None
    text = begin[match.end() :]
    if text.startswith(b"["):
        return re.match(rb'\[\s*(\{\s*["}]|\]\s*$)', text) is not None
    if not text.startswith(b"{"):
        return False
    line, newline, _ = text.partition(b"\n")
    if not newline and len(begin) >= _CHUNK // 8:
        # The line continues: a file formatted for humans has a line break near its beginning.
        return re.match(rb'\{\s*"', line) is not None
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_records(
    path: Path,
    name: str,
    max_record_bytes: int,
    check: Callable[[Sequence[str], str], None] = lambda names, where: None,
) -> Iterator[tuple[str, Any]]:
    """Yield the location of each record and the record, an object with named fields, or a `BadRecord` in its
    place.

    Args:
        max_record_bytes: Maximum size of a record, in bytes.
        check: Called with the names in the first object of an array, as an example for all, and its location;
            raises if a required name is missing.

    Raises:
        DataError: The file can't be read; or an array is broken, so no later record can be found.
    """
    with open_file(path, name) as file:
        begin = file.peek(_CHUNK)
        if name.endswith(SUFFIXES) and not is_json_records(begin) and not is_compressed(path):
            raise read_error(name, OSError("its name ends like that of a compressed file, but it is not compressed"))
        if first_character(begin) == b"[":
            yield from _read_array(file, name, max_record_bytes, check)
            return
        for where, line in read_lines(file, name, max_record_bytes):
            if isinstance(line, BadRecord):
                yield where, line
                continue
            try:
                yield where, parse_object(line, where)
            except BadRecordError as error:
                yield where, BadRecord(error.where, error.reason)


def read_lines(file: Any, name: str, max_record_bytes: int) -> Iterator[tuple[str, str | BadRecord]]:
    """Yield the location of each line that is not blank, and the line, or a `BadRecord` for its size or
    encoding."""
    offset = number = 0
    while line := file.readline(max_record_bytes + 1):
        number += 1
        where, start = f"{name}, line {number}", offset
        offset += len(line)
        if len(line) > max_record_bytes and not line.endswith(b"\n"):
            offset += _skip_line(file)
            yield where, BadRecord(where, describe_oversize(offset - start, max_record_bytes))
            continue
        try:
            text = decode_utf8(line, where, start=start)
        except BadRecordError as error:
            yield where, BadRecord(error.where, error.reason)
            continue
        if text.strip():
            yield where, text.rstrip("\r\n")  # so that an error's column is on this line


def _skip_line(lines: Any) -> int:
    """Read to the end of the line; return the number of bytes read."""
    skipped = 0
    while part := lines.readline(_SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def parse_object(line: str, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        BadRecordError: The line is not a JSON object.
    """
    try:
        record = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRecordError(
            where, f"broken JSON ({what}); expected one whole JSON object on the line: repair it"
        ) from None
    return _checked(record, where, " on each line")


def _checked(record: Any, where: str, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise BadRecordError(where, f"a JSON {kind}; expected an object with named fields{place}")
    return record


class _Text:
    """Text of a file that was read but not consumed yet."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.has_ended = "", 0, False

    def read(self, count: int = _CHUNK) -> bool:
        """Read more; return True if there was any."""
        if self.has_ended:
            return False
        data = self._file.read(count)
        self.has_ended = not data
        try:
            self.text, self.at = self.text[self.at :] + self._decoder.decode(data, final=self.has_ended), 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._name}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}); expected UTF-8: convert it"
            ) from None
        return not self.has_ended

    def next_character(self) -> str:
        """Return the next character that is not white space, without consuming it; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or not self.read():
                return self.text[self.at : self.at + 1]


def _read_array(
    file: Any, name: str, max_record_bytes: int, check: Callable[[Sequence[str], str], None]
) -> Iterator[tuple[str, Any]]:
    """Yield the elements of the single array in a file, holding at most `max_record_bytes` characters of one."""
    text = _Text(file, name)
    text.next_character()
    text.at += 1
    number = 0
    while text.next_character() != "]" or number:
        number += 1
        where = f"{name}, record {number}"
        record = _element(text, where, max_record_bytes)
        if number == 1 and isinstance(record, dict):
            check(list(record), where)
        try:
            yield where, _checked(record, where, "")
        except BadRecordError as error:
            yield where, BadRecord(error.where, error.reason)
        following = text.next_character()
        text.at += 1
        if following == "]":
            break
        if following != ",":
            description = repr(following) if following else "the end of the file"
            raise DataError(f"{where}: it is followed by {description}; expected ',' or ']' in a JSON array: repair it")
    else:
        text.at += 1
    if text.next_character():
        raise DataError(
            f"{name}: the JSON array is followed by {text.next_character()!r}; expected one array in the file"
        )


def _element(text: _Text, where: str, max_record_bytes: int) -> Any:
    while True:
        try:
            text.next_character()
            value, end = _DECODER.raw_decode(text.text, text.at)
            # A number may continue in the text that is not read yet.
            if end < len(text.text) or text.has_ended:
                text.at = end
                return value
        except (ValueError, RecursionError) as error:
            cut = isinstance(error, json.JSONDecodeError) and (
                error.msg.startswith("Unterminated string") or error.pos >= len(text.text) - _NEAR_THE_END
            )
            if not cut or text.has_ended:
                what = (
                    f"{error.msg} at character {error.pos - text.at}"
                    if isinstance(error, json.JSONDecodeError)
                    else error
                )
                raise DataError(
                    f"{where}: broken JSON ({what}); expected an array of complete objects: repair it"
                ) from None
        num_characters = len(text.text) - text.at
        if num_characters > max_record_bytes:
            raise DataError(
                f"{where}: {describe_oversize(num_characters, max_record_bytes, at_least=True, unit='characters')}"
            )
        text.read(max(_CHUNK, num_characters))
