"""From JSON lines of pairs to a model that prefers the chosen answers, by the library's own functions."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import panax
from panax.cli.main import main
from panax.core import DataError, RecipeError
from panax.data import BytePairTokenizer, Preferences, PretrainedTokenizer, TextData, TextFiles
from panax.models import DecoderConfig, DecoderTask, LoRA, NextToken, Preference
from panax.optim import AdamW, Schedule

WORDS = ["oak", "ash", "elm", "fir", "yew", "box"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that differ in content only: the answer names the same tree as the prompt, or another one."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    lines = []
    for number in range(160):
        right, wrong = rng.choice(WORDS, 2, replace=False)
        prompt = f"tree {number % 7}: {right}\nagain:"
        lines.append(json.dumps({"prompt": prompt, "chosen": f" {right}", "rejected": f" {wrong}"}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "words.txt").write_text(" ".join(json.loads(line)["prompt"] for line in lines))
    BytePairTokenizer(vocab_size=300).train(TextFiles(paths=(str(folder / "words.txt"),))).save(folder / "tokenizer")
    return folder


def experiment(folder: Path, name: str, **task: object) -> panax.Experiment:
    data = TextData(
        corpus=Preferences(paths=(str(folder / "pairs.jsonl"),)), tokenizer=PretrainedTokenizer(path=str(folder / "tokenizer")),
        sequence_length=64, batch_size=8, held_out=32, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    model = DecoderConfig(max_length=64, embed=32, num_layers=2, heads=4, kv_heads=4, ffn=64)
    settings = {"objective": Preference(beta=0.5), **task}
    return panax.Experiment(
        name=name, task=DecoderTask(model=model, **settings), data=data, num_steps=30, directory=str(folder / name),  # type: ignore[arg-type]
        optimizer=AdamW(schedule=Schedule(peak=3e-3)), log_every=1,
    )  # fmt: skip


@pytest.mark.full
def test_a_model_learns_what_is_preferred(folder: Path) -> None:
    recipe = experiment(folder, "preference")
    with pytest.raises(DataError, match=r"lacks reference_log_probability.* call panax.add_reference"):
        panax.fit(recipe, quiet=True)
    lines: list[str] = []
    begun = panax.add_reference(recipe, say=lines.append)
    assert any("of 160 pairs computed; cached in" in line for line in lines)
    result = panax.fit(begun, quiet=True)
    first = json.loads((folder / "preference" / "metrics.jsonl").read_text().splitlines()[0])
    # At the reference itself, rewards are 0, and the loss is log 2.
    assert first["train/loss"] == pytest.approx(np.log(2), rel=1e-6) and first["train/rewards/margins"] == 0.0
    assert result.evaluation["pairs"] == 32.0
    assert result.evaluation["rewards/accuracies"] >= 0.9 and result.evaluation["rewards/margins"] > 1.0
    assert result.evaluation["loss"] < 0.4
    # The run is evaluated again from its folder, with its pairs and their reference.
    evaluated = panax.evaluate(str(folder / "preference"))
    assert evaluated["rewards/margins"] == pytest.approx(result.evaluation["rewards/margins"], rel=1e-5)
    # The same data and weights are found again; other weights are evaluated again.
    lines.clear()
    assert panax.add_reference(recipe, say=lines.append).data == begun.data
    assert not any("computed" in line for line in lines)
    other = panax.add_reference(dataclasses.replace(recipe, seed=1), say=lines.append)
    assert other.data != begun.data and any("computed" in line for line in lines)


@pytest.mark.full
def test_an_adapter_begins_at_its_reference(folder: Path) -> None:
    """That of the model without it; a mesh with stages computes the same."""
    adapted = panax.add_reference(experiment(folder, "adapted", adapter=LoRA(rank=2)))
    recipe = experiment(folder, "plain")
    staged = dataclasses.replace(recipe, mesh=panax.mesh.MeshShape(stage=2, context=2, tensor=2, fsdp=1), seed=0)
    values = []
    for each in (adapted, panax.add_reference(recipe), panax.add_reference(staged)):
        assert isinstance(each.data, TextData) and isinstance(each.data.corpus, Preferences)
        values.append(load_file(str(each.data.corpus.reference))["log_probabilities"])
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)
    np.testing.assert_allclose(values[2], values[1], atol=1e-5)
    result = panax.fit(dataclasses.replace(adapted, num_steps=1), quiet=True)
    assert result.step == 1


def test_only_pairs_have_a_reference(folder: Path) -> None:
    recipe = experiment(folder, "other")
    text = TextData(corpus=TextFiles(paths=(str(folder / "words.txt"),)))
    with pytest.raises(RecipeError, match=r"takes data=TextData\(corpus=Preferences\(...\)\)"):
        panax.add_reference(dataclasses.replace(recipe, data=text))


def test_tasks_that_read_no_pairs_refuse_them(folder: Path) -> None:
    plain = dataclasses.replace(experiment(folder, "plain").task, objective=NextToken())
    with pytest.raises(
        RecipeError, match=r"DecoderTask would learn the bad ones too; set task\.objective=Preference\(\)"
    ):
        panax.fit(dataclasses.replace(experiment(folder, "plain"), task=plain), quiet=True)


@pytest.mark.full
def test_released_models_learn_pairs_by_one_command(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    model = DecoderConfig(max_length=64, embed=32, num_layers=2, heads=4, kv_heads=4, ffn=64, vocab_size=300)
    panax.adapters.huggingface.save("base", jax.jit(DecoderTask(model=model).init)(jax.random.key(0))[0])
    shutil.copytree(folder / "tokenizer", "base", dirs_exist_ok=True)
    command = ["train", "hf:base", "--data", str(folder / "pairs.jsonl"), "--data.batch-size", "8", "--num-steps", "25"]
    dpo = [*command, "--preference", "dpo", "--lora", "2"]
    assert main([*dpo, "--name", "dpo", "--log-every", "1"]) == 0
    assert "reference log-probabilities of 160 pairs computed" in capsys.readouterr().out
    first = json.loads(Path("runs/dpo/metrics.jsonl").read_text().splitlines()[0])
    assert first["train/loss"] == pytest.approx(np.log(2), rel=1e-6)
    # The same command again finds its reference, and its checkpoint.
    assert main([*dpo, "--name", "dpo", "--log-every", "1"]) == 0
    again = capsys.readouterr().out
    assert "computed" not in again and "all 25 steps are done" in again
    assert (
        main(["inspect", "hf:base", "--data", str(folder / "pairs.jsonl"), "--preference", "dpo", "--no-compile"]) == 0
    )
    assert "assumed to have reference_log_probability too" in capsys.readouterr().out.replace("\n", " ")
    assert main(command) == 2
    assert main([*command, "--preference", "ppo"]) == 2
    errors = capsys.readouterr().err
    assert "would learn the bad ones too" in errors and "--preference ppo; did you mean" in errors
    # Labeled answers, by the same flag.
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    labeled = [{"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
               for pair in pairs for name in ("chosen", "rejected")]  # fmt: skip
    Path("labeled.jsonl").write_text("\n".join(map(json.dumps, labeled)))
    command = [*command[:3], "labeled.jsonl", *command[4:]]
    assert main([*command, "--preference", "kto", "--name", "kto"]) == 0
    assert "rewards/chosen" in Path("runs/kto/metrics.jsonl").read_text()
