"""`make_corpus`: which corpus reads a path, and the message if none does."""

import json

import pytest

from panax.core import DataError, RecipeError
from panax.data import Jsonl, Parquet, TextFiles, TokenFile, TokenWriter, make_corpus
from panax.data.text.paths import _choose_corpus


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    (tmp_path / "texts" / "b.md").write_text("two")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "three"}) + "\n")
    return tmp_path


def texts(corpus):
    return sorted(document.text for document in corpus.documents())


def parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table(columns), path)


def test_what_a_path_holds_decides(here):
    assert make_corpus("texts") == TextFiles(paths=("texts",))
    assert make_corpus("lines.jsonl") == Jsonl(paths=("lines.jsonl",))
    parquet("rows.parquet", text=["four"])
    assert make_corpus(here / "rows.parquet") == Parquet(paths=(str(here / "rows.parquet"),))
    # A folder leaves out what it does not know, a name says what is meant.
    (here / "texts" / "x.png").write_bytes(b"\x89PNG\0")
    (here / "texts" / "[odd]").mkdir()
    (here / "texts" / "[odd]" / "c.txt").write_text("five")
    assert texts(make_corpus("texts")) == ["five", "one", "two"]
    assert texts(make_corpus("texts/[[]odd]/*")) == ["five"]
    (here / "NOTES").write_text("plain, as its bytes say: é" * 1000)
    assert make_corpus("NOTES") == TextFiles(paths=("NOTES",))


def test_several_paths_are_one_corpus_whose_documents_each_come_once(here):
    parquet("rows.parquet", text=["four"])
    corpus = make_corpus("texts/a.txt", "lines.jsonl", "texts/b.md", "rows.parquet", "lines.jsonl")
    assert texts(corpus) == ["four", "one", "three", "two"]
    before = corpus.fingerprint()
    (here / "lines.jsonl").write_text(json.dumps({"text": "changed"}) + "\n")
    assert corpus.fingerprint() != before and "changed" in texts(corpus)


def test_tokens(here):
    with TokenWriter("tokens", vocab_size=9, end_of_document=0) as writer:
        writer.append([1, 2, 3])
    assert make_corpus("tokens") == TokenFile(path="tokens")
    assert make_corpus("tokens/tokens.bin") == TokenFile(path="tokens/tokens.bin")
    with pytest.raises(RecipeError, match="tokens holds tokens, which can't be joined with other paths"):
        make_corpus("tokens", "texts")
    (here / "flat.bin").write_bytes(b"\1\0\2\0")
    with pytest.raises(DataError, match=r"flat.bin is a flat file of ids.*TokenFile\(path='flat.bin', dtype="):
        make_corpus("flat.bin")


def test_fields_are_named_for_records_alone(here):
    assert make_corpus("lines.jsonl", "texts", text="body").corpora[0].text == "body"
    assert make_corpus("lines.jsonl", prompt="q", answer="a").answer == "a"
    with pytest.raises(RecipeError, match="text= names a field, and texts holds no records"):
        make_corpus("texts", text="body")
    (here / "other.jsonl").write_text(json.dumps({"body": "x", "title": "y"}) + "\n")
    (record,) = make_corpus("other.jsonl").documents()
    assert "no field 'text'; it has 'body', 'title': name the field with text= (--data.corpus.text)" in record.reason


@pytest.mark.parametrize(
    ("paths", "error", "said"),
    [
        ((), RecipeError, "no path is given"),
        (("",), RecipeError, "'' is not a path"),
        (("nowhere",), DataError, "nowhere does not exist"),
        (("*.nothing",), DataError, r"\*.nothing does not exist"),
        (("empty",), DataError, "the folder empty is empty; expected texts"),
        (
            ("both",),
            DataError,
            r"both holds 1 of .jsonl and 1 of .txt; expected one kind.*both/\*\*/\*.jsonl, both/\*\*/\*.txt",
        ),
        (("picture.png",), DataError, "picture.png is not text; expected texts"),
        (("pictures",), DataError, r"pictures holds 2 files \(.jpg, .png\), and the first is not text"),
        (("mixed/*",), DataError, "matches mixed/x.png, and nothing here reads it"),
        (("https://example.org/x",), DataError, "can't be read: expected a path of this machine or s3://"),
    ],
)
def test_what_can_not_be_read_is_reported(here, paths, error, said):
    (here / "empty").mkdir()
    for folder, names in {
        "both": ("a.jsonl", "b.txt"),
        "mixed": ("a.txt", "x.png"),
        "pictures": ("a.jpg", "b.png"),
    }.items():
        (here / folder).mkdir()
        for name in names:
            (here / folder / name).write_bytes(b"text" if name.endswith(("txt", "jsonl")) else b"\xff\xd8\0")
    (here / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    with pytest.raises(error, match=said):
        make_corpus(*paths)


def test_folders_that_a_library_wrote(here):
    for folder, names, kind in (
        ("mds", ("index.json", "shard.00000.mds"), "Mds"),
        ("disk", ("dataset_info.json", "state.json", "data-0.arrow"), "HuggingFaceDisk"),
        ("plain", ("README", "data-0.arrow"), "Arrow"),
        ("shards", ("0.tar", "1.tar.gz"), "WebDataset"),
        ("records", ("a.array_record",), "ArrayRecord"),
        ("megatron", ("x.bin", "x.idx"), "MegatronTokens"),
    ):
        (here / folder).mkdir()
        for name in names:
            (here / folder / name).write_bytes(b"x")
        names_read = _choose_corpus(folder)
        assert (names_read[0] if isinstance(names_read, tuple) else type(names_read)).__name__ == kind
