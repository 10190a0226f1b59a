"""How good a trained model is: the figures that its run ended with, and those on other data."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_recipe

import panax
from panax.adapters.equinox import task as equinox_task
from panax.cli.main import main
from panax.core import CheckpointError, DataError, RecipeError
from panax.data import (
    Arrays,
    Augmentation,
    Digits,
    ExampleData,
    IterableSource,
    Mixing,
    PackedSource,
    TextData,
    TextFiles,
    TokenWriter,
)
from panax.models import DecoderConfig, DecoderTask, VitConfig, VitTask
from panax.optim import AdamW, Schedule
from panax.run.reporting.evaluation import open_full
from panax.train import StepConfig


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of five steps with averaged parameters; its last checkpoint is not its best."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("evaluated")
        patch.chdir(folder)
        patch.setenv("PANAX_CACHE", str(folder / "cache"))
        (folder / "other.txt").write_text("def other(text):\n    return text.split()\n" * 30)
        task = DecoderTask(model=DecoderConfig(max_length=64, embed=16, num_layers=1, heads=2, ffn=32))
        recipe = dataclasses.replace(tiny_recipe.tiny(), task=task, num_steps=7, step=StepConfig(ema_decay=0.5))
        result = panax.fit(recipe, quiet=True)
        yield result


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name


def test_without_data_the_figures_are_those_that_the_run_ended_with(ran, capsys):
    same(panax.evaluate(ran), ran.evaluation)
    logged = json.loads(
        [line for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines() if "evaluation/loss" in line][-1]
    )
    tokens = set((panax.data.files.cache.cache_directory()).glob("tokens-*"))
    evaluation = panax.evaluate("runs/tiny")
    assert evaluation["loss"] == pytest.approx(logged["evaluation/loss"], rel=1e-6) and evaluation["ema_decay"] == 0.5
    same(evaluation, ran.evaluation)
    # The run's tokenizer is used, so that the same tokens are found again.
    assert set((panax.data.files.cache.cache_directory()).glob("tokens-*")) == tokens
    assert main(["evaluate", "runs/tiny"]) == 0
    out = capsys.readouterr().out
    assert "checkpoint  runs/tiny/checkpoints/step_00000007\n" in out and "(averaged parameters)" in out
    assert f"{ran.evaluation['loss']:.6g}" in out and max(map(len, out.splitlines())) <= 80


def test_an_earlier_checkpoint_has_other_figures(ran):
    earlier = panax.evaluate("runs/tiny/checkpoints/step_00000005")
    assert earlier["loss"] != pytest.approx(ran.evaluation["loss"], rel=1e-4)
    same(panax.load("runs/tiny/checkpoints/step_00000005").evaluate(), earlier)


def test_other_texts_are_read_with_the_runs_tokenizer(ran, capsys):
    evaluation = panax.evaluate(ran, "other.txt")
    # All of it, by hand: the same tokenizer, one pass.
    ids = ran.prepared.data.tokenizer.encode(Path("other.txt").read_text())
    assert (
        evaluation["tokens"] == pytest.approx(len(ids), abs=len(ids) // 64 + 1)
        and evaluation["loss"] != ran.evaluation["loss"]
    )
    same(panax.evaluate("runs/tiny", ["other.txt"]), evaluation)
    same(panax.evaluate(ran, TextData(corpus=TextFiles(paths=("other.txt",)), sequence_length=64)), evaluation)
    assert main(["evaluate", "runs/tiny", "--data", "other.txt", "--batches", "1"]) == 0
    assert "data        other.txt (averaged" in capsys.readouterr().out
    tokenizer = ran.prepared.data.tokenizer
    with TokenWriter("tokens", vocab_size=tokenizer.vocab_size, end_of_document=tokenizer.end_of_document) as writer:
        writer.append(ids)
    assert panax.evaluate("runs/tiny", "tokens")["loss"] == pytest.approx(evaluation["loss"], rel=1e-6)


def test_sources_and_batches(ran):
    held_out = ran.prepared.data.held_out
    two = [batch for (batch, _), _ in zip(held_out.batches(), range(2))]
    same({**panax.evaluate(ran, two), "bits_per_byte": ran.evaluation["bits_per_byte"]}, ran.evaluation)
    one = panax.evaluate(ran, held_out, batches=1)
    assert one["tokens"] < ran.evaluation["tokens"] and one["loss"] == panax.evaluate(ran, two[:1])["loss"]
    assert panax.evaluate(ran, batches=1)["loss"] == one["loss"]
    every = panax.evaluate(ran, batches=0)
    assert every["tokens"] == sum(batch["loss_mask"].sum() for batch, _ in held_out.batches())
    endless = PackedSource(held_out.rows, batch_size=8)
    for source in (endless, IterableSource(two)):
        with pytest.raises(RecipeError, match="the data has no end; pass the number of batches"):
            panax.evaluate(ran, source)
    assert panax.evaluate(ran, endless, batches=1)["loss"] == one["loss"]


@pytest.mark.parametrize(
    ("data", "batches", "error", "said"),
    [
        ("nowhere", None, DataError, "nowhere does not exist"),
        (3, None, RecipeError, "data is an int; expected TextData"),
        (None, -1, RecipeError, "batches=-1; expected 1 or more"),
    ],
)
def test_what_can_not_be_evaluated_on_is_reported(ran, data, batches, error, said):
    with pytest.raises(error, match=said):
        panax.evaluate(ran, data, batches)


def test_what_can_not_be_evaluated_is_reported(ran):
    with pytest.raises(RecipeError, match="a dict can't be evaluated; expected a run's folder"):
        panax.evaluate({})
    with pytest.raises(CheckpointError, match="nothing holds no checkpoint"):
        panax.evaluate("nothing")


def test_paths_are_read_as_the_runs_data_is_and_classes_are_the_same():
    with pytest.raises(RecipeError, match="text or one folder of images; this run has ExampleData"):
        open_full("pictures", ExampleData(examples=Digits()), None)
    opened = open_full(ExampleData(examples=Digits(), batch_size=3, held_out=0.1), None, None)
    assert opened.facts.num_classes == 10 and opened.held_out.num_batches == 1797 // 3


@pytest.mark.slow
def test_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = panax.Experiment(
        name="digits",
        task=VitTask(
            model=VitConfig(num_classes=0, image_size=8, channels=1, patch=4, embed=16, num_layers=1, heads=2, ffn=16)
        ),
        data=ExampleData(
            examples=Digits(),
            batch_size=64,
            held_out=0.1,
            augmentation=Augmentation(crop=None, flip=0.0, mixing=Mixing()),
        ),
        optimizer=AdamW(schedule=Schedule(warmup_steps=0)),
        num_steps=1,
    )
    result = panax.fit(recipe, quiet=True)
    same(panax.evaluate("runs/digits"), result.evaluation)
    with pytest.raises(
        RecipeError, match="paths are read as the run's own data is, text or one folder of images; this run has"
    ):
        panax.evaluate("runs/digits", "pictures")
    images = np.zeros((4, 8, 8, 1), np.uint8)
    some = ExampleData(examples=Arrays({"image": images, "label": np.zeros(4, np.int32)}, num_classes=10), batch_size=8)
    fewer = dataclasses.replace(some, examples=Arrays({"image": images, "label": np.zeros(4, np.int32)}, num_classes=2))
    with pytest.raises(RecipeError, match="the data has 2 classes, the run's has 10"):
        panax.evaluate(result, fewer)


def test_an_adapted_model_is_evaluated_as_a_result_and_its_folder_reports_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches = [{"x": np.full((8, 4), i, np.float32)} for i in range(3)]
    task = equinox_task(
        lambda key: eqx.nn.Linear(4, 1, key=key), lambda model, batch: jnp.mean(jax.vmap(model)(batch["x"]) ** 2)
    )
    result = panax.fit(
        panax.Experiment(task=task, data=batches, held_out=batches, num_steps=1, name="linear"), quiet=True
    )
    same(panax.evaluate(result), result.evaluation)
    assert panax.evaluate(result, batches[1:2])["loss"] != result.evaluation["loss"]
    with pytest.raises(
        CheckpointError, match=r"built from a file: .*AdaptedTask.*In Python, fit of the same experiment resumes"
    ):
        panax.evaluate("runs/linear")


def test_a_run_that_held_nothing_out_needs_data(ran):
    prepared = dataclasses.replace(ran.prepared, data=dataclasses.replace(ran.prepared.data, held_out=None))
    with pytest.raises(RecipeError, match="the run held nothing out; pass data"):
        panax.evaluate(dataclasses.replace(ran, prepared=prepared))
