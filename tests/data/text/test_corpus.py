"""Each kind of corpus reads its files, and names the fault in those that it can't read."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from panax.core import DataError, RecipeError
from panax.core.install_hints import install_command
from panax.data import BadRecord, Corpus, Document, HuggingFaceDisk, Jsonl, Parquet, PythonLibrary, TextFiles
from panax.data.text.record_checks import RecordLimits, UsableDocuments

RECORDS = [{"text": "one", "q": "1+1?", "a": "2"}, {"text": "zwei über", "q": "2+2?", "a": "4"}]


def write_jsonl(path: Path, records=RECORDS) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, records=RECORDS, **kwargs) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), path, **kwargs)
    return str(path)


def write_dataset(path: Path, records=RECORDS, splits=()) -> str:
    import datasets

    dataset = datasets.Dataset.from_list(records)
    made = datasets.DatasetDict({split: dataset.select([i]) for i, split in enumerate(splits)}) if splits else dataset
    made.save_to_disk(str(path))
    return str(path)


def usable(corpus: Corpus) -> list[Document]:
    """The documents; a bad record is an error, as by default."""
    return list(UsableDocuments(corpus).documents())


@pytest.fixture(params=["jsonl", "jsonl.gz", "parquet", "dataset"])
def records(request, tmp_path):
    """A function that makes a corpus of the two records in each structured format."""

    def make(records=RECORDS, **fields):
        path = tmp_path / f"records.{request.param}"
        match request.param:
            case "jsonl":
                return Jsonl(paths=(write_jsonl(path, records),), **fields)
            case "jsonl.gz":
                path.write_bytes(gzip.compress(Path(write_jsonl(path.with_suffix(""), records)).read_bytes()))
                return Jsonl(paths=(str(path),), **fields)
            case "parquet":
                return Parquet(paths=(write_parquet(path, records, row_group_size=1),), **fields)
            case _:
                return HuggingFaceDisk(path=write_dataset(path, records), **fields)

    return make


def test_records_are_documents(records):
    corpus = records()
    assert isinstance(corpus, Corpus)
    assert list(corpus.documents()) == [Document("one"), Document("zwei über")]


def test_records_of_prompts_and_answers(records):
    corpus = records(prompt="q", answer="a")
    assert list(corpus.documents()) == [Document("2", prompt="1+1?"), Document("4", prompt="2+2?")]


def test_a_missing_field_names_the_present_ones(records):
    with pytest.raises(DataError, match=r"no field 'body'; it has .*'text'.*name the field"):
        usable(records(text="body"))
    with pytest.raises(DataError, match="no field 'b'; it has"):
        usable(records(prompt="q", answer="b"))


def test_a_field_that_is_no_text_is_refused(records):
    with pytest.raises(DataError, match="field 'text' is of type int; expected text"):
        usable(records([{"text": 3}]))


def test_null_counts_as_blank(records):
    assert list(records([{"text": "a"}, {"text": None}]).documents()) == [Document("a"), Document("")]


def test_fields_and_content_change_the_fingerprint(records):
    corpus = records()
    settings = [{"text": "text"}, {"text": "a"}, {"prompt": "q", "answer": "a"}, {"prompt": "a", "answer": "q"}]
    variants = [dataclasses.replace(corpus, **change) for change in settings]
    assert len({variant.fingerprint() for variant in variants}) == 4
    before = corpus.fingerprint()
    assert before == corpus.fingerprint() == variants[0].fingerprint()
    assert records(RECORDS[:1]).fingerprint() != before


@pytest.mark.parametrize("kind", [Jsonl, Parquet])
def test_prompt_without_answer_is_refused(kind):
    with pytest.raises(RecipeError, match="prompt= is given without answer="):
        kind(paths=("x",), prompt="q")
    with pytest.raises(RecipeError, match="answer= is given without prompt="):
        kind(paths=("x",), answer="a")
    with pytest.raises(RecipeError, match="text='body' has no effect"):
        kind(paths=("x",), text="body", prompt="q", answer="a")


def test_text_files_are_documents_in_the_order_of_their_names(tmp_path):
    for name, text in {"b.txt": "B", "a/z.txt": "AZ", "a.txt": "A", ".hidden/x.txt": "H", "c.md": "C"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def texts(*paths: str, **kwargs) -> list[str]:
        return [document.text for document in TextFiles(paths=paths, **kwargs).documents()]

    assert texts(str(tmp_path)) == ["AZ", "A", "B", "C"]
    assert texts(str(tmp_path), pattern="**/*.txt") == ["AZ", "A", "B"]
    assert texts(str(tmp_path / "b.txt"), str(tmp_path), pattern="*.txt") == ["B", "A"]  # no file twice
    assert texts(str(tmp_path / "*.md")) == ["C"]
    assert texts(str(tmp_path / "a" / "z.txt"), separator="Z") == ["A", ""]


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    assert list(TextFiles(paths=(str(tmp_path),)).documents()) == [Document("hi")]


def test_touching_a_file_changes_the_fingerprint(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    corpus = TextFiles(paths=(str(tmp_path),))
    before = corpus.fingerprint()
    os.utime(path, ns=(1, 1))
    assert corpus.fingerprint() != before
    (tmp_path / "b.txt").write_text("b")
    assert corpus.fingerprint() != before


def test_the_python_library_has_real_text_and_no_tests():
    corpus = PythonLibrary()
    first = [document.text for _, document in zip(range(20), corpus.documents(), strict=False)]
    assert sum(map(len, first)) > 50_000 and '"""' in first[0]
    files = [path.as_posix() for path in corpus._files()]
    assert files == sorted(files, key=lambda name: Path(name)) and len(files) > 300
    assert not [name for name in files if "/test/" in name or "/tests/" in name or "site-packages" in name]
    assert any(name.endswith("/argparse.py") for name in files)
    assert len(PythonLibrary(include_tests=True)._files()) >= len(files)
    assert corpus.fingerprint() == PythonLibrary().fingerprint()


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist; expected a file, a directory, or a glob"):
        TextFiles(paths=(str(tmp_path / "nowhere.txt"),)).fingerprint()
    with pytest.raises(DataError, match="names no path"):
        usable(TextFiles(paths=()))


