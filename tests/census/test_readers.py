"""Boundary values in files: each reader gives exactly the value that a row holds, or names file, row and column (K1, K9)."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from panax.core.errors import DataError
from panax.data import ArrayRecord, Arrow, BadRecord, Document, Jsonl, Parquet, Sequences, Table, WebDataset

VALUES: dict[str, Any] = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "none": None, "text": "x", "empty": "", "-1": -1, "0": 0,
    "-0.0": -0.0, "0.5": 0.5, "3.0": 3.0, "1e5": 1e5, "1e39": 1e39, "true": True, "2**31-1": 2**31 - 1, "2**31": 2**31,
    "2**63": 2**63,
}  # fmt: skip
FORMATS = ("csv", "parquet", "npz")
LARGEST = float(np.finfo(np.float32).max)


def rows_with(value: Any) -> list[Any]:
    """A column of three rows, all of the value's type, the second of which is `value`."""
    return [kind(1), value, kind(2)] if (kind := type(value)) in (str, float, bool) else [1, value, 2]


def write(folder: Path, kind: str, **columns: list[Any]) -> str:
    path = folder / f"a.{kind}"
    wide = 2**63 in columns["c"]
    if kind == "csv":
        lines = [",".join("" if each is None else str(each) for each in row) for row in zip(*columns.values())]
        path.write_text("\n".join([",".join(columns), *lines, ""]))
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        types = {"c": pyarrow.uint64()} if wide else {}
        arrays = {name: pyarrow.array(each, type=types.get(name)) for name, each in columns.items()}
        parquet.write_table(pyarrow.table(arrays), path)
    else:
        np.savez(path, **{n: np.array(each, np.uint64 if wide and n == "c" else None) for n, each in columns.items()})
    return str(path)


def number_in(kind: str, value: Any) -> float | int | None:
    """The number that a file of some format holds; None if it holds no finite one."""
    if value is None or (isinstance(value, bool) and kind == "csv"):
        return None
    if isinstance(value, str):
        return int(value) if value.isdecimal() else None
    return value if math.isfinite(value) else None


def as_float(kind: str, value: Any) -> float | None:
    number = number_in(kind, value)
    return None if number is None or abs(number) > LARGEST else float(np.float32(number))


def as_id(kind: str, value: Any) -> int | None:
    number = number_in(kind, value)
    if number is None or number != int(number) or not 0 <= number < 2**31:
        return None
    # A CSV file holds text, and "-0.0" begins as a negative number does.
    return None if kind == "csv" and str(value) == "-0.0" else int(number)


def above(kind: str, value: Any) -> float | None:
    number = as_float(kind, value)
    return None if number is None else float(number > 1.5)


