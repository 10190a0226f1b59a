"""Published models by name: experiments, their tokenizers, and the message without data."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import panax
from panax.adapters.huggingface import save
from panax.core import DataError, RecipeError
from panax.data import (
    BytePairTokenizer,
    ExampleData,
    ImageFolder,
    PretrainedTokenizer,
    TextData,
    TextFiles,
    TokenWriter,
)
from panax.layers import Rotary
from panax.models import PRESETS, VIT_PRESETS, DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.presets.experiments import PARAMETERS
from panax.run import replace_data
from panax.run.blank_data import find_missing_data

TINY = DecoderConfig(
    vocab_size=300, max_length=32, embed=16, num_layers=1, heads=2, kv_heads=1, head_dim=8, ffn=32, tied=False,
    norm_epsilon=1e-5, rotary=Rotary(theta=500_000.0),
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PRESETS, "tiny_llama", TINY)
    monkeypatch.setitem(PARAMETERS, "tiny_llama", 1)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"the oak, the ash, and the bonny ivy tree: {name} " * 20)
    return tmp_path


def test_every_preset_is_an_experiment_that_lacks_data():
    for name in PARAMETERS:
        experiment = panax.preset(name)
        assert experiment.name == name and find_missing_data(experiment) is not None
        model = (PRESETS | VIT_PRESETS)[name]
        assert experiment.task.model == model
        assert name in VIT_PRESETS or experiment.data.sequence_length <= model.max_length


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(RecipeError, match="unknown preset 'llama3-8b'; did you mean 'llama3_8b'"):
        panax.preset("llama3-8b")


def test_without_data_it_is_not_trained(here, monkeypatch):
    def timed(*_, **__):
        raise AssertionError("kernels are timed before the data is looked for")

    monkeypatch.setattr("panax.run.entry.choose_kernels", timed)
    with pytest.raises(
        DataError, match=r"the preset tiny_llama comes without data; pass texts: --data PATH, or panax.preset\("
    ):
        panax.fit(panax.preset("tiny_llama"), quiet=True)
    with pytest.raises(DataError, match="the preset vit_b16 comes without data; pass a folder of images"):
        panax.fit(panax.preset("vit_b16"), fast_dev_run=True)


def test_it_trains_on_paths_from_scratch_and_from_weights(here):
    said = []
    began = panax.preset("tiny_llama", data=["a.txt", "b.txt", "c.txt"], say=said.append)
    assert said == [
        "tiny_llama: a tokenizer of 300 tokens is trained on the data; the published one comes with --init hf:DIR (init='hf:DIR')"
    ]
    peak = began.optimizer.schedule.peak
    # Small enough for two steps here.
    data = dataclasses.replace(began.data, batch_size=8, held_out=1)
    began = dataclasses.replace(began, data=data, num_steps=2, optimizer=AdamW(schedule=Schedule(peak=peak)))
    result = panax.fit(began, quiet=True, devices=jax.devices()[:1])
    trained = panax.load("runs/tiny_llama")
    params = trained.params
    save("weights", params, trained.state)
    with pytest.raises(
        DataError, match=r"weights has no tokenizer.json that can be read here, without which its weights mean"
    ):
        panax.preset("tiny_llama", init="hf:weights")
    trained.tokenizer.save("weights")
    said.clear()
    tuned = panax.preset("tiny_llama", data="*.txt", init="hf:weights", say=said.append)
    assert said == [] and tuned.data.tokenizer == PretrainedTokenizer(path="weights")
    assert tuned.optimizer.schedule.peak == pytest.approx(peak / 10)
    loaded = panax.preset("tiny_llama", data="*.txt", init="checkpoint:runs/tiny_llama")
    assert loaded.data.tokenizer.load().encode("the oak") == trained.tokenizer.encode("the oak")
    assert result.step == 2


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(here):
    experiment = panax.preset("tiny_llama", data="a.txt", say=lambda line: None)
    data = dataclasses.replace(experiment.data, tokenizer=BytePairTokenizer(vocab_size=310), held_out=0.2, batch_size=1)
    (here / "a.txt").write_text(" ".join(f"{number:b} {number:x}" for number in range(3000)))
    with pytest.raises(RecipeError, match=r"task.model.vocab_size=300 is less than the tokenizer's 310"):
        panax.run.prepare(dataclasses.replace(experiment, data=data))


def test_a_warning_states_in_python_which_tokenizer_it_is(here):
    with pytest.warns(UserWarning, match="tiny_llama: a tokenizer of 300 tokens is trained on the data"):
        panax.preset("tiny_llama", data="a.txt")


def test_data_of_other_kinds(here):
    text = TextData(corpus=TextFiles(paths=("a.txt",)))
    assert panax.preset("tiny_llama", data=text).data is text
    with TokenWriter("tokens", vocab_size=300, end_of_document=0) as writer:
        writer.append(np.arange(1, 200).tolist())
    assert panax.preset("tiny_llama", data="tokens").data.tokenizer is None
    vit = panax.preset("vit_b16_384", data="images")
    assert vit.data == ExampleData(examples=ImageFolder(path="images", size=384), held_out=0.02)
    assert vit.task.model.num_classes == 0
    with pytest.raises(RecipeError, match="vit_b16 takes one folder of images; got 2 paths"):
        panax.preset("vit_b16", data=["a", "b"])
    with pytest.raises(RecipeError, match="vit_b16 trains on ExampleData, and --data gives texts"):
        replace_data(panax.preset("vit_b16"), "a.txt")


def test_on_data_keeps_the_other_settings(here):
    (here / "x.jsonl").write_text(json.dumps({"text": "x"}))
    recipe = panax.Experiment(task=DecoderTask(model=TINY), data=TextData(batch_size=3, tokenizer=BytePairTokenizer()))
    changed = replace_data(recipe, "x.jsonl", "a.txt")
    assert (changed.data.batch_size, changed.data.tokenizer) == (3, BytePairTokenizer())
    assert [type(corpus).__name__ for corpus in changed.data.corpus.corpora] == ["Jsonl", "TextFiles"]