@pytest.mark.parametrize("corpus", [TextFiles, Jsonl, Parquet])
def test_a_directory_without_a_match_is_named(tmp_path, corpus):
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(DataError, match=f"no file in the directory {tmp_path} matches"):
        usable(corpus(paths=(str(tmp_path),)))


def test_a_pattern_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match="pattern '/x' can't be used"):
        usable(TextFiles(paths=(str(tmp_path),), pattern="/x"))


def test_wrong_encoding_names_the_file_and_the_byte(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin\.txt: byte 3 is 0xe9, which is not UTF-8.*iconv -f LATIN1"):
        usable(TextFiles(paths=(str(tmp_path),)))
    (tmp_path / "latin.txt").write_bytes("wide".encode("utf-16"))
    with pytest.raises(DataError, match=r"byte 0 is 0xff.*iconv -f UTF-16"):
        usable(TextFiles(paths=(str(tmp_path),)))


def test_wrong_encoding_in_json_lines_names_the_line_and_the_byte_in_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: byte 28 is 0xe9"):
        usable(Jsonl(paths=(str(tmp_path),)))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "a"', r"broken JSON \(Expecting ',' delimiter at column 13\)"),
        ("[" * 100_000, "broken JSON"),
        ('{"text": ' + "1" * 5000 + "}", "broken JSON"),
        ('["a"]', "a JSON list; expected an object"),
        ('{"text": "\\ud83d"}', r"field 'text' holds \\ud83d, half of a character"),
    ],
)
def test_broken_json_names_the_file_and_the_line(tmp_path, line, says):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: " + says):
        usable(Jsonl(paths=(str(tmp_path),)))


def test_bad_lines_are_reported_and_those_after_them_continue(tmp_path):
    lines = [b'{"text": "a"}', b"{", b'{"text": "caf\xe9"}', b"[]", b'{"body": 1}', b'{"text": 1}', b'{"text": "b"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = list(Jsonl(paths=(str(tmp_path),)).documents())
    assert [each.where for each in found] == [f"{tmp_path}/a.jsonl, line {number}" for number in range(1, 8)]
    assert [found[0], found[6]] == [Document("a"), Document("b")]
    reasons = ("broken JSON", "byte 29 is 0xe9", "a JSON list", "no field 'text'", "field 'text' is of type int")
    for bad, reason in zip(found[1:6], reasons, strict=True):
        assert isinstance(bad, BadRecord) and bad.reason.startswith(reason)


def test_documents_that_are_too_long_are_reported_by_file_and_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "short"}, {"text": "long" * 9}])
    checked = UsableDocuments(Jsonl(paths=(path,)), RecordLimits(max_characters=10, max_bad_records=1))
    assert list(checked.documents()) == [Document("short")]
    assert checked.bad == [(f"{path}, line 2", "36 characters; expected at most max_characters=10")]


