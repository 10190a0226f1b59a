"""Truncated tokens are counted and reported; if nothing is left to learn, a run is refused, and an evaluation raises."""

import json

import numpy as np
import pytest

import panax
from panax.core import DataError
from panax.data import BytePairTokenizer, Jsonl, TextData
from panax.data.text.packing import Documents, PackedRows, PaddedRows
from panax.data.text.row_lengths import describe_lengths
from panax.data.text.tokens import TokenWriter, open_tokens
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig

LONG, SHORT = "the oak and the ash " * 20, "q "


def write(path, prompts):
    path.write_text("".join(json.dumps({"q": f"{q}{i}", "a": "yes"}) + "\n" for i, q in enumerate(prompts)))
    return str(path)


def data(tmp_path, prompts, **settings):
    corpus = Jsonl(paths=(write(tmp_path / "qa.jsonl", prompts),), prompt="q", answer="a")
    usual = {"sequence_length": 16, "batch_size": 4, "held_out": 4, "packing": False}
    tokenizer = BytePairTokenizer(vocab_size=270)
    return TextData(corpus=corpus, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"), **{**usual, **settings})


def test_where_every_answer_is_cut_away_a_run_is_refused(tmp_path):
    with pytest.raises(
        DataError,
        match=r"nothing is left to train on: .*of 36 documents 36 are longer than 16.*36 have no target with loss",
    ):
        data(tmp_path, [LONG] * 40).open()


def test_some_that_are_cut_are_counted(tmp_path):
    opened = data(tmp_path, [LONG] * 10 + [SHORT] * 30, held_out=0).open()
    (line,) = (line for line in opened.account if "documents of" in line)
    assert "of 40 documents 10 are longer than 16 tokens and cut" in line and "10 have no target with loss left" in line


def test_packed_rows_cut_nothing(tmp_path):
    opened = data(tmp_path, [LONG] * 40, packing=True).open()
    lines = [line for line in opened.account if "documents of" in line]
    assert len(lines) == 2 and "36 are longer than a row and continue in another" in lines[0] and "filled" in lines[0]


def test_empty_answers_and_blank_texts_are_counted(tmp_path):
    lines = [{"q": "a", "a": "b"}, {"q": "c", "a": None}, {"q": "d", "a": ""}, {"q": " ", "a": " "}]
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = TextData(
        corpus=Jsonl(paths=(str(path),), prompt="q", answer="a"), tokenizer=BytePairTokenizer(vocab_size=270), held_out=0,
        sequence_length=8, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    for opened in (made.open(), made.open()):
        assert any("2 answers are empty (or null)" in line for line in opened.account)
        assert any("1 documents are blank" in line for line in opened.account)


def test_documents_without_loss_are_found_under_any_mask(tmp_path):
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path, vocab_size=10, end_of_document=9) as writer:
        for _ in range(200):
            length = int(rng.integers(0, 12))
            writer.append(rng.integers(0, 9, length).tolist(), num_prompt_tokens=int(rng.integers(0, length + 1)))
    store = open_tokens(tmp_path)
    documents = Documents(store=store, starts=store.offsets[:-1], lengths=np.diff(store.offsets), fingerprint="")
    for length in (1, 2, 5, 12, 20):
        rows = PaddedRows(documents, sequence_length=length, seed=0)
        result = rows.read_rows(0, np.arange(rows.num_rows), length)
        assert rows.num_documents_without_loss == int((result.loss_mask.sum(1) == 0).sum()), length
        # Batches are as wide as their longest row needs.
        widths = [rows.width(0, np.arange(at, min(at + 8, 200))) for at in range(0, 200, 8)]
        assert rows.fill_ratio(8) == pytest.approx((result.segment != 0).sum() / (np.array(widths) * 8).sum())
        buckets = PaddedRows(documents, sequence_length=20, seed=0, buckets=(4, 8))
        bucket_widths = np.array([buckets.width(0, np.arange(at, at + 8)) for at in range(0, 200, 8)])
        assert buckets.fill_ratio(8) == pytest.approx(documents.num_tokens / (bucket_widths * 8).sum())
    assert "200 documents of" in describe_lengths(
        PackedRows(documents, sequence_length=4, seed=0), documents, "documents", 8
    )


def experiment(tmp_path, **settings):
    usual = {
        "name": "cut",
        "task": DecoderTask(
            model=DecoderConfig(max_length=16, embed=16, num_layers=1, heads=2, ffn=32, vocab_size=270)
        ),
        "optimizer": AdamW(schedule=Schedule(peak=1e-2, decay="constant")),
        "num_steps": 1,
        "directory": str(tmp_path / "run"),
        "evaluate": EvaluateConfig(every=1),
    }
    return panax.Experiment(**{**usual, **settings})


def batch(mask):
    shape = (8, 16)
    leaves = {name: np.ones(shape, np.int32) for name in ("tokens", "targets", "segment")}
    return {
        **leaves,
        "position": np.tile(np.arange(16, dtype=np.int32), (8, 1)),
        "loss_mask": np.full(shape, mask, np.float32),
    }


def test_an_evaluation_over_no_target_is_no_judgement(tmp_path):
    axes = dict.fromkeys(batch(1), ("batch", "seq"))
    said = []

    def source(mask, **settings):
        return panax.data.IterableSource([batch(mask)], axes=axes, **settings)

    result = panax.fit(experiment(tmp_path, data=source(1), held_out=source(0, epochs=1)), say=said.append)
    assert result.evaluation == {}
    assert any("step 1: nothing in the held-out data counts" in line for line in said)
    assert not any('"evaluation/' in line for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    with pytest.raises(DataError, match="nothing in the data counts: no target carries loss"):
        panax.evaluate(result, data=source(0, epochs=1))
    assert panax.evaluate(result, data=source(1, epochs=1))["loss"] > 0
    # Updates on nothing end with the right cause.
    with pytest.raises(panax.core.PanaxError, match="nothing in these batches carries loss"):
        panax.fit(experiment(tmp_path, data=source(0), num_steps=30, directory=str(tmp_path / "none")), quiet=True)
