"""Preference pairs from records to rows: TRL's formats, chat templates, whole pairs in rows, and errors."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from chats.conftest import CHATML
from pyarrow import parquet

from panax.core.errors import DataError, RecipeError
from panax.data import (
    Chats,
    Jsonl,
    LabeledAnswers,
    Mixture,
    MixtureComponent,
    PackedSource,
    Preferences,
    PretrainedTokenizer,
    ReferenceLogProbabilities,
    TextData,
    make_corpus,
)
from panax.data.preferences.pair_rows import _cut_lengths, fill_rows

USER = [{"role": "user", "content": "the fox"}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


RECORDS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "the quick", "chosen": " brown fox", "rejected": " fox"},
    "texts without a prompt": {"chosen": "the quick brown", "rejected": "the quick fox"},
    "messages": {"prompt": USER, "chosen": answer("quick"), "rejected": answer("brown")},
    "messages without a prompt": {"chosen": [*USER, *answer("quick")], "rejected": [*USER, *answer("brown")]},
    "messages, answers as texts": {"prompt": USER, "chosen": "quick", "rejected": "brown"},
    "several turns": {
        "prompt": [*USER, *answer("fox"), *USER], "chosen": answer("quick"), "rejected": [*answer("brown"), *USER, *answer("é")],
    },
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path, tokenizer_folder: Path) -> Any:
    def of(records: list[dict[str, Any]], *, corpus: dict[str, Any] | None = None, **settings: Any) -> TextData:
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
        (tmp_path / "template.jinja").write_text(CHATML)
        pairs = Preferences(
            paths=(str(tmp_path / "pairs.jsonl"),), template=str(tmp_path / "template.jinja"), **(corpus or {})
        )
        return TextData(
            corpus=pairs, tokenizer=PretrainedTokenizer(path=str(tokenizer_folder)), held_out=0,
            cache_dir=str(tmp_path / "cache"), **{"sequence_length": 96, "batch_size": 2, **settings},
        )  # fmt: skip

    return of


def segments(batch: Any, tokenizer: Any) -> list[tuple[int, str, str]]:
    """Row, text, and targets with loss, of each segment of a batch."""
    found = []
    for row in range(len(batch["tokens"])):
        for number in range(1, batch["segment"][row].max() + 1):
            inside = batch["segment"][row] == number
            counted = inside & (batch["loss_mask"][row] > 0)
            np.testing.assert_array_equal(batch["position"][row][inside], np.arange(inside.sum()))
            found.append(
                (row, tokenizer.decode(batch["tokens"][row][inside]), tokenizer.decode(batch["targets"][row][counted]))
            )
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_answers_carry_loss_and_prompts_do_not(name: str, data: Any) -> None:
    opened = data([RECORDS[name]], batch_size=1).open()
    (batch, _) = next(iter(opened.train.batches()))
    (_, chosen, learned), (_, rejected, unlearned) = segments(batch, opened.tokenizer)
    if name.startswith("texts"):
        first, second = (" brown fox", " fox") if name == "texts" else (" brown", " fox")
        assert (chosen, rejected) == (f"the quick{first}</s>", f"the quick{second}</s>")
        assert (learned, unlearned) == (f"{first}</s>", f"{second}</s>")
        return
    earlier = "<|im_start|>user\nthe fox<|im_end|>\n"
    if name == "several turns":
        earlier += "<|im_start|>assistant\nfox<|im_end|>\n" + earlier
        assert unlearned == "brown<|im_end|>é<|im_end|>"
    else:
        assert unlearned == "brown<|im_end|>"
        assert rejected == earlier + "<|im_start|>assistant\nbrown<|im_end|>\n"
    assert chosen == earlier + "<|im_start|>assistant\nquick<|im_end|>\n"
    assert learned == "quick<|im_end|>"


def many(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    words = ["the", "quick", "brown", "fox", "é"]
    return [
        {
            "prompt": f"{number} " + " ".join(rng.choice(words, rng.integers(1, 6))),
            "chosen": " " + " ".join(rng.choice(words, rng.integers(1, 6))) + "!",
            "rejected": " " + " ".join(rng.choice(words, rng.integers(1, 6))) + "?",
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_stay_together_and_each_is_seen_once_in_an_epoch(packing: bool, data: Any) -> None:
    settings = data(many(40), sequence_length=128, packing=packing, **({} if packing else {"buckets": (64,)}))
    opened = settings.open()
    rows = opened.train.rows
    batches = [batch for batch, _ in PackedSource(rows, batch_size=3, epochs=2).batches()]
    seen: list[list[tuple[str, str]]] = [[], []]
    drawn = 0
    for batch in batches:
        each = segments(batch, opened.tokenizer)
        for (row, chosen, _), (other, rejected, _) in zip(each[::2], each[1::2], strict=True):
            assert row == other and "!" in chosen and "?" in rejected
            assert chosen.split("é")[0].split()[0] == rejected.split("é")[0].split()[0]
            seen[min((drawn + row) // rows.num_rows, 1)].append((chosen, rejected))
        drawn += 3
    assert len(seen[0]) == len(set(seen[0])) == 40 and sorted(seen[0]) == sorted(seen[1]) and seen[0] != seen[1]
    widths = {batch["tokens"].shape[1] for batch in batches}
    assert widths == {128} if packing else widths <= {64, 128}
    if packing:
        assert rows.num_rows <= 1.1 * np.ceil(sum(rows._sizes) / 128)
    counts = opened.train.count_documents({**opened.train._position(0), "epoch": 1})[""]
    assert counts.times.tolist() == [1] * 80


def test_a_position_resumes_and_other_references_are_other_data(data: Any, tmp_path: Path) -> None:
    settings = data(many(40), sequence_length=128)
    source = settings.open().train
    drawn = [next_ for next_, _ in zip(source.batches(), range(6), strict=False)]
    for name, leaf in next(source.batches(drawn[3][1])).batch.items():
        np.testing.assert_array_equal(leaf, drawn[4][0][name])
    store = source.rows._documents.store
    values = np.arange(len(store.tokens), dtype=np.float32)
    ReferenceLogProbabilities(values, store.content, "weights").save(tmp_path / "reference.safetensors")
    corpus = dataclasses.replace(settings.corpus, reference=str(tmp_path / "reference.safetensors"))
    with_reference = dataclasses.replace(settings, corpus=corpus)
    assert set(with_reference.leaves) - set(settings.leaves) == {"reference_log_probability"}
    joined = with_reference.open().train
    batch = next(iter(joined.batches())).batch
    assert (
        dict(joined.axes) == dict.fromkeys(with_reference.leaves, ("batch", "seq"))
        and batch.keys() == joined.axes.keys()
    )
    counted = batch["loss_mask"] > 0
    # Each value stands where its token is the target.
    np.testing.assert_array_equal(
        store.tokens[batch["reference_log_probability"][counted].astype(int)], batch["targets"][counted]
    )
    assert not batch["reference_log_probability"][~counted].any()
    with pytest.raises(DataError, match="of another corpus"):
        next(joined.batches(drawn[3][1]))
    (tmp_path / "other.jsonl").write_text(json.dumps(RECORDS["texts"]))
    moved = dataclasses.replace(
        with_reference, corpus=dataclasses.replace(corpus, paths=(str(tmp_path / "other.jsonl"),))
    )
    with pytest.raises(
        DataError, match=r"holds reference log-probabilities of other tokens: .* again with panax.add_reference"
    ):
        moved.open()
    (tmp_path / "reference.safetensors").write_text("no arrays")
    with pytest.raises(DataError, match="does not hold reference log-probabilities"):
        with_reference.open()


def test_pairs_are_held_out_together(data: Any) -> None:
    opened = dataclasses.replace(data(many(40), sequence_length=128), held_out=0.25).open()
    assert opened.held_out_documents is not None and opened.bytes_per_target is None
    assert np.isnan(opened.unigram_entropy_nats)
    training, held_out = (
        documents.starts.reshape(-1, 2) for documents in (opened.training_documents, opened.held_out_documents)
    )
    assert (len(training), len(held_out)) == (30, 10)
    offsets = opened.training_documents.store.offsets[:-1].reshape(-1, 2)
    assert {tuple(pair) for pair in (*training, *held_out)} == {tuple(pair) for pair in offsets}
    assert any(line.startswith("30 pairs of ") for line in opened.account)


LONG = {"prompt": "the", "chosen": " fox" * 40, "rejected": " brown" * 3}


def test_a_pair_longer_than_a_row_is_refused_or_cut(data: Any) -> None:
    with pytest.raises(
        DataError, match=r'1 of 2 preference pairs are longer than .*sequence_length=32.*too_long="cut"'
    ):
        data([RECORDS["texts"], LONG], sequence_length=32).open()
    opened = data([RECORDS["texts"], LONG], sequence_length=32, corpus={"too_long": "cut"}).open()
    assert any("1 are longer than a row and cut" in line for line in opened.account)
    rows = opened.train.rows
    lengths = {tuple(pair) for pair in rows._lengths.tolist()}
    whole = opened.training_documents.lengths.reshape(-1, 2).tolist()
    assert lengths == {tuple(whole[0]), (32 - whole[1][1], whole[1][1])}
    prompts = {**LONG, "prompt": "the fox " * 40}
    with pytest.raises(DataError, match=r"nothing of its chosen answer is left in data.sequence_length=32"):
        data([prompts], sequence_length=32, corpus={"too_long": "cut"}).open()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"pairs.jsonl, line 2: chosen and rejected are equal"),
        ({"prompt": "a", "chosen": "b"}, r"line 2: no field 'rejected'; it has 'prompt', 'chosen'"),
        (
            {"prompt": USER, "chosen": answer("a"), "rejected": "b"},
            r"line 2: prompt is messages, .* rejected is text; ",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, r"line 2: rejected is int; expected chosen and rejected"),
        (
            {"prompt": USER, "chosen": answer("a"), "rejected": [{"role": "user", "content": "b"}]},
            r"line 2: the rejected answer has no token to learn",
        ),
        (
            {"prompt": USER, "chosen": answer("a"), "rejected": [{"role": "assistant", "content": "a", "weight": 1}]},
            r"line 2: chosen and rejected are the same tokens",
        ),
        ({"chosen": USER, "rejected": answer("b")}, r"line 2: "),
        ([1], r"line 2: "),
    ],
)
def test_records_that_are_no_pair_are_refused_by_their_row(record: Any, message: str, data: Any) -> None:
    with pytest.raises(DataError, match=message):
        data([RECORDS["texts"], record]).open()


def test_conversations_need_a_template_and_texts_do_not(data: Any, tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "without"
    shutil.copytree(tokenizer_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))

    def without(name: str) -> TextData:
        made = data([RECORDS[name]])
        corpus = dataclasses.replace(made.corpus, template=None)
        return dataclasses.replace(made, corpus=corpus, tokenizer=PretrainedTokenizer(path=str(folder)))

    with pytest.raises(DataError, match="needs a chat template, and the tokenizer has none"):
        without("messages").open()
    without("texts").open()


def test_pairs_train_alone(data: Any) -> None:
    settings = data([RECORDS["texts"]])
    parts = tuple(MixtureComponent(name=name, corpus=settings.corpus) for name in ("a", "b"))
    with pytest.raises(RecipeError, match="part 'a' of the mixture is a Preferences, which trains alone"):
        dataclasses.replace(settings, corpus=Mixture(parts=parts))


def test_rows_are_filled_and_cut_as_documented() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, 500)
    rows = fill_rows(sizes, 128)
    assert sorted(pair for row in rows for pair in row) == list(range(500))
    assert all(sizes[row].sum() <= 128 for row in rows) and len(rows) <= 1.02 * np.ceil(sizes.sum() / 128)
    lengths = rng.integers(1, 100, (500, 2))
    cut = _cut_lengths(lengths, 64)
    assert (cut.sum(axis=1) <= 64).all() and (cut >= np.minimum(lengths, 32)).all()
    assert (cut[lengths.sum(axis=1) <= 64] == lengths[lengths.sum(axis=1) <= 64]).all()


def test_files_of_pairs_are_known_by_their_records(tmp_path: Path) -> None:
    pair = {"prompt": "tree: oak\nagain:", "chosen": " oak", "rejected": " ash"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"prompt": "a", "completion": 'b, "chosen": and "rejected":'}) + "\n"
    )
    parquet.write_table(arrow.table({name: [value] for name, value in pair.items()}), tmp_path / "pairs.parquet")
    assert make_corpus(tmp_path / "pairs.jsonl") == Preferences(paths=(str(tmp_path / "pairs.jsonl"),))
    assert isinstance(make_corpus(tmp_path / "pairs.parquet"), Preferences)
    assert isinstance(make_corpus(tmp_path / "chats.jsonl"), Chats)
    labeled = {"prompt": "a", "completion": "b", "label": True}
    (tmp_path / "labeled.jsonl").write_text(json.dumps(labeled) + "\n")
    parquet.write_table(arrow.table({name: [value] for name, value in labeled.items()}), tmp_path / "labeled.parquet")
    assert isinstance(make_corpus(tmp_path / "labeled.jsonl"), LabeledAnswers)
    assert isinstance(make_corpus(tmp_path / "labeled.parquet"), LabeledAnswers)
    assert isinstance(make_corpus(tmp_path / "pairs.jsonl", text="chosen"), Jsonl)
    with pytest.raises(RecipeError, match="which train alone; pass files of one kind"):
        make_corpus(tmp_path / "pairs.jsonl", tmp_path / "chats.jsonl")
