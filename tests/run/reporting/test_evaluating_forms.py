"""Paths to evaluate on are read as the run's own data is: records by its fields, tables by its columns, with its ids."""

import io
import json
import tarfile

import numpy as np
import pandas as pd
import pytest

import panax
from panax.cli.main import main
from panax.core import DataError, RecipeError
from panax.data import (
    Bag,
    BytePairTokenizer,
    CountVocabulary,
    ExampleData,
    FilteredCorpus,
    IterableSource,
    Jsonl,
    Mixture,
    MixtureComponent,
    Table,
    TextData,
    TextFiles,
)
from panax.models import DecoderConfig, DecoderTask
from panax.run.preparation import open_data
from panax.run.whole_data import is_endless, open_full, rename_leaves


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def data(tmp_path):
    train = lines(tmp_path / "train.jsonl", [{"m": {"q": f"oak {n}? "}, "a": "yes"} for n in range(8)])
    return TextData(
        corpus=Jsonl(paths=(train,), prompt="m.q", answer="a"), tokenizer=BytePairTokenizer(vocab_size=270), sequence_length=16,
        batch_size=8, held_out=2, packing=False, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip


def targets(opened):
    found = []
    for batch, _ in opened.held_out.batches():
        for ids, mask in zip(batch["targets"], batch["loss_mask"], strict=True):
            found.append(opened.tokenizer.decode(ids[mask != 0]).removesuffix("<|endoftext|>"))
    return [each for each in found if each]


def test_records_are_read_by_the_fields_of_the_run(tmp_path, data):
    tokenizer = data.open().tokenizer
    other = lines(tmp_path / "other.json", [{"m": {"q": "ash? "}, "a": "no"}])
    assert targets(open_full(other, data, tokenizer)) == ["no"]
    for corpus in (
        FilteredCorpus(corpus=data.corpus, min_characters=1),
        Mixture(
            parts=(
                MixtureComponent(name="a", corpus=data.corpus),
                MixtureComponent(name="b", corpus=TextFiles(paths=("x",))),
            )
        ),
    ):
        assert targets(open_full(other, TextData(**{**vars(data), "corpus": corpus}), tokenizer)) == ["no"]
    renamed = lines(tmp_path / "renamed.jsonl", [{"prompt": "ash? ", "completion": "maybe"}])
    with pytest.raises(DataError, match=r"no field 'm\.q'; it has 'prompt', 'completion'"):
        open_full(renamed, data, tokenizer)
    fields = {"prompt": "prompt", "answer": "completion"}
    assert targets(open_full(renamed, data, tokenizer, fields=fields)) == ["maybe"]


def test_a_name_that_was_not_chosen_is_the_formats_own(tmp_path, data):
    named = TextData(**{**vars(data), "corpus": Jsonl(paths=("x",))})
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        member = tarfile.TarInfo("a.txt")
        member.size = 7
        shard.addfile(member, io.BytesIO(b"the ash"))
    assert targets(open_full(str(tmp_path / "a.tar"), named, data.open().tokenizer)) == ["he ash"]


def test_batches_with_another_librarys_names_are_evaluated_as_they_are_trained_on():
    task = DecoderTask(model=DecoderConfig(max_length=16, embed=16, num_layers=1, heads=2, ffn=32, vocab_size=9))
    batch = {"input_ids": np.ones((2, 4), np.int32), "labels": np.ones((2, 4), np.int32)}
    endless = rename_leaves(open_full(IterableSource([batch]), None, None), task)
    once = rename_leaves(open_full([batch, batch], None, None), task)
    assert is_endless(endless.held_out) and not is_endless(once.held_out)
    assert {"tokens", "targets", "loss_mask"} <= set(once.held_out.axes) and len(list(once.held_out.batches())) == 2


def table(folder, name, values):
    pd.DataFrame({"c": values, "y": range(len(values))}).to_csv(folder / name, index=False)
    return str(folder / name)


def test_tables_are_read_by_the_columns_and_ids_of_the_run(tmp_path):
    bags = (Bag(column="c", ids=CountVocabulary()),)
    train = ExampleData(
        examples=Table(paths=(table(tmp_path, "train.csv", ["a", "b", "b"]),), label="y", bags=bags), batch_size=4,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    other = table(tmp_path, "other.csv", ["a", "z", "b", "a"])
    batch = next(open_full(other, train, None).held_out.batches()).batch
    assert dict(zip(batch["label"].tolist(), batch["c"][:, 0].tolist(), strict=True)) == {0: 1, 1: 2, 2: 0, 3: 1}
    with pytest.raises(RecipeError, match="prompt: names a field of records of text, and this run has other data"):
        open_full(other, train, None, fields={"prompt": "q"})


def test_text_to_be_judged_on_takes_the_tokenizer_of_the_training_text(tmp_path, data):
    held_out = TextData(
        corpus=Jsonl(paths=(lines(tmp_path / "val.jsonl", [{"t": "the elder and the elm"}] * 3),), text="t"), sequence_length=16,
        batch_size=1, packing=False, tokenizer=BytePairTokenizer(vocab_size=300), cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    said = []
    task = DecoderTask(model=DecoderConfig(max_length=16, embed=16, num_layers=1, heads=2, ffn=32))
    opened = open_data(panax.Experiment(task=task, data=data, held_out=held_out), said.append)
    assert opened.tokenizer.vocab_size == opened.facts.vocab_size <= 270
    batches = [batch for batch, _ in opened.held_out.batches()]
    assert sum((batch["loss_mask"] != 0).sum() for batch in batches) > 20 and opened.train.rows.num_rows == 8
    assert any("data.held_out is not used" in line for line in said) and "held-out data:" in said
    text = opened.tokenizer.decode(np.concatenate([batch["tokens"].reshape(-1) for batch in batches]))
    assert "the elder and th" in text


def test_the_command_takes_fields(tmp_path, data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment = panax.Experiment(
        name="qa", task=DecoderTask(model=DecoderConfig(max_length=16, embed=16, num_layers=1, heads=2, ffn=32)), data=data,
        num_steps=1,
    )  # fmt: skip
    panax.fit(experiment, quiet=True)
    other = lines(tmp_path / "other.jsonl", [{"p": "ash? ", "c": "no"}])
    assert main(["evaluate", "runs/qa", "--data", str(data.corpus.paths[0])]) == 0
    assert "documents of" in capsys.readouterr().out
    assert main(["evaluate", "runs/qa", "--data", other]) == 3
    assert "takes --text, or --prompt and --answer" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", "runs/qa", "--data", other, "--prompt", "p", "--answer", "c"]) == 0
    assert main(["evaluate", "runs/qa", "--prompt", "p"]) == 2
