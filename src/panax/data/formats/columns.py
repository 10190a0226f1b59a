"""Arrow columns from untrusted files: checked before use, and converted to Python in small blocks."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from panax.core.errors import DataError

from ..files.bounds import describe_oversize
from ..text.corpus import BadRecord, Document
from .fields import Fields
from .parquet_pages import read_footer, safe_row_count

ARROW_ERRORS = (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)
"""Exceptions that pyarrow raises for a damaged file, in addition to its own types."""

_VALUES_BYTES = 2**24
"""Approximate number of bytes of values that are converted to Python at once."""


def check_buffers(array: Any) -> None:
    """Check that an array's offsets, indices and lengths stay inside its buffers: Arrow itself does not check
    later.

    Text that is not UTF-8 passes, since only its own row is unusable.

    Raises:
        pyarrow.ArrowInvalid: An offset, index or length exceeds the buffers.
    """
    import pyarrow as arrow
    from pyarrow import compute

    array.validate()
    kind, types = array.type, arrow.types
    as_bytes = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}.get(kind)
    if as_bytes is not None:
        array.view(as_bytes).validate(full=True)
    elif types.is_dictionary(kind):
        check_buffers(array.dictionary)
        array.indices.validate(full=True)
        count = len(array.dictionary)
        limits = compute.min_max(array.indices)  # pyright: ignore[reportAttributeAccessIssue]
        low, high = limits["min"].as_py(), limits["max"].as_py()
        if low is not None and not (low >= 0 and high < count):
            raise arrow.ArrowInvalid(f"an index of {low if low < 0 else high} into a dictionary of {count}")
    else:
        array.validate(full=True)


def read_documents(
    batch: Any, fields: Fields, name: str, first_row: int, max_record_bytes: int
) -> Iterator[Document | BadRecord]:
    """Yield the documents of a record batch; its first row is row `first_row` of the file `name`.

    Raises:
        pyarrow.ArrowInvalid: The batch is damaged.
    """
    columns = {field: _column(batch, field) for field in fields.names}
    for begin, count in _blocks(list(columns.values()), batch.num_rows):
        values = {field: _values(column.slice(begin, count), max_record_bytes) for field, column in columns.items()}
        for i in range(count):
            where = f"{name}, row {first_row + begin + i}"
            # Keyed by the full name: paths have already been resolved here.
            record = {field: column_values[i] for field, column_values in values.items()}
            wrong = next((value for value in record.values() if isinstance(value, BadRecord)), None)
            yield fields.document(record, where) if wrong is None else BadRecord(where, wrong.reason)


def _column(batch: Any, field: str) -> Any:
    """Return a column, or the field of a struct named by a path (`message.content`), checked."""
    from pyarrow import compute

    if field in batch.schema.names:
        column = batch.column(field)
        check_buffers(column)
        return column
    first, *path = field.split(".")
    column = batch.column(first)
    column.validate()
    for part in path:
        column = compute.struct_field(column, [_place_in(column.type, part, field)])  # pyright: ignore[reportAttributeAccessIssue]
    check_buffers(column)
    return column


def _place_in(kind: Any, part: str, field: str) -> int:
    """Return the index of the field `part` of a struct type.

    Raises:
        DataError: The field does not exist, or the type is not a struct.
    """
    from pyarrow import types

    is_struct = types.is_struct(kind)
    place = kind.get_field_index(part) if is_struct else -1
    if place < 0:
        has = ", ".join(repr(kind.field(at).name) for at in range(kind.num_fields)) if is_struct else f"the type {kind}"
        raise DataError(
            f"no field {field!r}; where {part!r} is looked for, it has {has}: name another with text=, or prompt= and answer="
        )
    return place


def _blocks(columns: Sequence[Any], num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows (first row, count) that are small in memory, unless a single row is large."""
    import pyarrow as arrow
    from pyarrow import compute

    sizes = np.zeros(num_rows, np.int64) if num_rows < 2**24 else None
    for column in columns:
        if sizes is not None and arrow.types.is_dictionary(column.type):
            lengths = _lengths(column.dictionary)
            if lengths is not None and len(lengths):
                sizes += lengths[
                    compute.fill_null(column.indices.cast(arrow.int64()), 0).to_numpy(zero_copy_only=False)
                ]
        elif sizes is not None and (lengths := _lengths(column)) is not None:
            sizes += lengths
    begin = 0
    while begin < num_rows:
        count = min(1024, num_rows - begin)
        if sizes is not None:
            within = np.cumsum(sizes[begin : begin + count])
            count = max(1, int(np.searchsorted(within, _VALUES_BYTES, side="right")))
        yield begin, min(count, num_rows - begin)
        begin += count


