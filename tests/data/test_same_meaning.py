"""A number has one meaning in training and in evaluation data: classes, words and items."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import panax
from panax.core import DataError
from panax.data import (
    Bag,
    BytePairTokenizer,
    CountVocabulary,
    ExampleData,
    ImageFolder,
    Sequences,
    Table,
    TextData,
    TextFiles,
)
from panax.data.loading.class_agreement import align_held_out, find_class_names
from panax.data.loading.overfit import FirstBatches
from panax.models import VitConfig, VitTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig
from panax.run.preparation import open_data

COLORS = {"cat": (255, 0, 0), "dog": (0, 255, 0), "emu": (0, 0, 255), "fox": (255, 255, 0)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("classes")
    for side, names in {"train": ("cat", "dog", "emu"), "val": ("cat", "emu"), "other": ("cat", "fox")}.items():
        for name in names:
            (root / side / name).mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (8, 8), COLORS[name]).save(root / side / name / f"{number}.png")
    return root


def pictures(folder, **settings):
    return ExampleData(examples=ImageFolder(path=str(folder), size=8, **settings), batch_size=8)


def task():
    return VitTask(model=VitConfig(image_size=8, patch=4, embed=16, num_layers=1, heads=2, ffn=32))


def labels(source):
    return {
        tuple(image.reshape(-1, 3)[0]): int(label)
        for batch, _ in source.batches()
        for image, label in zip(batch["image"], batch["label"], strict=True)
    }


def test_held_out_images_take_the_numbers_of_the_training_classes(folders):
    said = []
    for held_out in (
        pictures(folders / "val"),
        panax.data.ExampleSource(pictures(folders / "val").open().examples, batch_size=8, epochs=1),
    ):
        opened = open_data(
            panax.Experiment(task=task(), data=pictures(folders / "train"), held_out=held_out), said.append
        )
        assert labels(opened.held_out) == {COLORS["cat"]: 0, COLORS["emu"]: 2}
        assert find_class_names(opened.held_out) == ("cat", "dog", "emu")
    assert any("uses indices of the training data's 3" in line for line in said)


def test_a_class_that_was_not_trained_on_is_refused(folders):
    experiment = panax.Experiment(task=task(), data=pictures(folders / "train"), held_out=pictures(folders / "other"))
    with pytest.raises(DataError, match="of which 'fox' is not among those of the training data: 'cat', 'dog', 'emu'"):
        open_data(experiment, lambda line: None)


def test_classes_may_be_given(folders):
    classes = ("emu", "cat", "dog", "gnu")
    opened = pictures(folders / "val", classes=classes).open()
    assert labels(panax.data.ExampleSource(opened.examples, batch_size=8, epochs=1)) == {
        COLORS["emu"]: 0,
        COLORS["cat"]: 1,
    }
    assert opened.num_classes == 4 and opened.examples.take(np.array([0])).classes == classes
    with pytest.raises(DataError, match="is not among classes="):
        pictures(folders / "val", classes=("cat",)).open()
    with pytest.raises(panax.core.PanaxError, match="names 'cat' twice"):
        pictures(folders / "val", classes=("cat", "cat"))


def test_what_can_not_be_renumbered_is_refused(folders):
    train = pictures(folders / "train").open().train
    held_out = FirstBatches(pictures(folders / "val").open().train, 1)
    with pytest.raises(DataError, match="numbers its classes otherwise"):
        align_held_out(held_out, FirstBatches(train, 1))
    same = FirstBatches(train, 1).without_repeats
    assert align_held_out(same, train) == (same, ())


def test_a_trained_model_knows_its_classes(folders, tmp_path):
    experiment = panax.Experiment(
        name="pictures", task=task(), data=pictures(folders / "train"), held_out=pictures(folders / "val"), num_steps=40,
        optimizer=AdamW(schedule=Schedule(peak=1e-2, decay="constant")), evaluate=EvaluateConfig(every=0),
        directory=str(tmp_path / "run"),
    )  # fmt: skip
    result = panax.fit(experiment, quiet=True)
    assert result.evaluation["accuracy"] > 0.9
    for run in (result, str(tmp_path / "run")):
        for data in (str(folders / "val"), pictures(folders / "val")):
            assert panax.evaluate(run, data)["accuracy"] > 0.9
        with pytest.raises(DataError, match="'fox' is not among those"):
            panax.evaluate(run, str(folders / "other"))
    assert panax.load(str(tmp_path / "run")).classes == ("cat", "dog", "emu")


def table(folder, name, values):
    pd.DataFrame({"c": values, "y": range(len(values))}).to_csv(folder / name, index=False)
    bags = (Bag(column="c", ids=CountVocabulary(), leaf="c"),)
    return ExampleData(
        examples=Table(paths=(str(folder / name),), label="y", bags=bags), batch_size=2, cache_dir=str(folder / "cache")
    )


def test_a_held_out_table_takes_the_vocabulary_of_the_training_table(tmp_path):
    train, val = table(tmp_path, "train.csv", ["a", "b", "b", "b"]), table(tmp_path, "val.csv", ["a", "a", "b", "z"])
    opened = open_data(panax.Experiment(task=task(), data=train, held_out=val), lambda line: None)
    rows = {
        int(label): int(id_[0])
        for batch, _ in opened.held_out.batches()
        for label, id_ in zip(batch["label"], batch["c"], strict=True)
    }
    assert rows == {0: 1, 1: 1, 2: 0, 3: 2}
    with pytest.raises(DataError, match=r"ids of 'c' are assigned by counts, .* CountVocabulary\(counted_in="):
        sources = {"data": train.open().train, "held_out": val.open().train}
        open_data(panax.Experiment(task=task(), **sources), lambda line: None)


def test_held_out_events_take_the_items_of_the_training_events(tmp_path):
    def events(name, items):
        pd.DataFrame({"user": 1, "item": items, "time": range(len(items))}).to_csv(tmp_path / name, index=False)
        return ExampleData(
            examples=Sequences(paths=(str(tmp_path / name),)), batch_size=1, cache_dir=str(tmp_path / "cache")
        )

    train, val = events("train.csv", ["a", "b", "b", "c"]), events("val.csv", ["c", "c", "a", "z", "b"])
    said = []
    opened = open_data(panax.Experiment(task=task(), data=train, held_out=val), said.append)
    batch = next(iter(opened.held_out.batches())).batch
    assert batch["items"][0, :3].tolist() == [2, 2, 1] and batch["targets"][0, :3].tolist() == [2, 1, 0]
    assert any("1 of 5 events are of items that items_from does not have" in line for line in said)
    with pytest.raises(DataError, match="ids of 'items' are assigned by counts"):
        sources = {"data": train.open().train, "held_out": val.open().train}
        open_data(panax.Experiment(task=task(), **sources), lambda line: None)


def test_text_that_another_tokenizer_made_is_refused(tmp_path):
    def text(name, content):
        (tmp_path / name).write_text(content)
        return TextData(
            corpus=TextFiles(paths=(str(tmp_path / name),)), tokenizer=BytePairTokenizer(vocab_size=262), sequence_length=8,
            batch_size=1, cache_dir=str(tmp_path / "cache"),
        ).open()  # fmt: skip

    train, other = text("a.txt", "the oak " * 40), text("b.txt", "an ash " * 40)
    with pytest.raises(DataError, match="tokenized by another tokenizer"):
        open_data(panax.Experiment(task=task(), data=train.train, held_out=other.held_out), lambda line: None)
    opened = open_data(panax.Experiment(task=task(), data=train.train, held_out=train.held_out), lambda line: None)
    assert opened.held_out is train.held_out
