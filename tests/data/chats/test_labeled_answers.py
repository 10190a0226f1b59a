"""Labeled answers from records to rows: TRL's unpaired format, exchanged answers, labels, and errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats.conftest import CHATML

import panax
from panax.core.errors import DataError, RecipeError
from panax.data import LabeledAnswers, PackedSource, Preferences, PretrainedTokenizer, TextData
from panax.models import DecoderConfig, DecoderTask, Kto
from panax.optim import AdamW, Schedule

USER = [{"role": "user", "content": "the fox"}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def many(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"the {'fox ' * (n % 4)}{n}", "completion": f" {'quick ' * (n % 3)}{n}!", "label": n % 3 != 0}
        for n in range(count)
    ]


@pytest.fixture
def data(tmp_path: Path, tokenizer_folder: Path) -> Any:
    def of(records: list[Any], *, corpus: Any = None, name: str = "answers.jsonl", **settings: Any) -> TextData:
        path = tmp_path / name
        if name.endswith(".parquet"):
            import pyarrow as arrow
            from pyarrow import parquet

            parquet.write_table(arrow.Table.from_pylist(records), path)
        else:
            path.write_text(json.dumps(records) if name.endswith(".json") else "\n".join(map(json.dumps, records)))
        (tmp_path / "template.jinja").write_text(CHATML)
        answers = LabeledAnswers(paths=(str(path),), template=str(tmp_path / "template.jinja"), **(corpus or {}))
        return TextData(
            corpus=answers, tokenizer=PretrainedTokenizer(path=str(tokenizer_folder)),
            cache_dir=str(tmp_path / "cache"), **{"held_out": 0, "sequence_length": 96, "batch_size": 2, **settings},
        )  # fmt: skip

    return of


def segments(batch: Any, tokenizer: Any) -> list[tuple[str, str, int]]:
    """The text, the learned text and the label of each segment."""
    listed = []
    for row, segment in enumerate(batch["segment"]):
        for number in range(1, segment.max() + 1):
            inside = segment == number
            counted = inside & (batch["loss_mask"][row] > 0)
            (label,) = set(batch["desirable"][row][inside].tolist())
            learned = tokenizer.decode(batch["targets"][row][counted])
            listed.append((tokenizer.decode(batch["tokens"][row][inside]), learned, label))
    return listed


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["answers.jsonl", "answers.json", "answers.parquet"])
def test_each_answer_stands_beside_the_one_before_it_in_its_group(name: str, packing: bool, data: Any) -> None:
    """Groups as TRL has them, the last one of 5 since one record alone has no other."""
    records = many(9)
    opened = data(records, name=name, packing=packing, corpus={"group_size": 4}).open()
    seen = {}
    for batch, _ in PackedSource(opened.train.rows, batch_size=3, epochs=1).batches():
        each = segments(batch, opened.tokenizer)
        for (text, learned, label), (mismatched, other, same) in zip(each[::2], each[1::2], strict=True):
            assert label == same and text.endswith(learned) and mismatched.endswith(other)
            assert text.removesuffix(learned) == mismatched.removesuffix(other)
            seen[text.removesuffix(learned)] = (learned, other, label)
        assert batch["desirable"].dtype == np.int32 and not batch["desirable"][batch["segment"] == 0].any()
    before = [3, 0, 1, 2, 8, 4, 5, 6, 7]
    assert seen == {
        record["prompt"]: (f"{record['completion']}</s>", f"{records[other]['completion']}</s>", int(record["label"]))
        for record, other in zip(records, before, strict=True)
    }


def test_conversations_are_rendered(data: Any) -> None:
    records = [
        {"prompt": USER, "completion": answer("quick"), "label": True}, {"prompt": USER, "completion": "brown", "label": 0},
    ]  # fmt: skip
    opened = data(records, batch_size=1).open()
    (batch, _) = next(iter(opened.train.batches()))
    start = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    expected = [(f"{start}{text}<|im_end|>\n", f"{text}<|im_end|>") for text in ("quick", "brown", "brown", "quick")]
    listed = segments(batch, opened.tokenizer)
    assert sorted(each[:2] for each in listed) == sorted(expected)
    assert {(one[1], one[2]) for one in listed[::2]} == {("quick<|im_end|>", 1), ("brown<|im_end|>", 0)}


def test_equal_answers_may_stand_beside_each_other(data: Any) -> None:
    records = [{"prompt": f"the {n}", "completion": " fox", "label": True} for n in range(4)]
    assert data(records).open().train.rows.num_pairs == 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b"}, r"answers.jsonl, line 3: no field 'label'; it has 'prompt', 'completion'; expected"),
        ({"prompt": "a", "completion": "b", "label": "good"}, r"line 3: label is 'good'; expected prompt and completion"),
        ({"prompt": "a", "completion": 1, "label": True}, r"line 3: completion is int; expected prompt and completion"),
        ({"prompt": "a", "completion": answer("b"), "label": True}, r"line 3: prompt is text, completion is messages"),
        ({"prompt": USER, "completion": answer("b"), "label": True}, r": its prompt is text, and the answer before it is"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"line 3: it has chosen and rejected, .* with data.Preferences"),
        ([1], r"line 3: a JSON list; expected an object"),
    ],
)  # fmt: skip
def test_records_that_are_no_labeled_answer_are_refused_by_their_row(record: Any, message: str, data: Any) -> None:
    with pytest.raises(DataError, match=message):
        data([*many(2), record]).open()


def test_each_kind_of_file_names_the_corpus_that_reads_it(data: Any) -> None:
    for name in ("answers.jsonl", "answers.parquet"):
        settings = data(many(3), name=name)
        pairs = Preferences(paths=settings.corpus.paths)
        with pytest.raises(
            DataError, match=r"it has completion and label, .* with data.LabeledAnswers, for models.Kto"
        ):
            dataclasses.replace(settings, corpus=pairs).open()
    with pytest.raises(DataError, match=r"it is the only answer, and KTO compares each"):
        data(many(1)).open()
    with pytest.raises(RecipeError, match=r"group_size=1; expected at least 2"):
        LabeledAnswers(paths=("x",), group_size=1)
    with pytest.raises(DataError, match=r"3 of 3 labeled answers are longer than data.sequence_length=4"):
        data(many(3), sequence_length=4).open()


@pytest.mark.full
def test_a_model_learns_from_labels_with_a_reference(data: Any, tmp_path: Path) -> None:
    records = [{"prompt": "the", "completion": (" quick", " brown")[n % 2], "label": n % 2 == 0} for n in range(64)]
    settings = data(records, held_out=8, batch_size=8, sequence_length=32)
    model = DecoderConfig(max_length=32, embed=32, num_layers=1, heads=2, ffn=64)
    recipe = panax.Experiment(
        name="kto", task=DecoderTask(model=model, objective=Kto(beta=0.5)), data=settings, num_steps=20,
        directory=str(tmp_path / "kto"), optimizer=AdamW(schedule=Schedule(peak=1e-2)), log_every=1,
    )  # fmt: skip
    joined = panax.add_reference(recipe)
    assert set(joined.data.leaves) - set(settings.leaves) == {"reference_log_probability"}  # type: ignore[union-attr]
    result = panax.fit(joined, quiet=True)
    assert result.evaluation["rewards/chosen"] > result.evaluation["rewards/rejected"] + 0.5
    assert panax.evaluate(str(tmp_path / "kto"))["loss"] == pytest.approx(result.evaluation["loss"], rel=1e-5)
