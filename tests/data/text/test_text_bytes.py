"""Bytes of text for each target, and bits per byte: the same whatever the tokenizer."""

import json
import math

import numpy as np
import pytest

from panax.data import BytePairTokenizer, Jsonl, TextData, TextFiles
from panax.data.text.text_bytes import bits_per_byte, bytes_per_target
from panax.data.text.tokenizer import Tokenizer

TEXTS = ["a plain line\n" * 30, "e größer, naïveté, 日本語\n" * 20, "def f(x):\n    return x\n" * 25]


def opened_with(tmp_path, vocab_size, held_out=2):
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return TextData(
        corpus=TextFiles(paths=(str(folder),)),
        tokenizer=BytePairTokenizer(vocab_size=vocab_size),
        sequence_length=32,
        batch_size=2,
        held_out=held_out,
        cache_dir=str(tmp_path / "cache"),
    ).open()


def first_token_bytes(opened, documents):
    return sum(len(opened.tokenizer.decode([int(documents.store.tokens[i])]).encode()) for i in documents.starts)


@pytest.mark.parametrize("vocab_size", [257, 300])
def test_all_bytes_but_the_first_tokens_are_counted(tmp_path, vocab_size):
    opened = opened_with(tmp_path, vocab_size)
    documents = opened.held_out_documents
    num_targets = sum(batch.batch["loss_mask"].sum() for batch in opened.held_out.batches())
    ends = documents.starts + documents.lengths
    ids = [documents.store.tokens[a : b - 1] for a, b in zip(documents.starts, ends, strict=True)]
    texts = [opened.tokenizer.decode(one) for one in ids]
    assert set(texts) <= set(TEXTS)
    expected = sum(len(text.encode()) for text in texts) - first_token_bytes(opened, documents)
    assert opened.bytes_per_target * num_targets == pytest.approx(expected)


def test_a_guess_among_bytes_is_eight_bits_whatever_the_tokenizer():
    # One token of three bytes: 256 ** 3 to choose from.
    assert bits_per_byte(math.log(256), 1.0) == pytest.approx(8.0)
    assert bits_per_byte(3 * math.log(256), 3.0) == pytest.approx(8.0)


def test_only_answers_count(tmp_path):
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps({"q": "how many? " * 9, "a": "12345"}) + "\n" for _ in range(4)))
    opened = TextData(
        corpus=Jsonl(paths=(str(path),), prompt="q", answer="a"),
        tokenizer=BytePairTokenizer(vocab_size=257),
        sequence_length=128,
        batch_size=1,
        held_out=1,
        cache_dir=str(tmp_path / "cache"),
    ).open()
    # Five bytes and the document's end are six targets.
    assert opened.bytes_per_target == pytest.approx(5 / 6)


def test_many_documents_are_measured_in_part(tmp_path, monkeypatch):
    opened = opened_with(tmp_path, 257, held_out=0)
    lengths = opened.training_documents.lengths
    monkeypatch.setattr("panax.data.text.text_bytes.MEASURED_TOKENS", 1)
    # One byte a token, the first nobody's target, the end without a byte.
    assert bytes_per_target([opened.training_documents], opened.tokenizer) == pytest.approx(
        (lengths[0] - 2) / (lengths[0] - 1)
    )
    assert opened.bytes_per_target is not None


def test_where_nothing_is_a_target_there_is_no_figure(tmp_path):
    opened = opened_with(tmp_path, 257)
    assert isinstance(opened.tokenizer, Tokenizer)
    documents = opened.held_out_documents
    empty = type(documents)(store=documents.store, starts=np.array([0]), lengths=np.array([1]), fingerprint="one token")
    assert bytes_per_target([empty], opened.tokenizer) is None