COLUMNS = {
    "numeric": ({"numeric": ("c",)}, "numeric", as_float),
    "categorical": ({"categorical": ("c",)}, "categorical", as_id),
    "label": ({"numeric": ("d",), "label": "c"}, "label", as_float),
    "whole label": ({"numeric": ("d",), "label": "c", "label_type": "int32"}, "label", as_id),
    "label above": ({"numeric": ("d",), "label": "c", "label_above": 1.5}, "label", above),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_holds_the_value_or_its_row_is_named(column, kind, name, tmp_path):
    settings, leaf, meaning = COLUMNS[column]
    rows = rows_with(VALUES[name] if VALUES[name] is not None or kind != "npz" else "")
    path = write(tmp_path, kind, c=rows, d=[7, 7, 7])
    table, wanted = Table(paths=(path,), **settings), [meaning(kind, row) for row in rows]
    if None in wanted:
        with pytest.raises(DataError) as record:
            table.open(tmp_path / "cache", 0)
        assert path in str(record.value) and "'c'" in str(record.value)
    if set(wanted) == {None}:
        return
    opened = table.open(tmp_path / "cache", len(rows))
    assert opened.read(np.arange(opened.num_examples))[leaf].reshape(-1).tolist() == [
        n for n in wanted if n is not None
    ]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_time_of_events_is_a_number_or_its_row_is_named(kind, name, tmp_path):
    """An event is read whole or left out; none moves to another place."""
    value = VALUES[name] if VALUES[name] is not None or kind != "npz" else ""
    times = [10, value, 30, 40] if not isinstance(value, str) else ["10", value, "30", "40"]
    if isinstance(value, float):
        times = [float(time) for time in times]
    if isinstance(value, bool) and kind == "parquet":
        return  # A column of Parquet has one type: times beside it would be truths too.
    path = write(tmp_path, kind, c=times, user=[1] * 4, item=[5, 6, 7, 8])
    sequences, number = Sequences(paths=(path,), time="c", last=8), number_in(kind, value)
    if number is None:
        with pytest.raises(DataError) as record:
            sequences.open(tmp_path / "cache", 0)
        assert path in str(record.value) and "'c'" in str(record.value)
    try:
        opened = sequences.open(tmp_path / "cache", 1)
    except DataError as error:
        # Times of one user that are too far apart for seconds in 32 bits.
        assert number is not None and abs(number - 10) >= 2**31 and "1" in str(error)
        return
    batch = opened.read(np.arange(1))
    order = [5, 7, 8] if number is None else [item for _, item in sorted([(10, 5), (number, 6), (30, 7), (40, 8)])]
    ids = {item: n for n, item in enumerate(sorted(order))}
    assert batch["targets"][0][batch["targets"][0] >= 0].tolist() == [ids[item] for item in order[1:]]


TEXTS: dict[str, Any] = {
    "none": None, "nan": math.nan, "number": 3, "true": True, "list": ["x"], "object": {"x": "y"}, "empty": "",
    "space": " ", "long": "x" * 10_000, "nul": "a\0b", "line ends": "a\r\n\u2028b", "surrogates": "\ud83d\ude00",
    "missing": ...,
}  # fmt: skip


def write_records(folder: Path, kind: str, value: Any) -> str:
    records = [{"text": "one"}, {} if value is ... else {"text": value}, {"text": "two"}]
    lines = [json.dumps(record) for record in records]
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(lines))
    elif kind == "json":
        path.write_text(f"[{', '.join(lines)}]")
    elif kind == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for line in lines:
            writer.write(line.encode())
        writer.close()
    else:
        import io
        import tarfile

        with tarfile.open(path, "w") as shard:
            for n, line in enumerate(lines):
                member = tarfile.TarInfo(f"{n}.json")
                member.size = len(line.encode())
                shard.addfile(member, io.BytesIO(line.encode()))
    return str(path)


RECORDS = {
    "jsonl": lambda path: Jsonl(paths=(path,)),
    "json": lambda path: Jsonl(paths=(path,)),
    "array_record": lambda path: ArrayRecord(paths=(path,), record="json"),
    "tar": lambda path: WebDataset(paths=(path,), text="json.text"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", RECORDS)
def test_a_text_is_read_as_it_stands_or_is_a_bad_record(kind, name, tmp_path):
    path, value = write_records(tmp_path, kind, TEXTS[name]), TEXTS[name]
    first, record, last = RECORDS[kind](path).documents()
    assert (first.text, last.text) == ("one", "two")
    if isinstance(
        value, str | None
    ):  # A null is an empty text, which is left out and counted where texts become tokens.
        assert isinstance(record, Document) and record.text == (value or "").encode("utf-16", "surrogatepass").decode(
            "utf-16"
        )
    else:
        assert isinstance(record, BadRecord) and path in record.where and "text'" in record.reason


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("name", [name for name, value in TEXTS.items() if value is not ...])
def test_a_column_of_texts_is_read_as_it_stands_or_is_named(kind, name, tmp_path):
    import pyarrow
    from pyarrow import ipc, parquet

    value, path = TEXTS[name], tmp_path / f"a.{kind}"
    others = ("one", "two") if value is None or isinstance(value, str) else (value, value)
    if name == "surrogates":
        value = value.encode("utf-16", "surrogatepass").decode("utf-16")
    table = pyarrow.table({"text": pyarrow.array([others[0], value, others[1]])})
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    corpus: Any = (Parquet if kind == "parquet" else Arrow)(paths=(str(path),))
    if value is None or isinstance(value, str):
        first, record, last = corpus.documents()
        assert (first.text, last.text) == ("one", "two")
        assert isinstance(record, Document) and record.text == (value or "")
        return
    try:
        assert all(isinstance(record, BadRecord) and "'text'" in record.reason for record in corpus.documents())
    except DataError as error:
        assert "text" in str(error) and str(path) in str(error)