def _lengths(column: Any) -> np.ndarray | None:
    """Return the length in bytes of each text value; None for a column of another type."""
    import pyarrow as arrow
    from pyarrow import compute

    types, kind = arrow.types, column.type
    if not (
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    ):
        return None
    lengths = compute.binary_length(column)  # pyright: ignore[reportAttributeAccessIssue]
    return compute.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _values(column: Any, max_record_bytes: int) -> list[Any]:
    """Convert a few rows to Python values; a `BadRecord` stands for a value that is too large or not
    UTF-8."""
    import pyarrow as arrow

    kind, types = column.type, arrow.types
    stored = kind.storage_type if isinstance(kind, arrow.BaseExtensionType) else kind
    if types.is_nested(stored) and not types.is_run_end_encoded(stored):
        # Not text: only the type matters, not the content.
        empty: Any = {} if types.is_struct(stored) else []
        return [None if null else empty for null in column.is_null().to_pylist()]
    lengths = _lengths(column)
    small = types.is_primitive(kind) if lengths is None else not len(lengths) or int(lengths.max()) <= max_record_bytes
    if small:
        try:
            return column.to_pylist()
        except UnicodeDecodeError:
            pass  # Then convert them one by one.
    values = []
    for i in range(len(column)):
        size = 0 if lengths is None else int(lengths[i])
        values.append(
            BadRecord("", describe_oversize(size, max_record_bytes))
            if size > max_record_bytes
            else _value(column[i], max_record_bytes)
        )
    return values


def _value(scalar: Any, max_record_bytes: int) -> Any:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        return BadRecord("", f"{error.reason} at byte {error.start}; expected UTF-8 text: repair it")
    if isinstance(value, str | bytes) and len(value) > max_record_bytes:
        return BadRecord("", describe_oversize(len(value), max_record_bytes))
    return value


def read_parquet_batches(
    path: Path,
    name: str,
    columns: Sequence[str],
    *,
    max_record_bytes: int,
    rows: int,
    check: Callable[[Sequence[str], str], None],
    lists: bool = False,
    nested: bool = False,
) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, one row group at a time, with only these columns; their
    values are not checked yet.

    Args:
        max_record_bytes: Maximum size of a record, in bytes.
        rows: Maximum number of rows of a batch.
        check: Called with the names of the file's columns and the file's name; raises if one is missing.
        lists: True if a column may hold lists of plain values.
        nested: True if a column may hold values of any type.

    Raises:
        DataError: A column is missing or of lists, or a page becomes too large.
        pyarrow.ArrowException, OSError: The file can't be read.
    """
    from pyarrow import parquet, types

    # Without `pre_buffer` only one row group at a time is read, not the whole file.
    with parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True) as file:
        schema = file.schema_arrow
        check(schema.names, name)
        for column in () if nested else columns:
            kind = schema.field(column.partition(".")[0] if column not in schema.names else column).type
            if column not in schema.names:
                for part in column.split(".")[1:]:
                    kind = kind.field(_place_in(kind, part, column)).type
            of_lists = types.is_list(kind) or types.is_large_list(kind)
            if lists and of_lists and not types.is_nested(kind.value_type):
                continue
            if types.is_nested(kind) and not types.is_struct(kind):
                raise DataError(
                    f"{name}: column {column!r} is of type {kind}; expected one value a row: name another column"
                )
        footer = read_footer(path, name)
        if len(footer) != file.num_row_groups:
            raise DataError(f"{name} can't be read: its footer lists {len(footer)} of {file.num_row_groups} row groups")
        for group in range(file.num_row_groups):
            count = safe_row_count(path, name, footer, group, columns, max_record_bytes, rows)
            yield from file.iter_batches(count, row_groups=[group], columns=list(columns))


def read_nested_rows(
    path: Path, name: str, columns: Sequence[str], max_record_bytes: int, rows: int
) -> Iterator[tuple[str, dict[str, Any] | BadRecord]]:
    """Yield the location and the values of each row of a Parquet file, lists and structs as Python lists and
    dictionaries.

    Args:
        columns: Columns to read, of which the file may lack some.
        max_record_bytes: Maximum size of a row in memory; a larger one is a `BadRecord`.
        rows: Maximum number of rows that are converted at once.

    Raises:
        DataError: A page becomes too large, or the file has none of the columns.
        pyarrow.ArrowException, OSError: The file can't be read.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(path, pre_buffer=False) as file:
        has = file.schema_arrow.names
    present = [column for column in columns if column in has]
    if not present:
        raise DataError(f"{name} has the columns {', '.join(map(repr, has))}; expected one of {', '.join(columns)}")
    row = 0
    for batch in read_parquet_batches(
        path, name, present, max_record_bytes=max_record_bytes, rows=rows, check=lambda names, where: None, nested=True
    ):
        for column in batch.columns:
            check_buffers(column)
        for i in range(batch.num_rows):
            where = f"{name}, row {row + i}"
            size = sum(column.slice(i, 1).nbytes for column in batch.columns)
            if size > max_record_bytes:
                yield where, BadRecord(where, describe_oversize(size, max_record_bytes))
                continue
            yield where, {field: column[i].as_py() for field, column in zip(batch.schema.names, batch.columns)}
        row += batch.num_rows
