"""From a recipe's words to batches: tokenized once, split by document, and refused clearly otherwise."""

import collections
import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from panax.core import DataError, RecipeError
from panax.data import (
    BytePairTokenizer,
    Document,
    Jsonl,
    PretrainedTokenizer,
    TextData,
    TextFiles,
    TokenFile,
    open_tokens,
    split,
    write_tokens,
)

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "while", "rain", "fell"]


@pytest.fixture
def corpus(tmp_path: Path) -> TextFiles:
    """Sixty files of random words, in a directory of their own."""
    random = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(" ".join(random.choice(WORDS, random.integers(20, 200))))
    return TextFiles(paths=(str(tmp_path / "texts"),))


@pytest.fixture
def data(corpus: TextFiles, tmp_path: Path) -> TextData:
    return TextData(
        corpus=corpus,
        tokenizer=BytePairTokenizer(vocab_size=280),
        sequence_length=32,
        batch_size=4,
        held_out=0.1,
        cache_dir=str(tmp_path / "cache"),
    )


def texts_of(source, tokenizer) -> list[str]:
    """The documents of one pass, put together from its windows."""
    batches = [batch for batch, _ in source.batches()]
    ids = np.concatenate([batch["tokens"][batch["segment"] > 0] for batch in batches])
    return tokenizer.decode(ids).split("<|endoftext|>")[:-1]


def test_unpacked_batches_hold_the_texts_themselves(data, corpus):
    opened = dataclasses.replace(data, packing=False, sequence_length=4000, held_out=20).open()
    texts = {document.text for document in corpus.documents()}
    held_out = texts_of(opened.held_out, opened.tokenizer)
    assert len(held_out) == 20 and set(held_out) <= texts


def test_opening_again_reads_no_text(data, monkeypatch):
    seen = []
    first = data.open(progress=lambda *event: seen.append(event))
    assert {event[0] for event in seen} == {"training the tokenizer", "tokenizing"}
    store = first.training_documents.store
    assert seen[-1] == ("tokenizing", 60, len(store.tokens))
    monkeypatch.setattr(TextFiles, "documents", None)
    second = data.open()
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    a, b = next(first.train.batches()), next(second.train.batches())
    assert a.position == b.position
    np.testing.assert_array_equal(a.batch["tokens"], b.batch["tokens"])


def test_a_changed_corpus_or_tokenizer_is_tokenized_again(data, tmp_path):
    before = data.open()
    (tmp_path / "texts" / "new.txt").write_text("wholly new")
    after = data.open()
    assert len(after.training_documents.store.offsets) == len(before.training_documents.store.offsets) + 1
    smaller = dataclasses.replace(data, tokenizer=BytePairTokenizer(vocab_size=270)).open()
    assert (after.vocab_size, smaller.vocab_size) == (280, 270)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "header.json", "tokenizer.json"])
def test_a_damaged_cache_is_made_again(data, tmp_path, name):
    before = next(data.open().train.batches())
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    path.write_bytes(path.read_bytes()[:-3])
    after = next(data.open().train.batches())
    assert before.position == after.position
    np.testing.assert_array_equal(before.batch["tokens"], after.batch["tokens"])


def test_the_position_does_not_depend_on_when_or_where_files_were_written(data, tmp_path):
    *_, (_, position) = itertools.islice(data.open().train.batches(), 3)
    for path in (tmp_path / "texts").iterdir():
        path.write_text(path.read_text())
    moved = (tmp_path / "texts").rename(tmp_path / "moved")
    there = dataclasses.replace(data, corpus=TextFiles(paths=(str(moved),))).open()
    assert next(there.train.batches(position)).position["index"] == 16


def test_held_out_documents_are_not_trained_on_and_do_not_depend_on_the_seed(data):
    opened, other = data.open(), dataclasses.replace(data, seed=9).open()
    train, held_out = opened.training_documents, opened.held_out_documents
    assert len(held_out.starts) == 6
    assert sorted([*train.starts, *held_out.starts]) == train.store.offsets[:-1].tolist()
    assert held_out.starts.tolist() == other.held_out_documents.starts.tolist() != sorted(train.starts)[:6]
    assert not np.array_equal(next(opened.train.batches()).batch["tokens"], next(other.train.batches()).batch["tokens"])
    assert opened.num_tokens + held_out.num_tokens == len(train.store.tokens)


def test_held_out_is_a_fraction_a_number_or_nothing(data):
    for held_out, count in ((0.5, 30), (1, 1), (7, 7), (7.0, 7), (0.0001, 1)):
        assert len(dataclasses.replace(data, held_out=held_out).open().held_out_documents.starts) == count
    none = dataclasses.replace(data, held_out=0).open()
    assert none.held_out is None and none.num_tokens == len(none.training_documents.store.tokens)
    with pytest.raises(DataError, match="held_out=60 keeps 60 of 60 documents from training; expected fewer"):
        dataclasses.replace(data, held_out=60).open()


def test_a_lone_document_is_divided_near_its_end(make_store):
    train, held_out = split(make_store([list(range(199))]), 0.1)
    assert train.lengths.tolist() == [180] and held_out.starts.tolist() == [180] and held_out.lengths.tolist() == [20]
    assert train.fingerprint != held_out.fingerprint
    with pytest.raises(DataError, match="the one document has 2 tokens; too few"):
        split(make_store([[1]]), 0.1)


