"""A batch as shown to a user: texts, borders, masks, padding, labels."""

import numpy as np
import pytest
from rich.cells import cell_len

from panax.data import BytePairTokenizer, Document, TextData, format_batch


class Talk:
    def documents(self):
        yield Document("the oak\x1b[31m", prompt="which? ")
        yield Document("漢字" * 60)

    def fingerprint(self):
        return "talk"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    data = TextData(
        corpus=Talk(),
        tokenizer=BytePairTokenizer(vocab_size=257),
        sequence_length=512,
        batch_size=1,
        held_out=0,
        cache_dir=cache,
    )
    return data.open()


def test_rows_are_text_with_borders_and_masks(opened):
    batch, _ = next(opened.train.batches())
    lines = format_batch(batch, opened.tokenizer)
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    assert "<<which? >>the oak\\x1b[31m<|endoftext|>\n---" in text and "\x1b" not in text
    assert text.count("---\n") + text.endswith("---") == 2
    assert text.replace("\n", "").count("漢字" * 60 + "<|endoftext|>") == 1
    padding = int((batch["segment"] == 0).sum())
    assert padding > 0 and lines[-1] == f"{padding} positions of padding"
    loss = int(batch["loss_mask"].sum())
    counted = " ".join(lines)
    assert f"{loss} with loss ({loss / 512:.1%}), {padding} padding ({padding / 512:.1%}); 2 documents" in counted
    assert not any("row 0" in line for line in format_batch(batch, opened.tokenizer, 0))


def test_without_a_tokenizer_ids_are_shown(opened):
    batch, _ = next(opened.train.batches())
    ids = opened.tokenizer.encode("the oak")
    assert " ".join(map(str, ids)) in " ".join(format_batch(batch, None)).replace("  ", " ")


def test_a_long_row_is_cut(opened):
    batch, _ = next(opened.train.batches())
    tokens = np.full_like(batch["tokens"], opened.tokenizer.encode("\n")[0])
    one = {"tokens": tokens, "segment": np.ones_like(tokens)}
    assert format_batch(one, opened.tokenizer)[-1] == "... 491 more lines"


def test_numbers_and_labels():
    batch = {
        "image": np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 2, 2, 3),
        "label": np.array([7, 0, 7, 7], np.int32),
        "loss_mask": np.array([1, 1, 1, 0], np.float32),
    }
    lines = format_batch(batch)
    assert lines[1].split() == ["image", "4", "x", "2", "x", "2", "x", "3", "float32", "-1", "1", lines[1].split()[-1]]
    assert "1 of 4 rows are padding (25.0%)" in lines and lines[-1] == "labels: 0: 1, 7: 3"
    many = format_batch({"label": np.arange(100)})
    assert "and 76 more" in " ".join(many) and max(map(len, many)) <= 80
    assert format_batch({"words": np.array(["a", "b"])})[1].split() == ["words", "2", "<U1"]


def test_labels_are_shown_by_the_names_of_their_classes():
    batch = {"label": np.array([1, 0, 1, 5], np.int32)}
    assert format_batch(batch, classes=("cat", "dog"))[-1] == "labels: 0 (cat): 1, 1 (dog): 2, 5: 1"
    assert format_batch(batch, classes=("0", "1"))[-1] == "labels: 0: 1, 1: 2, 5: 1"
