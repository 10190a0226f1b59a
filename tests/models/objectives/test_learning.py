"""From JSON lines of pairs to a model that prefers the chosen answers, by the library's own functions."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import panax
from panax.core import DataError, RecipeError
from panax.data import BytePairTokenizer, Preferences, PretrainedTokenizer, TextData, TextFiles
from panax.models import DecoderConfig, DecoderTask, LoRA, Preference
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
        name=name, task=DecoderTask(model=model, **settings), data=data, num_steps=60, directory=str(folder / name),  # type: ignore[arg-type]
        optimizer=AdamW(schedule=Schedule(peak=3e-3)), log_every=1,
    )  # fmt: skip


def test_a_model_learns_what_is_preferred(folder: Path) -> None:
    begun = panax.add_reference(experiment(folder, "preference"))
    result = panax.fit(begun)
    # At the reference itself, rewards are 0, and the loss is log 2.
    first = [json.loads(line) for line in (folder / "preference" / "metrics.jsonl").read_text().splitlines()]
    print(first[:2], result.evaluation)
    assert result.evaluation["rewards/accuracies"] >= 0.9
    assert result.evaluation["rewards/margins"] > 0.5
    assert result.evaluation["loss"] < 0.4