def test_unigram_entropy_is_that_of_the_held_out_targets_under_training_frequencies(make_store):
    from panax.data import OpenedPart, OpenedText, PackedRows, PackedSource

    store = make_store([[1, 2, 2], [3, 2], [2, 4, 4], [5, 5, 5, 1]], prompts=[0, 0, 2, 1])
    train, held_out = split(store, 0.5)
    source = PackedSource(PackedRows(train, sequence_length=8, seed=0), batch_size=1)
    opened = OpenedText(
        train=source,
        held_out=source,
        tokenizer=None,
        vocab_size=1000,
        parts={"": OpenedPart(train, held_out)},
    )

    def targets(documents):
        rows = PackedRows(documents, sequence_length=100, seed=0)
        row = rows.row(0, 0)
        return collections.Counter(row.targets[row.loss_mask == 1].tolist())

    counts, judged = targets(train), targets(held_out)
    total = sum(counts.values()) + 1000
    expected = -sum(n * math.log((counts[t] + 1) / total) for t, n in judged.items()) / sum(judged.values())
    assert opened.unigram_entropy_nats == pytest.approx(expected, rel=1e-12)
    assert dataclasses.replace(opened, held_out=None, parts={"": OpenedPart(train, None)}).unigram_entropy_nats > 0


def test_of_prompts_and_answers_only_answers_and_ends_are_learnt(tmp_path):
    records = [{"q": f"what is {i} plus one? ", "a": f"it is {i + 1}"} for i in range(30)]
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    opened = TextData(
        corpus=Jsonl(paths=(str(path),), prompt="q", answer="a"),
        tokenizer=BytePairTokenizer(vocab_size=300),
        sequence_length=1000,
        batch_size=2,
        held_out=10,
        cache_dir=str(tmp_path / "cache"),
    ).open()
    (batch,) = [batch for batch, _ in opened.held_out.batches()]
    decode = opened.tokenizer.decode
    learnt = decode(batch["targets"][batch["loss_mask"] == 1]).split("<|endoftext|>")[:-1]
    shown = decode(batch["tokens"][batch["segment"] > 0]).split("<|endoftext|>")[:-1]
    assert len(shown) == 10 and set(shown) <= {record["q"] + record["a"] for record in records}
    assert learnt == [text.split("? ")[1] for text in shown]


def test_blank_documents_are_counted_and_left_out(tmp_path):
    for name, text in {"a": "", "b": " \n", "c": "words", "d": "more words"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    corpus = TextFiles(paths=(str(tmp_path),), pattern="*.txt")
    tokenizer = BytePairTokenizer(vocab_size=260).train(corpus)
    write_tokens(corpus, tokenizer, tmp_path / "out")
    store = open_tokens(tmp_path / "out")
    assert len(store.offsets) == 3 and store.num_blank_documents == 2


def test_an_empty_answer_is_a_lesson(tmp_path):
    class Silent:
        def documents(self):
            yield Document("", prompt="say nothing")

        def fingerprint(self):
            return "silent"

    tokenizer = BytePairTokenizer(vocab_size=260).train(Silent())
    write_tokens(Silent(), tokenizer, tmp_path)
    assert open_tokens(tmp_path).loss_mask.tolist() == [0] * (len(open_tokens(tmp_path).tokens) - 1) + [1]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no file in the directory"),
        ({"a.txt": b""}, "all 1 of its documents are blank; expected text in TextFiles"),
        ({"a.txt": b" \n", "b.txt": b"\t"}, "all 2 of its documents are blank"),
    ],
)
def test_an_empty_corpus_is_refused(tmp_path, files, says):
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        TextData(corpus=TextFiles(paths=(str(tmp_path / "texts"),)), cache_dir=str(tmp_path / "cache")).open()


@pytest.mark.parametrize(("content", "says"), [("", "it has no document"), ('\n{"text": " "}\n', "all 1 of its")])
def test_json_lines_without_text_are_refused(tmp_path, content, says):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=f"nothing to train on: {says}"):
        TextData(corpus=Jsonl(paths=(str(tmp_path),)), cache_dir=str(tmp_path / "cache")).open()


def test_a_token_file_is_trained_on_as_it_is(data, tmp_path):
    opened = data.open()
    opened.tokenizer.save(tmp_path / "tokenizer")
    (cached,) = (tmp_path / "cache").glob("tokens-*")
    tokens = dataclasses.replace(
        data, corpus=TokenFile(path=str(cached)), tokenizer=PretrainedTokenizer(path=str(tmp_path / "tokenizer"))
    )
    np.testing.assert_array_equal(
        next(tokens.open().train.batches()).batch["tokens"], next(opened.train.batches()).batch["tokens"]
    )
    without = dataclasses.replace(tokens, tokenizer=None).open()
    assert without.tokenizer is None and without.vocab_size == 280
    BytePairTokenizer(vocab_size=257).train(data.corpus).save(tmp_path / "small")
    with pytest.raises(DataError, match="has a vocabulary of 280, the tokenizer one of 257"):
        dataclasses.replace(tokens, tokenizer=PretrainedTokenizer(path=str(tmp_path / "small"))).open()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"held_out": -1}, "held_out=-1"),
        ({"held_out": 1.5}, "held_out=1.5; expected a fraction below 1, or a whole number"),
        ({"buckets": (16,)}, "no effect with packing"),
        ({"buckets": (16, 8), "packing": False}, "expected rising lengths from 1 to sequence_length=32"),
        ({"buckets": (64,), "packing": False}, "expected rising lengths"),
        ({"tokenizer": None}, "tokenizer=None; a corpus of text needs one"),
        ({"corpus": TokenFile(path="x")}, "no tokenizer can be trained on it"),
    ],
)
def test_settings_that_can_not_be_are_refused(data, change, says):
    with pytest.raises(RecipeError, match=says):
        dataclasses.replace(data, **change)
