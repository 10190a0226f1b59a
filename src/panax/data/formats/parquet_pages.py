"""Decompressed sizes of the pages of a Parquet file, read from the pages' headers.

Arrow allocates the size stored in a page's header before it decompresses, without comparing it to the file's
footer. A page of a dictionary, or of strings with common prefixes, can expand to many times its size.

Source: parquet-format (parquet.thrift: PageHeader) and Thrift's compact protocol.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from panax.core.errors import DataError

from ...system.binary_reader import BinaryError, BinaryReader, TruncatedError, check_count, read_number
from ..files.bounds import describe_oversize

PAGES_PER_RECORD = 4
"""Maximum size of a page as a multiple of a record's: some writers make pages of 100 MB."""

_MOST_DEPTH = 16
"""Maximum nesting of structs and lists: the format itself has six levels."""

_HEADER_BYTES = (2**9, 2**14, 2**22)
"""Bytes to read for a page's header, in successive attempts: most are small, those with statistics of long
values are not."""

_OF_ANY_SIZE = (6, 7)
"""Physical types BYTE_ARRAY and FIXED_LEN_BYTE_ARRAY."""

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7


class _Page(NamedTuple):
    """Content of a page's header."""

    kind: int
    num_values: int
    num_bytes: int
    encoding: int


class _Chunk(NamedTuple):
    """A column of a row group: its physical type, its name, and the byte range of its pages."""

    type: int
    path: str
    begin: int
    end: int


def read_footer(path: Path, name: str) -> list[list[_Chunk]]:
    """Read the columns of each row group from the footer; pyarrow would kill the process on a damaged footer.

    Raises:
        DataError: The footer is damaged.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 8))
            length = read_number(file.read(4), 0, "<I")
            file.seek(max(0, size - 8 - length))
            fields = _struct(BinaryReader(file.read(min(length, size))), 0)
        return [[_chunk(column[3]) for column in group[1]] for group in fields.get(4, [])]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
        raise DataError(f"{name} can't be read: its footer is damaged ({error!r}); download the file again") from None


def _chunk(meta: dict[int, Any]) -> _Chunk:
    begin = min(start for start in (meta.get(11), meta[9]) if start)
    return _Chunk(meta[1], b".".join(meta[3]).decode(), begin, begin + meta[7])


def safe_row_count(
    path: Path,
    name: str,
    footer: list[list[_Chunk]],
    group: int,
    columns: Sequence[str],
    max_record_bytes: int,
    max_rows: int,
) -> int:
    """Return how many rows of a row group can be read together in little memory, at most `max_rows`.

    Args:
        footer: Result of `read_footer`.
        columns: Names of the columns to read; a struct stands for all its fields.
        max_record_bytes: Maximum size of a record, in bytes.

    Raises:
        DataError: A page decompresses to more than four times the limit of a record, or a page's header is
            damaged.
    """
    rows, limit = max_rows, PAGES_PER_RECORD * max_record_bytes
    with path.open("rb") as file:
        for column in footer[group]:
            if not any(column.path == one or column.path.startswith(f"{one}.") for one in columns):
                continue
            where = f"{name}, row group {group}, column {column.path!r}"
            pages = []
            for page in _pages(file, column, where):
                if page.num_bytes > limit:
                    hint = f"{describe_oversize(page.num_bytes, limit, f'{PAGES_PER_RECORD} * max_record_bytes')}"
                    raise DataError(f"{where}: a page has {hint}")
                pages.append(page)
            if column.type in _OF_ANY_SIZE:
                rows = min(rows, _safe_values(pages, limit))
    return max(rows, 1)


def _safe_values(pages: Sequence[_Page], limit: int) -> int:
    """Return a number of consecutive values that take at most about three times the limit, whatever their
    distribution over the pages."""
    rows = limit
    for page in pages:
        if page.kind == _DICTIONARY or page.encoding == _DELTA_BYTE_ARRAY:
            rows = min(rows, limit // max(page.num_bytes, 1))
    data = [page for page in pages if page.kind in (_DATA, _DATA_V2)]
    if sum(page.num_bytes for page in data) > limit:
        # Large pages with few values: as many rows as one page has, so that few pages are touched.
        rows = min([rows, *(page.num_values for page in data[:-1] if page.num_bytes > limit // 1024)])
    return rows


def _pages(file: Any, column: _Chunk, where: str) -> Iterator[_Page]:
    at = column.begin
    while at < column.end:
        page, size = _read_page(file, at, where)
        yield page
        at += size


def _read_page(file: Any, at: int, where: str) -> tuple[_Page, int]:
    """Return the page at an offset, and the distance to the next one."""
    data = b""
    for length in _HEADER_BYTES:
        try:
            file.seek(at)
            data = file.read(length)
            reader = BinaryReader(data)
            fields = _struct(reader, 0)
            kind, num_bytes, stored_bytes = fields[1], fields[2], fields[3]
            if not (num_bytes >= 0 and stored_bytes >= 0):
                raise ValueError(f"sizes of {num_bytes} and {stored_bytes} bytes")
            inside = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0), {})
            encoding = inside.get(4 if kind == _DATA_V2 else 2, 0)
            return _Page(kind, inside.get(1, 0), num_bytes, encoding), reader.at + stored_bytes
        except TruncatedError:
            if len(data) < length or length == _HEADER_BYTES[-1]:
                break
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise _damaged(where, at, error) from None
    raise _damaged(where, at, "it is cut short")


def _damaged(where: str, at: int, error: object) -> DataError:
    return DataError(
        f"{where} can't be read: the page at byte {at} is damaged ({error}); download the file again, or write it again"
    )


def _struct(reader: BinaryReader, depth: int) -> dict[int, Any]:
    """Read the fields of a struct, by field id."""
    _check_depth(depth)
    fields: dict[int, Any] = {}
    number = 0
    while head := reader.byte():
        number = number + (head >> 4) if head >> 4 else reader.zigzag()
        fields[number] = _value(reader, head & 15, depth)
    return fields


def _value(reader: BinaryReader, kind: int, depth: int) -> Any:
    match kind:
        case 1 | 2:
            return kind == 1
        case 3:
            return reader.byte()
        case 4 | 5 | 6:
            return reader.zigzag()
        case 7:
            return reader.take(8)
        case 8:
            return reader.take(reader.varint())
        case 9 | 10:
            return _list(reader, depth + 1)
        case 12:
            return _struct(reader, depth + 1)
    # Parquet uses no maps.
    raise BinaryError(f"a field of kind {kind}")


def _list(reader: BinaryReader, depth: int) -> list[Any]:
    _check_depth(depth)
    head = reader.byte()
    kind, count = head & 15, head >> 4
    if count == 15:
        count = reader.varint()
    if count > _HEADER_BYTES[-1] and count > len(reader.data) - reader.at:
        raise BinaryError(f"a list of {count:,} values in {len(reader.data) - reader.at:,} bytes")
    # A double takes eight bytes, every other type one or more.
    check_count(reader.data, reader.at, count, 8 if kind == 7 else 1)
    return [reader.byte() == 1 if kind in (1, 2) else _value(reader, kind, depth + 1) for _ in range(count)]


def _check_depth(depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise BinaryError(f"more than {_MOST_DEPTH} structs and lists in each other")