def test_text_files_continue_after_one_of_another_encoding(tmp_path):
    for name, content in {"a": b"A", "b": b"\xe9", "c": b"C"}.items():
        (tmp_path / name).write_bytes(content)
    first, bad, last = TextFiles(paths=(str(tmp_path),)).documents()
    assert (first, last) == (Document("A"), Document("C")) and isinstance(bad, BadRecord)
    assert bad.where == f"{tmp_path}/b" and bad.reason.startswith("byte 0 is 0xe9")


def test_rows_of_parquet_that_are_no_text_are_bad_records(tmp_path):
    import pyarrow
    from pyarrow import parquet

    offsets = pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1]
    texts = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"a\xe9c"))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    first, bad, last = Parquet(paths=(str(tmp_path),)).documents()
    assert (first, last) == (Document("a"), Document("c"))
    assert isinstance(bad, BadRecord) and bad.where.endswith("a.parquet, row 1") and "expected UTF-8" in bad.reason


def test_parquet_is_read_one_row_group_at_a_time_and_only_its_columns(tmp_path, monkeypatch):
    from pyarrow import parquet

    records = [{"text": f"t{i}", "other": "x" * 1000} for i in range(50)]
    write_parquet(tmp_path / "a.parquet", records, row_group_size=10)
    requests = []
    read = parquet.ParquetFile.iter_batches

    def spy(self, *args, **kwargs):
        requests.append((kwargs["row_groups"], kwargs["columns"]))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", spy)
    documents = Parquet(paths=(str(tmp_path),)).documents()
    assert [next(documents).text for _ in range(11)][-1] == "t10"
    assert requests == [([0], ["text"]), ([1], ["text"])]
    assert [document.text for document in documents] == [f"t{i}" for i in range(11, 50)]


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, whom no mode stops
    with pytest.raises(DataError, match=r"a\.jsonl can't be read: Permission denied; check that"):
        usable(Jsonl(paths=(str(tmp_path),)))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a\.jsonl can't be read: Permission denied"):
        usable(TextFiles(paths=(str(tmp_path),)))


@pytest.mark.parametrize("content", [b"not compressed", gzip.compress(b'{"text": "a"}\n' * 50, mtime=0)[:-20]])
def test_a_damaged_compressed_file_is_named(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz can't be read"):
        usable(Jsonl(paths=(str(tmp_path),)))


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"a\.parquet can't be read"):
        usable(Parquet(paths=(str(tmp_path),)))


def test_a_hugging_face_dataset_with_splits(tmp_path):
    path = write_dataset(tmp_path / "d", splits=("train", "test"))
    assert list(HuggingFaceDisk(path=path, split="test").documents()) == [Document("zwei über")]
    for split in (None, "valid"):
        with pytest.raises(DataError, match="has the splits train, test, not"):
            usable(HuggingFaceDisk(path=path, split=split))
    only = write_dataset(tmp_path / "e", splits=("train",))
    assert usable(HuggingFaceDisk(path=only)) == [Document("one")]
    with pytest.raises(DataError, match="was saved without splits"):
        usable(HuggingFaceDisk(path=write_dataset(tmp_path / "f"), split="train"))


def test_a_directory_that_is_no_dataset_is_named(tmp_path):
    with pytest.raises(DataError, match=r"can't be loaded: .*expected files written by `Dataset.save_to_disk`"):
        usable(HuggingFaceDisk(path=str(tmp_path)))
    with pytest.raises(DataError, match="is not a directory"):
        usable(HuggingFaceDisk(path=str(tmp_path / "no")))


@pytest.mark.parametrize(("package", "extra"), [("pyarrow", "parquet"), ("datasets", "datasets")])
def test_a_missing_package_explains_what_to_install(tmp_path, monkeypatch, package, extra):
    corpus = {
        "parquet": lambda: Parquet(paths=(write_parquet(tmp_path / "a.parquet"),)),
        "datasets": lambda: HuggingFaceDisk(path=str(tmp_path)),
    }[extra]()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"needs {package}.*{re.escape(install_command(extra))}"):
        usable(corpus)


def test_only_what_is_used_is_imported():
    code = (
        "import sys; before = set(sys.modules) | {'jax'}; import panax.data; "
        "print(sorted({'pyarrow', 'datasets', 'torch', 'grain'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
