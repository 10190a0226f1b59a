"""A run reports which files of a folder it reads and which it skips: by ending and count."""

import os

import numpy as np
import pandas as pd
import pytest

from panax.data import (
    BytePairTokenizer,
    ExampleData,
    FilteredCorpus,
    Jsonl,
    Sequences,
    Table,
    TextData,
    TextFiles,
    make_corpus,
)
from panax.data.files.skipped_files import describe_skipped_corpus_files, describe_skipped_files


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "texts [1]"
    (root / "more").mkdir(parents=True)
    (root / ".git").mkdir()
    for name in ("a.txt", "more/b.txt", "c.pdf", "d.pdf", "e.txt.gz", "f", ".hidden", ".git/g"):
        (root / name).write_text(f"the oak {name}")
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", root / "linked")
    return root


SAID = (
    "2 files are read (2 of .txt); left out: 2 of .pdf, 1 without an ending, 1 of .txt.gz, 2 hidden, folders that are "
    "links (linked)"
)


def test_what_is_left_out_is_counted_by_ending(folder):
    (line,) = describe_skipped_corpus_files(make_corpus(folder))
    assert line == f"{folder}: {SAID}"
    (line,) = describe_skipped_corpus_files(
        FilteredCorpus(corpus=TextFiles(paths=(str(folder),), pattern="**/*.txt"), min_characters=1)
    )
    assert SAID in line
    # A glob or a file says itself what it takes.
    assert describe_skipped_files((str(folder / "a.txt"), f"{folder}/*.txt"), []) == ()


def test_a_run_reports_it_in_its_first_lines(folder, tmp_path):
    for name in ("c.pdf", "f"):
        (folder / name).unlink()
    data = TextData(
        corpus=make_corpus(folder), tokenizer=BytePairTokenizer(vocab_size=270), held_out=0, sequence_length=8,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    assert any(
        "2 files are read (2 of .txt); left out: 1 of .pdf, 1 of .txt.gz" in line for line in data.open().account
    )


def test_tables_and_sequences_report_it_too(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.csv").write_text("x,y\n1,2\n3,4\n")
    (folder / "b.xlsx").write_text("")
    pd.DataFrame({"user": [1] * 3 + [2], "item": [1, 2, 3, 1], "time": [1, 2, 3, 4]}).to_csv(tmp_path / "s.csv")
    opened = ExampleData(examples=Table(paths=(str(folder),), numeric=("x",)), cache_dir=str(tmp_path / "cache")).open()
    assert opened.account == (f"{folder}: 1 files are read (1 of .csv); left out: 1 of .xlsx",)
    opened = ExampleData(examples=Sequences(paths=(str(tmp_path / "s.csv"),)), cache_dir=str(tmp_path / "cache")).open()
    assert opened.account == ("1 of 2 users have fewer than min_events=3 events; they are skipped, with 1 events",)


def test_compressed_tables_are_read(tmp_path):
    import bz2
    import gzip
    import lzma

    rows = b"x,y\n1,2\n3,4\n"
    for name, content in {
        "a.csv.bz2": bz2.compress(rows),
        "b.csv.xz": lzma.compress(rows),
        "c.csv": gzip.compress(rows),
    }.items():
        (tmp_path / name).write_bytes(content)
    opened = ExampleData(
        examples=Table(paths=(str(tmp_path),), numeric=("x", "y")), cache_dir=str(tmp_path / "cache")
    ).open()
    assert opened.examples.read(np.arange(6))["numeric"].tolist() == [[1, 2], [3, 4]] * 3


def test_a_folder_of_lines_states_what_it_reads(tmp_path):
    for name in ("a.jsonl", "b.jsonl.xz"):
        (tmp_path / name).write_text('{"text": "the oak"}\n')
    assert (
        "2 files are read (1 of .jsonl, 1 of .jsonl.xz); left out: none"
        in describe_skipped_corpus_files(Jsonl(paths=(str(tmp_path),)))[0]
    )
